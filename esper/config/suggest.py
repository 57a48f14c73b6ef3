"""The known name that a misspelt one probably stands for."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant, in words."""
    found = get_close_matches(key, known, 1, 0.0)
    return f"the nearest is {found[0]}" if found else "there are none"
