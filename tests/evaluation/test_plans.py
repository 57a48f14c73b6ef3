"""Plans and the candidates of searches."""

from itertools import islice

import pytest

from esper.config import build, build_action_space
from esper.controllers import ScheduleEntry, keeps_every_seed
from esper.environment import EpisodeStart
from esper.evaluation.plans import Plan, fill, first_blueprint, schedule_plans, static_plans
from esper.lifecycle import ActionSpace, Rules
from tests.fixtures_environment import config

SHORT = ("slots.blueprints=[depthwise,norm]",)


def space(*overrides: str) -> ActionSpace:
    return build_action_space(config(*SHORT, *overrides))


def rules(*overrides: str) -> Rules:
    built: Rules = build(config(*overrides).lifecycle)
    return built


def entry(at: float, slot: str = "block1", blueprint: str = "depthwise") -> ScheduleEntry:
    return ScheduleEntry(at=at, slot=slot, blueprint=[blueprint])


def test_static_candidates_start_with_obvious_ones_and_name_every_network_once() -> None:
    plans = list(static_plans(space(), ["wide2", "deep1"], "depthwise", 0, EpisodeStart()))
    assert [plan.start.host for plan in plans[:6]] == [None, None, "wide2", None, "deep1", None]
    assert plans[0].start.fossils == fill(space(), "depthwise")
    assert plans[1] == Plan(EpisodeStart())
    assert plans[3].start.fossils == fill(space(), "norm")
    assert len(plans) == len({plan.digest for plan in plans}) == 3**3 + 2
    assert all(not plan.schedule and plan.start.at == 0 for plan in plans)


def test_the_order_of_further_candidates_follows_from_the_seed() -> None:
    orders = [[plan.digest for plan in static_plans(space(), [], "norm", seed, EpisodeStart())] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.parametrize("lifecycle", ["quick", "default"])
def test_all_seeds_of_a_candidate_schedule_can_be_kept(lifecycle: str) -> None:
    own = rules(f"lifecycle={lifecycle}")
    plans = list(islice(schedule_plans(space(), own, 10, "depthwise", 0, EpisodeStart(measured=False)), 20))
    assert len({plan.digest for plan in plans}) == 20
    for plan in plans:
        assert plan.schedule
        assert not plan.start.measured
        assert keeps_every_seed(space(), own, 10, plan.schedule)


def test_a_schedule_is_valid_if_each_of_its_seeds_is_committed_in_time() -> None:
    quick, slow = rules("lifecycle=quick"), rules()
    assert keeps_every_seed(space(), quick, 10, [entry(8)])
    assert not keeps_every_seed(space(), quick, 10, [entry(9)])  # its health is not measured before the last step
    assert keeps_every_seed(space(), slow, 10, [entry(3)])
    assert not keeps_every_seed(space(), slow, 10, [entry(7)])
    assert keeps_every_seed(space(), quick, 10, [entry(7), entry(7, "block2")])
    assert not keeps_every_seed(space(), quick, 10, [entry(8), entry(8, "block2")]), "one seed in each step"


def test_a_small_space_of_schedules_ends() -> None:
    tiny = space("slots.names=[block1]", "slots.blueprints=[norm]", "actions.heads=[op]", "+actions.fixed.blend=ADD")
    plans = list(schedule_plans(tiny, rules("lifecycle=quick"), 3, "norm", 0, EpisodeStart()))
    assert [plan.schedule[0].at for plan in plans] == [0, 1]


def test_equal_plans_have_one_digest() -> None:
    own = space()
    grown_at_start = Plan(EpisodeStart(fossils=fill(own, "norm"), at=0.0))
    assert grown_at_start.digest == Plan(EpisodeStart(fossils=fill(own, "norm"))).digest
    assert grown_at_start.digest != Plan(EpisodeStart(fossils=fill(own, "norm"), at=0.5)).digest
    assert grown_at_start.digest != grown_at_start.with_lr_scale(2.0).digest


def test_a_plan_is_described_in_a_few_words() -> None:
    own = space()
    assert Plan(EpisodeStart()).describe(10) == "no growth"
    grown = Plan(EpisodeStart(fossils=fill(own, "norm"), at=0.25))
    assert grown.describe(10) == "norm in block1, block2, block3 at 0.25 of the budget"
    assert Plan(EpisodeStart(widen="wide2", at=0.5)).describe(10) == "widened to wide2 at 0.5 of the budget"
    assert Plan(EpisodeStart(host="deep1", lr_scale=2)).describe(10) == "host deep1; learning rates x 2"
    last = ScheduleEntry(at=0, slot="block3", blueprint=["norm"], blend="GATED")
    scheduled = Plan(EpisodeStart(), (entry(5), entry(0, "block2"), entry(5, "block3"), last))
    assert scheduled.describe(10) == (
        "depthwise in block2 at 0; norm in block3 at 0, blended by GATED; depthwise in block1, block3 at 0.5"
    )


def test_the_default_blueprint_is_the_first_that_the_host_has() -> None:
    assert first_blueprint(["window", "norm"], space()) == "norm"
    assert first_blueprint(["window"], space()) == space().blueprints[0]
