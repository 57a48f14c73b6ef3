import re
from pathlib import Path

import pytest

from esper.config import CONF, build, compose_config
from esper.evaluation.arms import ARMS
from esper.growth import GrowingHost, export
from esper.hosts import count_parameters

README = (Path(__file__).parent.parent / "README.md").read_text()


def take_home(path: Path) -> None:
    """A network as an evaluation would keep it."""
    path.parent.mkdir(parents=True)
    host = build(compose_config("evaluate", ["host=cifar_blind"]).host)
    arguments = {"blocks": 3, "channels": 16, "kernel": 1, "pools": 3, "pool_slots": False}
    described = {"target": "esper.hosts.CNNHost", "arguments": {**arguments, "resolution": 32, "classes": 10}}
    export(path, GrowingHost(host, coadapt=True), {}, host=described, about={"data": {"resolution": 32}})


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_python_of_the_readme_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    take_home(Path("outputs/evaluate/DATE_TIME/grown_57.pt"))
    names: dict[str, object] = {}
    exec(code, names)
    if "model" in names:
        assert names["behind"] == {}  # the seed ended blended
        assert count_parameters(names["model"]) == 3_482 + 9_280
    elif "network" in names:
        assert count_parameters(names["network"]) == 3_482
    else:
        assert isinstance(names["reward"], float)


def test_the_readme_lists_every_arm() -> None:
    arms = README[README.index("| arm | what it is |") :]
    assert all(f"`{arm}`" in arms for arm in ARMS)


def test_the_readme_lists_every_host_and_both_action_spaces() -> None:
    for group in ("host", "actions"):
        for preset in (CONF / group).glob("*.yaml"):
            assert f"| `{preset.stem}` |" in README
    for group in ("reward", "controller"):
        for preset in (CONF / group).glob("*.yaml"):
            assert preset.stem in README
