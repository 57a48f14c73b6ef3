"""Lightning callbacks that report metrics, write files and fill loggers; none of them changes training."""

from esper.telemetry.anomalies import Anomalies, DetailWindow
from esper.telemetry.checks import Thresholds
from esper.telemetry.dashboard import Dashboard
from esper.telemetry.episodes import EpisodeBuffer, EpisodeWriter
from esper.telemetry.health import Health
from esper.telemetry.metrics import HEALTHY_KL
from esper.telemetry.progress import ProgressDisplay
from esper.telemetry.round_plots import draw_rounds
from esper.telemetry.rounds import RoundWriter, summary_table
from esper.telemetry.timeline import timeline

__all__ = [
    "HEALTHY_KL",
    "Anomalies",
    "Dashboard",
    "DetailWindow",
    "EpisodeBuffer",
    "EpisodeWriter",
    "Health",
    "ProgressDisplay",
    "RoundWriter",
    "Thresholds",
    "draw_rounds",
    "summary_table",
    "timeline",
]
