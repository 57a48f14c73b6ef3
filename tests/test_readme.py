import re
from pathlib import Path

import pytest

from esper.config import build, compose_config
from esper.growth import GrowingHost, export
from esper.hosts import count_parameters

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
CODE = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def save_grown_network(path: Path) -> None:
    """A network as an evaluation saves it."""
    path.parent.mkdir(parents=True)
    host = build(compose_config("evaluate", ["host=cifar_blind"]).host)
    arguments = {"blocks": 3, "channels": 16, "kernel": 1, "pools": 3, "pool_slots": False}
    described = {"target": "esper.hosts.CNNHost", "arguments": {**arguments, "resolution": 32, "classes": 10}}
    export(path, GrowingHost(host, coadapt=True), {}, host=described, about={"data": {"resolution": 32}})


@pytest.mark.parametrize("code", CODE)
def test_the_python_in_readme_and_docs_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_grown_network(Path("outputs/evaluate/DATE_TIME/grown_57.pt"))
    names: dict[str, object] = {}
    exec(code, names)
    if "model" in names:
        assert names["isolated"] == {}  # the seed ended blended
        assert count_parameters(names["model"]) == 3_482 + 9_280
    elif "network" in names:
        assert count_parameters(names["network"]) == 3_482
    elif "variant" in names:
        assert names["variant"].size("train") == 600  # type: ignore[attr-defined]
    elif "PlantEverywhere" in names:
        agent = names["PlantEverywhere"](["WAIT", "GERMINATE all depthwise"])  # type: ignore[operator]
        assert (agent.act({}, {"action_mask": [1, 1]}), agent.act({}, {"action_mask": [1, 0]})) == (1, 0)
    else:
        assert isinstance(names["reward"], float)
