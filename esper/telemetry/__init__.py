"""What a run shows of itself; nothing here changes what it learns."""

from esper.telemetry.anomalies import Anomalies, Attention
from esper.telemetry.dashboard import Dashboard
from esper.telemetry.episodes import EpisodeRecords, Episodes
from esper.telemetry.glossary import HEALTHY_KL
from esper.telemetry.health import Health
from esper.telemetry.picture import draw_rounds
from esper.telemetry.progress import Progress
from esper.telemetry.rounds import RoundRecords, conclusion
from esper.telemetry.timeline import timeline

__all__ = [
    "HEALTHY_KL",
    "Anomalies",
    "Attention",
    "Dashboard",
    "EpisodeRecords",
    "Episodes",
    "Health",
    "Progress",
    "RoundRecords",
    "conclusion",
    "draw_rounds",
    "timeline",
]
