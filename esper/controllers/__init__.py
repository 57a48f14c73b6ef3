"""Controllers: what decides about growth."""

from esper.controllers.agent import (
    OBSERVATION_BOUND,
    Agent,
    AgentController,
    AgentInterface,
    CheckedController,
    flat_actions,
    flat_mask,
)
from esper.controllers.contract import check_transferable, contract_differences, known_options, map_weights
from esper.controllers.controller import Controller, is_legal, make_action
from esper.controllers.distribution import FactoredDistribution, Logits
from esper.controllers.fragrow import FragrowController
from esper.controllers.gated import GatedController
from esper.controllers.heuristic import HeuristicController
from esper.controllers.load import (
    CRITIC_PREFIX,
    LAST_CHECKPOINT,
    METADATA_VERSION,
    POLICY_PREFIX,
    PRETRAINED,
    SavedController,
    acts_greedily,
    build_policy,
    check_metadata_version,
    find_checkpoint,
    is_new_weight,
    load_policy_weights,
    missing_weights,
    policy_weights,
    read_checkpoint_content,
    read_controller,
)
from esper.controllers.policy import EpisodeContext, LSTMState, Policy
from esper.controllers.policy_controller import (
    BlindPolicyController,
    PermutedPolicyController,
    PolicyController,
    PolicyDecision,
    PolicyMemory,
    ShuffledPolicyController,
)
from esper.controllers.random_controller import RandomController, calibrate_rates
from esper.controllers.schedule import ScheduleController, ScheduleEntry, keeps_every_seed, random_schedule
from esper.controllers.simple import NoGrowth, ReplayController
from esper.controllers.statistics import Moments, RunningStatistics
from esper.controllers.trials import TrialController
from esper.controllers.tuned_rule import RULE_RANGES, TunedRule

__all__ = [
    "CRITIC_PREFIX",
    "LAST_CHECKPOINT",
    "METADATA_VERSION",
    "OBSERVATION_BOUND",
    "POLICY_PREFIX",
    "PRETRAINED",
    "RULE_RANGES",
    "Agent",
    "AgentController",
    "AgentInterface",
    "BlindPolicyController",
    "CheckedController",
    "Controller",
    "EpisodeContext",
    "FactoredDistribution",
    "FragrowController",
    "GatedController",
    "HeuristicController",
    "LSTMState",
    "Logits",
    "Moments",
    "NoGrowth",
    "PermutedPolicyController",
    "Policy",
    "PolicyController",
    "PolicyDecision",
    "PolicyMemory",
    "RandomController",
    "ReplayController",
    "RunningStatistics",
    "SavedController",
    "ScheduleController",
    "ScheduleEntry",
    "ShuffledPolicyController",
    "TrialController",
    "TunedRule",
    "acts_greedily",
    "build_policy",
    "calibrate_rates",
    "check_metadata_version",
    "check_transferable",
    "contract_differences",
    "find_checkpoint",
    "flat_actions",
    "flat_mask",
    "is_legal",
    "is_new_weight",
    "keeps_every_seed",
    "known_options",
    "load_policy_weights",
    "make_action",
    "map_weights",
    "missing_weights",
    "policy_weights",
    "random_schedule",
    "read_checkpoint_content",
    "read_controller",
]
