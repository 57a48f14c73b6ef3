"""Try the most promising blueprints in single slots, then plant the best one everywhere: a rule of ten numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.controllers.gated import SHARE_TOLERANCE, measured_contributions
from esper.lifecycle import ActionSpace, Op, Stage
from esper.observation import CANDIDATE_COLUMNS, LOG_SCALE, Observation

_UNDECIDED, _NOTHING = -2, -1
RULE_RANGES = {  # lowest and highest value of each number; `esper.tune` searches between them
    "start": (0.0, 0.5),
    "trial": (0.02, 0.3),
    "plant": (0.0, 0.6),
    "candidates": (1.0, 8.0),
    "min_worth": (-0.05, 0.25),
    "price": (0.0, 0.5),
    "enough": (0.0, 1.0),
    "positions": (-6.0, 6.0),
    "normalising": (-6.0, 6.0),
    "gating": (-6.0, 6.0),
}


@dataclass(frozen=True)
class TunedMemory:
    """What the rule knows in each episode."""

    contribution: Tensor  # [envs, slots], of a fully blended seed, relative to the loss; NaN before it is measured
    estimate: Tensor  # [envs, blueprints], contribution in a slot at the end of a trial; NaN before that
    tried: Tensor  # bool [envs, blueprints], whether a trial has begun
    choice: Tensor  # int64 [envs], the blueprint that is planted everywhere; -1 nothing, -2 undecided
    planted: Tensor  # bool [envs, slots], whether the slot has had a seed of that blueprint

    @property
    def is_undecided(self) -> Tensor:
        """Whether the rule still tries blueprints: bool [envs, 1]."""
        return (self.choice == _UNDECIDED).unsqueeze(1)


class TunedRule:
    """Tries blueprints, each in one slot, prunes them, and plants the best one in every slot, or nothing.

    A blueprint is preferred by its kind and by its cost: the weights of its kinds minus ln of its FLOPs relative to the
    host; a kind without a weight counts 0. It is worth the relative decrease of the validation loss that its seed
    brings, times the number of slots, minus `price` x its FLOPs in all slots relative to the host. Contributions are
    averaged with a weight that halves with every measurement. A trial ends when its contribution is measured.

    A planted seed that is worth less than nothing after as long as a trial is pruned, and its slot stays empty.

    Arguments:
        space: the action space
        start: share of the episode before which nothing is tried
        trial: share of the episode for which a seed is fully blended before it is judged
        plant: share of the episode before which the best blueprint is not planted everywhere
        candidates: number of preferred blueprints that are tried, rounded
        min_worth: what a blueprint must be worth to be planted
        price: relative decrease of the loss that pays for a seed that costs as much as the host
        enough: what a blueprint must be worth so that nothing else is tried
        positions: weight of blueprints that mix positions (kinds spatial and sequence)
        normalising: weight of blueprints that normalise
        gating: weight of blueprints that scale channels
    """

    flops = 0

    def __init__(
        self,
        space: ActionSpace,
        *,
        start: float,
        trial: float,
        plant: float,
        candidates: float,
        min_worth: float,
        price: float,
        enough: float,
        positions: float,
        normalising: float,
        gating: float,
    ) -> None:
        numbers = {
            "start": start, "trial": trial, "plant": plant, "candidates": candidates, "min_worth": min_worth,
            "price": price, "enough": enough, "positions": positions, "normalising": normalising, "gating": gating,
        }  # fmt: skip
        for key, (low, high) in RULE_RANGES.items():
            if not low <= numbers[key] <= high:
                raise ValueError(f"controller.tuned_rule.{key}={numbers[key]}: must be between {low:g} and {high:g}.")
        self._space = space
        self._start, self._trial, self._plant, self._candidates = start, trial, plant, round(candidates)
        self._min_worth, self._price, self._enough = min_worth, price, max(enough, min_worth)
        self._weights = {("spatial", "sequence"): positions, ("normalising",): normalising, ("gating",): gating}

    def begin(self, episode_seeds: Sequence[int]) -> TunedMemory:
        envs, slots, blueprints = len(episode_seeds), len(self._space.slots), len(self._space.blueprints)
        return TunedMemory(
            contribution=torch.full((envs, slots), torch.nan),
            estimate=torch.full((envs, blueprints), torch.nan),
            tried=torch.zeros(envs, blueprints, dtype=torch.bool),
            choice=torch.full((envs,), _UNDECIDED),
            planted=torch.zeros(envs, slots, dtype=torch.bool),
        )

    def act(self, observation: Observation, memory: TunedMemory) -> tuple[Tensor, TunedMemory]:
        view, slots = observation.view, observation.view.slots
        known = self._update(observation, memory)
        candidate, has_candidate = self._next_candidate(observation, known)
        undecided, is_judged = known.is_undecided, self._is_judged(observation, known.contribution)
        worth = self._worth(observation, known.estimate).gather(1, slots.blueprint.clamp(min=0))  # [envs, slots]
        lowest = torch.where(is_judged, worth, torch.inf).amin(1, keepdim=True)
        is_full = ~(slots.exists & ~slots.occupied).any(1, keepdim=True)
        may_try = undecided & has_candidate & self._has_come(observation, self._start)
        may_plant = ~undecided & (known.choice >= 0).unsqueeze(1) & self._has_come(observation, self._plant)
        is_wrong = ~undecided & (slots.blueprint != known.choice.unsqueeze(1))
        is_useless = ~undecided & is_judged & (known.contribution < self._price * self._seed_costs(observation))
        left = view.steps - view.step
        is_urgent = slots.live.sum(1, keepdim=True) >= left  # a decision fossilises one seed
        requests = (  # of those that are legal, the last one wins
            (Op.PRUNE, undecided & is_judged & (worth < self._min_worth)),
            (Op.FOSSILIZE, ~undecided & ~is_wrong & (is_judged | is_urgent)),
            (Op.GERMINATE, (may_try | (may_plant & ~known.planted)) & (left > 1)),
            (Op.PRUNE, may_try & is_full & is_judged & (worth <= lowest)),
            (Op.PRUNE, is_wrong | is_useless),
            (Op.ADVANCE, slots.live),
        )
        blueprint = torch.where(undecided.squeeze(1), candidate, known.choice).clamp(min=0)
        action = self._first_legal(observation, requests, blueprint, ~undecided)
        begun = (action[:, 0] == self._space.ops.index(Op.GERMINATE)).unsqueeze(1)
        names = torch.arange(len(self._space.blueprints))
        return action, replace(known, tried=known.tried | (begun & (names == blueprint.unsqueeze(1))))

    def _update(self, observation: Observation, memory: TunedMemory) -> TunedMemory:
        """The memory with the measurements of the last step, and with the choice if there is nothing left to try."""
        slots = observation.view.slots
        contribution = _average(observation, memory.contribution)
        is_kept = slots.occupied & ~slots.blending_out
        names = torch.arange(len(self._space.blueprints))
        grows = is_kept.unsqueeze(2) & (slots.blueprint.unsqueeze(2) == names)  # [envs, slots, blueprints]
        judged = grows & self._is_judged(observation, contribution).unsqueeze(2)
        means = torch.where(judged, contribution.unsqueeze(2), 0.0).sum(1) / judged.sum(1)
        estimate = torch.where(judged.any(1) & memory.is_undecided, means, memory.estimate)
        known = replace(memory, contribution=contribution, estimate=estimate)
        in_trial = (grows.any(1) & estimate.isnan()).any(1)
        best_worth, best = self._worth(observation, estimate).max(1)
        is_settled = (best_worth >= self._enough) | ~(in_trial | self._next_candidate(observation, known)[1].squeeze(1))
        decision = torch.where(best_worth >= self._min_worth, best, _NOTHING)
        choice = torch.where(memory.is_undecided.squeeze(1) & is_settled, decision, memory.choice)
        planted = memory.planted | (is_kept & (slots.blueprint == choice.unsqueeze(1)))
        return replace(known, choice=choice, planted=planted)

    def _next_candidate(self, observation: Observation, memory: TunedMemory) -> tuple[Tensor, Tensor]:
        """The preferred blueprint that was not tried yet, int64 [envs], and whether there is one: bool [envs, 1]."""
        columns = observation.candidates.sum(1) / observation.exists.sum(1).clamp(min=1).view(-1, 1, 1)
        preference = -LOG_SCALE * columns[..., CANDIDATE_COLUMNS.index("flops")]  # [envs, blueprints]
        for kinds, weight in self._weights.items():
            of_kinds = [CANDIDATE_COLUMNS.index(f"kind={kind}") for kind in kinds]
            preference = preference + weight * columns[..., of_kinds].amax(2)
        view = observation.view
        order = preference.argsort(dim=1, descending=True, stable=True)[:, : self._candidates]
        is_new = ~memory.tried.gather(1, order)
        candidate = order.gather(1, is_new.int().argmax(1, keepdim=True)).squeeze(1)
        has_time = view.step + self._trial * view.steps < view.steps - 1
        return candidate, is_new.any(1, keepdim=True) & has_time

    def _is_judged(self, observation: Observation, contribution: Tensor) -> Tensor:
        """Whether each seed's contribution is known after its trial: bool [envs, slots]."""
        slots, steps = observation.view.slots, observation.view.steps
        is_due = slots.steps_in_stage >= self._trial * steps - SHARE_TOLERANCE
        return (slots.stage == Stage.HOLDING) & is_due & ~contribution.isnan()

    def _has_come(self, observation: Observation, share: float) -> bool:
        return observation.view.step >= share * observation.view.steps - SHARE_TOLERANCE

    def _worth(self, observation: Observation, estimate: Tensor) -> Tensor:
        """What each blueprint is worth in all slots, [envs, blueprints]; -inf where nothing is known."""
        cost = torch.where(observation.exists.unsqueeze(2), _costs(observation), 0.0).sum(1)
        return (estimate * observation.exists.sum(1, keepdim=True) - self._price * cost).nan_to_num(nan=-torch.inf)

    def _seed_costs(self, observation: Observation) -> Tensor:
        """The FLOPs of each seed relative to the host: [envs, slots]; without a seed, of the first blueprint."""
        return _costs(observation).gather(2, observation.view.slots.blueprint.clamp(min=0).unsqueeze(2)).squeeze(2)

    def _first_legal(
        self, observation: Observation, requests: Sequence[tuple[Op, Tensor]], blueprint: Tensor, may_fill: Tensor
    ) -> Tensor:
        """The actions, int64 [envs, heads], of the last request that is legal, else WAIT.

        Of several slots, the one next to the middle of the host comes first. Where the action space allows it, an op
        that is wanted in all legal slots acts in all of them at once.

        Arguments:
            requests: ops, and where each is wanted: bool [envs, slots]
            blueprint: of a new seed, int64 [envs]
            may_fill: bool [envs, 1], whether a blueprint may germinate in all slots at once
        """
        space, masks, depth = self._space, observation.masks, observation.view.descriptors.depth
        wait = space.ops.index(Op.WAIT)
        heads = {
            head.name: torch.full_like(blueprint, space.default_option(head.name) if index else wait)
            for index, head in enumerate(space.heads)
        }
        slot = torch.zeros_like(blueprint)
        for op, where in requests:
            if op not in space.ops:
                continue
            index = space.ops.index(op)
            allowed = masks.slot[:, index]
            wanted = allowed[:, : len(space.slots)] & where
            chosen = torch.where(wanted, -(depth - 0.5).abs(), -torch.inf).argmax(1)
            if space.all_slots:
                is_all = allowed[:, -1] & (wanted == allowed[:, :-1]).all(1)
                is_all &= may_fill.squeeze(1) | (op is not Op.GERMINATE)
                chosen = torch.where(is_all, len(space.slots), chosen)
            heads["op"] = torch.where(wanted.any(1), index, heads["op"])
            slot = torch.where(wanted.any(1), chosen, slot)
        values = {**heads, "slot": slot, "blueprint": blueprint}
        return torch.stack([values[name] for name in heads], 1)


def _average(observation: Observation, old: Tensor) -> Tensor:
    """The mean contribution of each fully blended seed, relative to the loss; later measurements weigh more."""
    slots, now = observation.view.slots, observation.view.now
    new = measured_contributions(observation) / now.loss.clamp(min=1e-8).unsqueeze(1)
    mean = torch.where(old.isnan(), new, (old + new) / 2)
    return torch.where(slots.stage == Stage.HOLDING, torch.where(new.isnan(), old, mean), torch.nan)


def _costs(observation: Observation) -> Tensor:
    """The FLOPs of each blueprint in each slot, relative to the host: [envs, slots, blueprints]."""
    return (LOG_SCALE * observation.candidates[..., CANDIDATE_COLUMNS.index("flops")]).exp()
