"""Probe, then commit: the best rule of a family that first tries blueprints and then plants the best one everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.environment.oracle_tasks import SPLITS
from esper.environment.task_oracle import TaskOracle
from esper.lifecycle import ActionSpace, Op
from esper.observation import CANDIDATE_COLUMNS, LOG_SCALE, Observation
from esper.rng import derive_seed, make_generator

UNDECIDED, NOTHING = -2, -1
PURPOSE = "probe"  # of the episode seeds that the rule is tuned on
DRAWS = 256  # rules that are drawn
FINALISTS = 16  # rules that run all tasks again
FINALIST_EPISODES = 4  # of each task
START_RANGE, PATIENCE_RANGE = (0, 4), (1, 5)  # steps, both included
THRESHOLD_RANGE, PRICE_RANGE, ENOUGH_RANGE = (0.0, 6.0), (0.0, 15.0), (4.0, 20.0)  # points


@dataclass(frozen=True)
class ProbeRules:
    """One rule in each row. A blueprint is worth contribution - price x cost, summed over all slots of a host."""

    candidates: Tensor  # int64 [rules, blueprints], what is tried, in this order; -1 at the end for none
    start: Tensor  # int64 [rules], step of the first probe
    patience: Tensor  # int64 [rules], steps until a probe's contribution is read
    threshold: Tensor  # [rules], points that a blueprint must be worth to be planted
    price: Tensor  # [rules], points for a cost as large as that of the host
    enough: Tensor  # [rules], points that a blueprint must be worth so that nothing else is tried

    def __getitem__(self, rows: Tensor) -> "ProbeRules":
        return ProbeRules(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class ProbeMemory:
    """What a rule knows in an episode."""

    estimate: Tensor  # [envs, blueprints], contribution in a slot; NaN before it was read
    choice: Tensor  # int64 [envs], the blueprint that is planted everywhere; NOTHING or UNDECIDED


class ProbeThenCommit:
    """Tries candidates in free slots, as many at a time as there are slots, and then commits to one of them or to none.

    Arguments:
        space: the action space
        rules: the rule of each environment
    """

    def __init__(self, space: ActionSpace, rules: ProbeRules) -> None:
        self._space, self._rules = space, rules

    def begin(self, envs: int) -> ProbeMemory:
        """The memory at the start of the episodes."""
        return ProbeMemory(torch.full((envs, len(self._space.blueprints)), torch.nan), torch.full((envs,), UNDECIDED))

    def act(self, observation: Observation, memory: ProbeMemory) -> tuple[Tensor, ProbeMemory]:
        """The actions, int64 [envs, heads], and the memory for the next step."""
        rules, slots = self._rules, observation.view.slots
        names = torch.arange(len(self._space.blueprints))
        is_read = slots.live & (slots.age >= rules.patience.unsqueeze(1))
        grows = slots.live.unsqueeze(2) & (slots.blueprint.unsqueeze(2) == names)  # [envs, slots, blueprints]
        estimate = _mean(slots.contribution, grows & is_read.unsqueeze(2), memory.estimate)
        worth = self._worth(observation, estimate)
        wanted = rules.candidates.clamp(min=0)
        is_open = (rules.candidates >= 0) & estimate.gather(1, wanted).isnan()
        is_new = is_open & ~grows.any(1).gather(1, wanted)
        decided = ~is_open.any(1) | (worth >= rules.enough.unsqueeze(1)).any(1)
        best_worth, best = worth.max(1)
        choice = torch.where(best_worth >= rules.threshold, best, NOTHING)
        choice = torch.where((memory.choice == UNDECIDED) & decided, choice, memory.choice)
        probes = (choice == UNDECIDED) & is_new.any(1) & (observation.view.step >= rules.start)
        candidate = wanted.gather(1, is_new.int().argmax(1, keepdim=True)).squeeze(1)
        planted = torch.where(probes, candidate, choice)
        is_full = ~(slots.exists & ~slots.occupied).any(1)
        replaced = is_read & (probes & is_full).unsqueeze(1)
        wrong = (choice != UNDECIDED).unsqueeze(1) & (slots.blueprint != choice.unsqueeze(1))
        return self._action(observation, planted, wrong | replaced), ProbeMemory(estimate, choice)

    def _worth(self, observation: Observation, estimate: Tensor) -> Tensor:
        """What each blueprint is worth in all slots, [envs, blueprints]; -inf where nothing is known."""
        column = observation.candidates[:, 0, :, CANDIDATE_COLUMNS.index("flops")]  # the same in all slots
        worth = estimate - self._rules.price.unsqueeze(1) * (LOG_SCALE * column).exp()
        return torch.nan_to_num(worth * observation.exists.sum(1, keepdim=True), nan=-torch.inf)

    def _action(self, observation: Observation, planted: Tensor, pruned: Tensor) -> Tensor:
        """PRUNE one of the slots `pruned`, bool [envs, slots]; else GERMINATE `planted`, int64 [envs]; else WAIT."""
        space, masks, depth = self._space, observation.masks, observation.view.descriptors.depth
        heads = {
            head.name: torch.full_like(planted, space.default_option(head.name) if index else space.ops.index(Op.WAIT))
            for index, head in enumerate(space.heads)
        }
        may_grow = (planted >= 0) & (observation.view.step < observation.view.steps - 1)
        for op, where in ((Op.GERMINATE, may_grow.unsqueeze(1)), (Op.PRUNE, pruned)):  # the later op comes first
            index = space.ops.index(op)
            legal = masks.slot[:, index, : depth.shape[1]] & where  # single slots only
            middle = torch.where(legal, -(depth - 0.5).abs(), -torch.inf).argmax(1)
            heads["op"] = torch.where(legal.any(1), index, heads["op"])
            heads["slot"] = torch.where(legal.any(1), middle, heads["slot"])
        heads["blueprint"] = planted.clamp(min=0)
        return torch.stack(list(heads.values()), 1)


def _mean(values: Tensor, where: Tensor, otherwise: Tensor) -> Tensor:
    """The mean over slots of values [envs, slots] where [envs, slots, blueprints] is true; else `otherwise`."""
    total = torch.where(where, values.unsqueeze(2), 0.0).sum(1)
    return torch.where(where.any(1), total / where.sum(1), otherwise)


@torch.no_grad()
def run_probes(oracle: TaskOracle, rules: ProbeRules, episode_seeds: Sequence[int]) -> Tensor:
    """The score of one episode for each rule and episode seed: [envs]."""
    policy = ProbeThenCommit(oracle.space, rules)
    observation, memory = oracle.reset(episode_seeds), policy.begin(len(episode_seeds))
    for _ in range(oracle.steps):
        action, memory = policy.act(observation, memory)
        observation = oracle.step(action).observation
    return oracle.outcome()["score"]


def tune_probes(
    oracle: TaskOracle, numbers: Sequence[int] = SPLITS["train"], draws: int = DRAWS, rng_seed: int = 0
) -> ProbeRules:
    """The rule with the highest mean score over some tasks, of `draws` that are drawn: one row.

    Each runs one episode of every task. The best of them run more, with other noise, and these decide.
    """
    drawn = draw_rules(draws, len(oracle.space.blueprints), rng_seed)
    first, *others = [derive_seed(PURPOSE, rng_seed, index) for index in range(1 + FINALIST_EPISODES)]
    means = _mean_scores(oracle, drawn, numbers, [first])
    finalists = drawn[means.topk(min(FINALISTS, draws)).indices]
    again = _mean_scores(oracle, finalists, numbers, others)
    return finalists[again.argmax().view(1)]


def _mean_scores(oracle: TaskOracle, rules: ProbeRules, numbers: Sequence[int], rng_seeds: Sequence[int]) -> Tensor:
    """The mean score of each rule over one episode of each task and random seed: [rules]."""
    seeds = [oracle.seed_of_task(number, rng_seed) for number in numbers for rng_seed in rng_seeds]
    count = len(rules.start)
    rows = torch.arange(count).repeat_interleave(len(seeds))
    return run_probes(oracle, rules[rows], seeds * count).view(count, -1).mean(1)


def draw_rules(count: int, blueprints: int, rng_seed: int) -> ProbeRules:
    """Some rules at random."""
    generator = make_generator(PURPOSE, rng_seed)

    def draw(bounds: tuple[float, float]) -> Tensor:
        return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(count, generator=generator)

    order = torch.rand(count, blueprints, generator=generator).argsort(1)
    tried = torch.randint(1, blueprints + 1, (count, 1), generator=generator)
    return ProbeRules(
        candidates=torch.where(torch.arange(blueprints) < tried, order, -1),
        start=torch.randint(START_RANGE[0], START_RANGE[1] + 1, (count,), generator=generator),
        patience=torch.randint(PATIENCE_RANGE[0], PATIENCE_RANGE[1] + 1, (count,), generator=generator),
        threshold=draw(THRESHOLD_RANGE),
        price=draw(PRICE_RANGE),
        enough=draw(ENOUGH_RANGE),
    )
