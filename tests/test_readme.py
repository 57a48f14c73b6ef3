import re
from pathlib import Path

import pytest

from esper.config import CONF
from esper.hosts import parameter_count

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_python_of_the_readme_runs(code: str) -> None:
    names: dict[str, object] = {}
    exec(code, names)
    if "model" in names:
        assert names["behind"] == {}  # the seed ended blended
        assert parameter_count(names["model"]) == 3_482 + 9_280
    else:
        assert isinstance(names["reward"], float)


def test_the_readme_lists_every_host_and_both_action_spaces() -> None:
    for group in ("host", "actions"):
        for preset in (CONF / group).glob("*.yaml"):
            assert f"| `{preset.stem}` |" in README
    for group in ("reward", "controller"):
        for preset in (CONF / group).glob("*.yaml"):
            assert preset.stem in README
