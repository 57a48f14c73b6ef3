"""Generate docs/configuration.md, the reference of all configuration, from conf/ and docstrings.

Write the page again after a change of either:

    python -c "from esper.config.reference import configuration_page as p; open('docs/configuration.md','w').write(p())"
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # has no type stubs
from hydra.utils import get_object

from esper.command_line import CONF

COMMANDS = ("run", "evaluate", "tune")
USAGE = {  # how to choose an option of groups that are not in a defaults list
    "controller": "+controller@controller.ARM=OPTION",
    "debug": "debug=OPTION",
    "hydra/launcher": "hydra/launcher=OPTION",
}
HIDDEN = ("_target_", "_partial_")
INTRODUCTION = """\
# Configuration

Set any key on the command line: `python -m esper.run +experiment=cifar_ppo rounds=50 ppo.lr=1e-3`. A key of a group's
option has the group in front: `lr` of `ppo` is `ppo.lr`. Choose an option by its name: `host=cifar_blind`.
`--cfg job` prints the whole configuration of a command.

`esper.config.reference` generates this page from `conf/` and from the docstrings of the targets (`_target_`)."""

Row = tuple[str, str, str]  # key, default, meaning


def configuration_page() -> str:
    """A page in Markdown with every key of every file in conf/."""
    keys = {name: [row for row in _rows(CONF / f"{name}.yaml") if row[0].split(".")[0] != "hydra"] for name in COMMANDS}
    known = {key: meaning for name in reversed(COMMANDS) for key, _, meaning in keys[name] if meaning}
    listed = list(dict.fromkeys(key.partition("@")[0] for rows in keys.values() for key, _, _ in rows))
    groups = sorted({path.parent.relative_to(CONF).as_posix() for path in CONF.glob("*/**/*.yaml")})
    parts = [INTRODUCTION]
    for name in COMMANDS:
        parts += [f"## Keys of esper.{name}", _table(keys[name], known)]
    for group in [*(key for key in listed if key in groups), *(group for group in groups if group not in listed)]:
        typed = USAGE.get(group, f"{group}=OPTION" if group in listed else f"+{group}=OPTION")
        parts += [f"## {group}", f"`{typed}`" + (f": {known[group]}" if group in known else "")]
        for path in sorted((CONF / group).glob("*.yaml")):
            is_global = "# @package _global_" in path.read_text()  # its keys are those of the commands
            parts += [f"### {group}: {path.stem}", *_opening(path), _table(_rows(path), known if is_global else {})]
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[Row], known: Mapping[str, str]) -> str:
    """Rows as a table; `known` has the meanings of keys whose row has none."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in rows:
        cells = (f"`{key}`", f"`{default}`" if default else "", meaning or known.get(key, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else "No keys."


def _opening(path: Path) -> Iterator[str]:
    """The comments at the top of a file, commands as code and others as a paragraph, and its target."""
    text = path.read_text()
    lines = [line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    commands = [re.sub(r"\s{2,}(# )?", "  # ", line, count=1) for line in lines if line.startswith("python ")]
    if commands:
        yield "\n".join(["```sh", *commands, "```"])
    if words := " ".join(line for line in lines if not line.startswith(("python ", "@package"))):
        yield words
    if target := yaml.safe_load(text).get("_target_"):
        yield f"Builds `{target}`. {_documentation(target)[0]}".strip()


def _rows(path: Path) -> Iterator[Row]:
    """The keys of a file. A key without a comment has the meaning of the same key in the file's base option."""
    text = path.read_text()
    bases = [item for item in yaml.safe_load(text).get("defaults", []) if isinstance(item, str)]
    files = [path.with_name(f"{base.partition('@')[0]}.yaml") for base in bases]
    inherited = {key: meaning for file in files if file.is_file() for key, _, meaning in _rows(file)}
    for key, default, meaning in _walk(yaml.compose(text, yaml.SafeLoader), text, ""):
        yield key, default, meaning or inherited.get(key, "")


def _walk(mapping: yaml.MappingNode, text: str, prefix: str) -> Iterator[Row]:
    """A row for each key; nested keys too, unless they are on one line."""
    _, arguments = _documentation(_target(mapping))
    for key, value in mapping.value:
        if key.value == "defaults" and not prefix:
            yield from _choices(value, text)
        elif key.value not in HIDDEN:
            nested = isinstance(value, yaml.MappingNode) and not value.flow_style
            comment = _comment(text, key, key if nested else value)
            meaning = comment or arguments.get(key.value, "") or _documentation(_target(value))[0]
            if meaning or _target(value) or not nested:
                yield prefix + key.value, _target(value) if nested else _written(value, text), meaning
            if nested:
                yield from _walk(value, text, f"{prefix}{key.value}.")


def _choices(defaults: yaml.SequenceNode, text: str) -> Iterator[Row]:
    """The options in a defaults list: of groups, or as named parts (`cifar_blind@hosts.cifar_blind`)."""
    for item in defaults.value:
        if isinstance(item, yaml.MappingNode):
            ((key, value),) = item.value
            yield key.value.removeprefix("override ").removeprefix("/"), value.value, _comment(text, key, value)
        elif "@" in item.value:
            option, _, key = item.value.partition("@")
            yield key, option, ""


def _comment(text: str, first: yaml.Node, last: yaml.Node) -> str:
    """The trailing comments of the lines of a key and its value."""
    is_block = isinstance(last, yaml.SequenceNode) and not last.flow_style  # ends where the next key begins
    lines = text.splitlines()[first.start_mark.line : last.end_mark.line + (not is_block)]
    return "; ".join(found[1] for line in lines if (found := re.search(r"\s# (.*)$", line)))


def _written(value: yaml.Node, text: str) -> str:
    """The source text of a value, on one line."""
    if isinstance(value, yaml.ScalarNode):
        return value.value or '""'
    source = text[value.start_mark.index : value.end_mark.index]
    if not value.flow_style:
        content = yaml.safe_load(" " * value.start_mark.column + source)
        source = yaml.safe_dump(content, default_flow_style=True, sort_keys=False, width=10_000)
    return " ".join(source.split())


def _target(node: yaml.Node) -> str:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((str(value.value) for key, value in pairs if key.value == "_target_"), "")


def _documentation(target: str) -> tuple[str, dict[str, str]]:
    """The first paragraph and the arguments of a docstring; only of esper, since those of libraries change."""
    text = inspect.getdoc(get_object(target)) or "" if target.startswith("esper.") else ""
    first, (_, _, section) = text.partition("\n\n")[0], text.partition("Arguments:\n")
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    arguments = {name.strip(): " ".join(meaning.split()) for names, meaning in entries for name in names.split(",")}
    return " ".join(first.split()), arguments
