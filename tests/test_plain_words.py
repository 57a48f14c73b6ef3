"""Words of the first version that a PyTorch engineer would not search for; the list says what to write instead."""

import re
from pathlib import Path

PROJECT = Path(__file__).parent.parent
INSTEAD = {  # pattern -> what to write; Lightning, PPO and torch's schedulers have epochs, CMA-ES has a method tell
    r"foretell\w*|foretold": "value_target, predict",
    r"told|(?<!_search\.)tells?|telling|asked|speaks?|says?": "describe, report, requested, is_rank_zero",
    r"rooms?|house|comes? home": "package, architecture, export",
    r"what is not finite|not finite": "non-finite values",
    r"ways?": "training_digest, mode, method",
    r"(?<!make )bench": "ArmContext",
    r"stock|keeper|books|paid|worlds?(?!_size)|watchers?": "HostPool, SnapshotStore, accounting, VectorEnv",
    r"played|plays?|playing": "run",
    r"timetables?": "schedule",
    r"so many|as did better|lest|for it alone|more to turn|newborn": "a number; so that ... does not; new seed",
    r"work": "flops, cost, run",
    r"(?<!Lightning )(?<!PPO )(?<!one_)(?<!on_)(?<!last_)(?<!every_n_)epoch(?!s|_end|_progress|_start)": "step",
    r"garden\w*|nets|locks": "a name that describes it",
}
EPOCH_MEANS_STEP = (
    "lifecycle",
    "blueprints",
    "hosts",
    "growth",
    "observation",
    "environment",
    "rewards",
    "controllers",
)
EXEMPT = {"esper/renames.py"}  # has the old names
STORIES = "_GIRLS = ("  # in esper/data/synthetic.py, where the vocabulary and sentences of the stories begin
LETTER = "[A-Za-z]"
FORBIDDEN = {re.compile(rf"(?<!{LETTER})(?:{words})(?!{LETTER})", re.IGNORECASE): new for words, new in INSTEAD.items()}
FILES = sorted(
    str(path.relative_to(PROJECT))
    for place, pattern in (("esper", "*.py"), ("conf", "*.yaml"), (".", "*.md"), ("docs", "*.md"))
    for path in ((PROJECT / place).glob(pattern) if place == "." else (PROJECT / place).rglob(pattern))
)


def forbidden_words(name: str) -> list[str]:
    """The words of a file that are not plain, and what to write."""
    text = (PROJECT / name).read_text().partition(STORIES)[0]
    if name in ("docs/migration.md", "CHANGELOG.md"):
        text = re.sub(r"`[^`]*`", "", text)  # old names
    forbidden = dict(FORBIDDEN)
    if name.startswith("esper/") and name.split("/")[1] in EPOCH_MEANS_STEP:
        forbidden[re.compile(r"(?<![A-Za-z])epochs(?![A-Za-z])")] = "steps"
    return [
        f"{name}, line {number}: {match[0]!r}, write {new}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, new in forbidden.items()
        for match in pattern.finditer(line)
    ]


def test_files_use_plain_words() -> None:
    assert [found for name in FILES if name not in EXEMPT for found in forbidden_words(name)] == []
