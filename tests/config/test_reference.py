import re
from pathlib import Path

import pytest

from esper.command_line import CONF
from esper.config import reference
from esper.config.reference import configuration_page
from esper.hosts import CNNHost

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def page() -> str:
    return configuration_page()


def section(page: str, title: str) -> str:
    """The section of one option."""
    return page.partition(f"\n### {title}\n")[2].partition("\n#")[0]


def test_the_page_in_docs_is_up_to_date(page: str) -> None:
    assert PAGE.read_text() == page, reference.__doc__


def test_every_option_of_every_group_has_a_section(page: str) -> None:
    options = [path.relative_to(CONF) for path in CONF.glob("*/**/*.yaml")]
    assert len(options) > 80
    for option in options:
        assert f"\n### {option.parent.as_posix()}: {option.stem}\n" in page


def test_the_meaning_of_a_key_is_its_comment_in_the_yaml(page: str) -> None:
    comment = next(
        line.partition(" # ")[2]
        for line in (CONF / "environment/default.yaml").read_text().splitlines()
        if line.startswith("attribution_every")
    )
    assert comment
    assert f"| `attribution_every` | `1` | {comment} |" in section(page, "environment: default")


def test_the_meaning_of_a_key_without_a_comment_is_in_the_docstring_of_its_target(page: str) -> None:
    entry = re.search(r"^ +classes: (.*)$", CNNHost.__doc__ or "", re.MULTILINE)
    assert entry is not None
    assert f"| `classes` | `10` | {entry[1]} |" in section(page, "host: cifar_blind")


def test_a_key_of_a_derived_option_has_the_meaning_of_its_base_option(page: str) -> None:
    base, derived = section(page, "ppo: default"), section(page, "ppo: few_episodes")
    meaning = next(line for line in base.splitlines() if line.startswith("| `target_kl` |")).split(" | ")[2]
    assert f"| `target_kl` | `0.012` | {meaning}" in derived


def test_top_level_keys_have_value_and_comment(page: str) -> None:
    run = page.partition("## Keys of esper.run")[2].partition("\n## ")[0]
    assert "| `rounds` | `100` | " in run
    assert "`hydra" not in run
