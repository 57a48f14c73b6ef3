"""Plans that are fixed before an episode starts."""

from esper.tasks import FixedPlan, refined_plans, screening_plans


def test_a_fixed_plan_fits_any_number_of_slots() -> None:
    slots = ["a", "b", "c", "d", "e"]
    pair = FixedPlan((("front", "norm"), ("back", "depthwise")), 0.25)
    assert {slot: name for slot, (name, _) in pair.start(slots).fossils.items()} == {
        "a": "norm", "b": "norm", "c": "norm", "d": "depthwise", "e": "depthwise",
    }  # fmt: skip
    assert list(pair.start(["a"]).fossils) == ["a"]
    places = {place: list(FixedPlan(((place, "norm"),)).start(slots).fossils) for place in ("first", "middle", "last")}
    assert places == {"first": ["a"], "middle": ["c"], "last": ["e"]}
    assert list(FixedPlan((("all", "norm"),)).start(slots).fossils) == slots
    assert FixedPlan().start(slots).fossils == {}
    assert pair.name == "norm in front, depthwise in back at 0.25"


def test_refined_plans_are_near_the_two_best_blueprints_and_were_not_screened() -> None:
    screened = screening_plans(["norm", "depthwise"])
    assert [plan.name for plan in screened] == [
        "none", "norm in all at 0.1", "norm in last at 0.1", "depthwise in all at 0.1", "depthwise in last at 0.1",
    ]  # fmt: skip
    refined = refined_plans("norm", "depthwise")
    assert not set(refined) & set(screened)
    assert {plan.name for plan in refined} >= {"norm in all at 0.25", "depthwise in front, norm in back at 0.1"}
    assert {name for plan in refined for _, name in plan.blueprints} == {"norm", "depthwise"}
    assert len(set(refined)) == len(refined)


def test_a_plan_survives_as_plain_data() -> None:
    pair = FixedPlan((("front", "norm"), ("back", "depthwise")), 0.25)
    assert FixedPlan.from_dict(pair.to_dict()) == pair
    assert FixedPlan.from_dict(FixedPlan().to_dict()) == FixedPlan()
