"""README and documentation: links, lists that must be complete, and a site that builds without warnings."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import esper
from esper.command_line import CONF
from esper.config import compose_config, task_specs
from esper.evaluation.arms import ARMS
from esper.grow.controllers import RULES

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", PROJECT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def page(name: str) -> str:
    return (DOCS / name).read_text()


def anchors(text: str) -> set[str]:
    """The anchors that MkDocs and GitHub give to headings."""
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    for link in LINK.findall(path.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{path.name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path.name}: {link}"


def test_the_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 200


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((PROJECT / "mkdocs.yml").read_text())["nav"]
    listed = {next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in navigation}
    assert {path.name for path in DOCS.glob("*.md")} == listed


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert (tmp_path / "site" / "concepts" / "index.html").is_file()


def test_the_evaluation_page_lists_every_arm() -> None:
    text = page("evaluate.md")
    table = text[text.index("| arm | what it is |") :]
    assert [arm for arm in ARMS if f"`{arm}`" not in table] == []


@pytest.mark.parametrize("name", ["Grow", "Grower", "slots"])
def test_the_page_about_growing_lists_every_argument(name: str) -> None:
    text = page("grow.md")
    arguments = set(inspect.signature(getattr(esper, name)).parameters) - {"model", "optimizer"}
    assert [argument for argument in arguments if f"`{argument}`" not in text] == []


def test_the_page_about_growing_states_the_defaults_of_the_callback() -> None:
    table = page("grow.md").partition("`esper.Grow(slots=")[2].partition("`esper.Grower(")[0]
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", table, re.MULTILINE)
    stated = {
        name: default
        for names, defaults in rows
        for name, default in zip(re.findall("`(.*?)`", names), re.findall("`(.*?)`", defaults), strict=True)
    }
    actual = {name: each.default for name, each in inspect.signature(esper.Grow).parameters.items()}
    assert {name: ast.literal_eval(default) for name, default in stated.items()} == actual


def test_the_page_about_growing_lists_every_rule() -> None:
    assert [rule for rule in RULES if f'| `"{rule}"` |' not in page("grow.md")] == []


@pytest.mark.parametrize(
    ("group", "name", "form"),
    [
        ("host", "concepts.md", "| `{}` |"),
        ("actions", "concepts.md", "| `{}` |"),
        ("reward", "concepts.md", "`{}`"),
        ("experiment", "train.md", "`{}`"),
        ("sweep", "sweeps.md", "{}"),
        ("data", "getting-started.md", "{}"),
    ],
)
def test_a_page_lists_every_preset_of_a_group(group: str, name: str, form: str) -> None:
    missing = [path.stem for path in (CONF / group).glob("*.yaml") if form.format(path.stem) not in page(name)]
    assert missing == []


@pytest.mark.parametrize("split", ["test", "heldout"])
def test_the_protocol_lists_the_tasks_of_the_distribution(split: str) -> None:
    """If families change before the first evaluation, write the new names into docs/generalisation.md."""
    overrides = ["+experiment=zoo_ppo", f"tasks.split={split}", f"tasks.counts.{split}=20"]
    names = [spec.name for spec in task_specs(compose_config("evaluate", overrides))]
    assert len(names) == 20
    assert f"| `split={split} tasks.counts.{split}=20` | {', '.join(names)} |" in page("generalisation.md")
