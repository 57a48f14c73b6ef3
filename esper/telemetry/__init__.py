"""What a run shows of itself."""

from esper.telemetry.picture import draw_rounds
from esper.telemetry.progress import Progress
from esper.telemetry.rounds import RoundRecords, conclusion

__all__ = ["Progress", "RoundRecords", "conclusion", "draw_rounds"]
