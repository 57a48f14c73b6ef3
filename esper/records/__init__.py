"""Records of episodes and rounds; training and evaluation share one type, reader and writer."""

from esper.records.files import LineWriter, read_episodes, read_lines, read_rounds
from esper.records.log import EpisodeLog, make_record, named_action, to_plain
from esper.records.record import HELD_OUT, RECORD_VERSION, EpisodeRecord, Germination, StepEntry

__all__ = [
    "HELD_OUT",
    "RECORD_VERSION",
    "EpisodeLog",
    "EpisodeRecord",
    "Germination",
    "LineWriter",
    "StepEntry",
    "make_record",
    "named_action",
    "read_episodes",
    "read_lines",
    "read_rounds",
    "to_plain",
]
