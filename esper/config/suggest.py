"""Suggestions for misspelt names."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest(key: str, known: Sequence[str]) -> str:
    """The most similar known key, as the end of a message."""
    matches = get_close_matches(key, known, 1, 0.0)
    return f"the nearest is {matches[0]}" if matches else "there are none"
