"""Tune the numbers of a rule by CMA-ES on the training tasks of an environment."""

from esper.tuning.job import tune
from esper.tuning.ledger import TUNING_RECORDS, EpisodeLedger, run_rules
from esper.tuning.tuner import GenerationResult, RuleTuner, TuneResult

__all__ = ["TUNING_RECORDS", "EpisodeLedger", "GenerationResult", "RuleTuner", "TuneResult", "run_rules", "tune"]
