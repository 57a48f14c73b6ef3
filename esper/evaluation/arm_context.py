"""What the arms of an evaluation create their jobs from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from esper.controllers import Controller, NoGrowth, PolicyController, ScheduleEntry
from esper.environment import Environment, EpisodeStart
from esper.evaluation.plans import Plan, fill, first_blueprint
from esper.evaluation.runner import EpisodeJob, digest
from esper.records import EpisodeRecord
from esper.tasks import FixedPlan


@dataclass
class ArmContext:
    """Everything that arms create their jobs from.

    Arguments:
        environment: that episodes run in
        episode_seeds: the same for each arm
        build_rule: builds a hand-written controller by the name of its arm
        settings: returns the configuration of that controller as plain data
        policies: trained controllers by label
        weights: by label, the digest of a policy's weights and whether it acts greedily or samples
        training_digests: by label, the digest of a trained controller's task and training settings
        reference: finished episodes of the reference arm
        best_schedule: the result of the schedule search without a budget; None before the search
        recorded_actions: actions of a recorded episode for `replay`; None uses the reference's episodes
        blueprint: of arms that fill all slots, in order of preference
        net2net_host: variant of the host that net2net widens it to
        plans: that searches have chosen, by arm and name of the task
        fixed_plan: that is best on average over the training tasks, if it is known
    """

    environment: Environment
    episode_seeds: Sequence[int]
    build_rule: Callable[[str], Controller[Any]]
    settings: Callable[[str], object]
    policies: Mapping[str, PolicyController] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    training_digests: Mapping[str, str] = field(default_factory=dict)
    reference: list[EpisodeRecord] = field(default_factory=list)
    best_schedule: Sequence[ScheduleEntry] | None = None
    recorded_actions: Sequence[Mapping[str, str]] | None = None
    blueprint: Sequence[str] = ()
    net2net_host: str = ""
    plans: dict[str, Mapping[str, Plan]] = field(default_factory=dict)
    fixed_plan: FixedPlan | None = None

    @property
    def is_budgeted(self) -> bool:
        """Whether episodes have a budget of FLOPs instead of a number of batches."""
        return self.environment.is_budgeted

    @property
    def blind_start(self) -> EpisodeStart:
        """The start of an arm that looks at no measurement, so that it pays for none under a budget.

        A gate of the lifecycle that requires a contribution needs it to be measured in every arm.
        """
        gates = self.environment.rules.gates.values()
        return EpisodeStart(measured=not self.is_budgeted or any(gate.contribution is not None for gate in gates))

    def job_per_seed(
        self, arm: str, controller: Controller[Any], inputs: object, start: EpisodeStart | None = None
    ) -> list[EpisodeJob]:
        """One job for each episode seed, without a trained controller."""
        episode_start = EpisodeStart() if start is None else start
        variant = digest([inputs, episode_start.to_dict()])
        return [
            EpisodeJob(arm, None, (episode_seed,), controller, episode_start, variant, variant)
            for episode_seed in self.episode_seeds
        ]

    def plan_jobs(self, arm: str, plan: Plan) -> list[EpisodeJob]:
        """One job for each episode seed, of an arm that follows a plan."""
        return self.jobs_of_plans(arm, dict.fromkeys(self.episode_seeds, plan))

    def jobs_of_plans(self, arm: str, plans: Mapping[int, Plan]) -> list[EpisodeJob]:
        """One job for each episode seed, which has a plan of its own."""
        jobs = []
        for episode_seed, chosen in plans.items():
            plan = chosen.within(self.environment.host_pool.slot_names(episode_seed))
            controller = plan.controller(self.environment.space, self.environment.rules)
            jobs.append(EpisodeJob(arm, None, (episode_seed,), controller, plan.start, plan.digest, plan.digest))
        return jobs

    def plan_of_fixed(self, fixed: FixedPlan, slots: Sequence[str]) -> Plan:
        """The plan in a host with these slots."""
        return Plan(replace(self.blind_start, fossils=fixed.start(slots).fossils, at=fixed.at))

    def filled_plan(self, **changes: Any) -> Plan:
        """Every slot filled with the default blueprint; `changes` are other fields of the start."""
        space = self.environment.space
        fossils = fill(space, first_blueprint(self.blueprint, space))
        return Plan(replace(self.blind_start, fossils=fossils, **changes))

    def widened_plan(self, moment: float) -> Plan:
        """The host, widened once."""
        return Plan(replace(self.blind_start, widen=self.net2net_host, at=moment))

    def no_growth(self) -> NoGrowth:
        return NoGrowth(self.environment.space)

    def reference_by_checkpoint(self) -> dict[str | None, list[EpisodeRecord]]:
        """The reference's episodes in the order of the episode seeds."""
        by_checkpoint: dict[str | None, list[EpisodeRecord]] = {}
        for episode in sorted(self.reference, key=lambda episode: self.episode_seeds.index(episode.episode_seed)):
            by_checkpoint.setdefault(episode.checkpoint, []).append(episode)
        return by_checkpoint


CreateJobs = Callable[[ArmContext], list[EpisodeJob]]
