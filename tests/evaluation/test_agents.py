"""Agents from outside of esper as arms of an evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from esper.config import build_environment, compose_config
from esper.controllers import is_legal, make_action
from esper.environment import EpisodeStart
from esper.evaluate import prepare
from esper.evaluation.agents import agent_settings, build_agent
from esper.evaluation.run import evaluate
from esper.evaluation.runner import EpisodeJob, run_jobs
from esper.evaluation.selection import check_arms, reference_arm, selected_arms
from esper.lifecycle import ActionSpace, Op
from esper.observation import Observation
from tests.evaluation.fixtures_episodes import TASK, evaluated, load_episodes
from tests.test_gym import SMALL_ZOO

HERE = __name__


class PlainRule:
    """Plants a module in the first slot that is free, and keeps it as soon as it may."""

    def __init__(self, actions: Sequence[str]) -> None:
        self.actions, self.planted = actions, 0

    def act(self, observation: dict[str, np.ndarray], info: dict[str, Any]) -> int:
        assert not {"task", "family"} & set(info)  # they name what the host lacks
        legal = [self.actions[number] for number in np.flatnonzero(info["action_mask"])]
        for name in legal:
            if name.startswith("FOSSILIZE") or (name.endswith("conv_light ADD") and self.planted < 2):
                self.planted += name.startswith("GERMINATE")
                return self.actions.index(name)
        return self.actions.index("WAIT")


class RuleController:
    """The same rule as a controller."""

    flops = 0

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)

    def act(self, observation: Observation, memory: list[int]) -> tuple[torch.Tensor, list[int]]:
        planted, actions = list(memory), []
        for env, count in enumerate(memory):
            pairs = [(op, slot) for op in (Op.GERMINATE, Op.FOSSILIZE) for slot in self.space.slots]
            legal = [pair for pair in pairs if is_legal(self.space, observation.masks, env, *pair)]
            chosen = next((pair for pair in legal if pair[0] is Op.FOSSILIZE or count < 2), None)
            action = make_action(self.space, Op.WAIT)
            if chosen is not None:
                options = {"blueprint": "conv_light"} if chosen[0] is Op.GERMINATE else {}
                action = make_action(self.space, chosen[0], slot=chosen[1], **options)
                planted[env] += chosen[0] is Op.GERMINATE
            actions.append(action)
        return torch.stack(actions), planted


class Waiting:
    def act(self, observation: dict[str, np.ndarray], info: dict[str, Any]) -> np.int64:
        info["action_mask"][:] = 1
        return np.int64(0)


class LastAction(Waiting):
    """Chooses the last action, which is illegal at first."""

    def act(self, observation: dict[str, np.ndarray], info: dict[str, Any]) -> Any:
        super().act(observation, info)  # what an agent does to its mask changes nothing
        return len(info["action_mask"]) - 1


class Silent:
    def act(self, observation: dict[str, np.ndarray], info: dict[str, Any]) -> None:
        return None


class PruningController(RuleController):
    def act(self, observation: Observation, memory: list[int]) -> tuple[torch.Tensor, list[int]]:
        return make_action(self.space, Op.PRUNE, slot="block2").unsqueeze(0), memory


class FlatController(RuleController):
    def act(self, observation: Observation, memory: list[int]) -> tuple[torch.Tensor, list[int]]:
        return torch.zeros(1, dtype=torch.int64), memory


class NeedsMore(Waiting):
    def __init__(self, actions: Sequence[str], temperature: float) -> None:
        pass


class Mute:
    pass


class none(Waiting):  # noqa: N801
    pass


def config(agent: str, *overrides: str) -> Any:
    return compose_config("evaluate", [*TASK, f"agent={agent}", *overrides])


def test_an_agent_has_the_episodes_of_the_same_rule_as_a_controller(tmp_path: Path) -> None:
    episodes = {}
    for name in ("PlainRule", "RuleController"):
        evaluated(tmp_path / name, f"agent={HERE}:{name}", "controllers=[none]", "episodes=2")
        found = load_episodes(tmp_path / name / "episodes.jsonl")
        assert {episode.arm for episode in found} == {"none", name}
        episodes[name] = [episode for episode in found if episode.arm == name]
    assert sum(step.action["op"] == "GERMINATE" for step in episodes["PlainRule"][0].steps) == 2
    for agent, rule in zip(*episodes.values(), strict=True):
        assert (agent.episode_seed, agent.score, agent.flops) == (rule.episode_seed, rule.score, rule.flops)
        assert [step.action for step in agent.steps] == [step.action for step in rule.steps]


def test_the_agent_is_an_arm_beside_others_and_the_reference() -> None:
    assert selected_arms(config(f"{HERE}:Waiting", "controllers=[none,schedule]")) == ["none", "schedule", "Waiting"]
    assert "Waiting" in selected_arms(config(f"{HERE}:Waiting"))
    assert reference_arm(config(f"{HERE}:Waiting")) == "Waiting"
    assert reference_arm(config(f"{HERE}:Waiting", "reference=none")) == "none"
    check_arms(config(f"{HERE}:Waiting", "primary=none"))


def test_an_agent_that_waits_scores_like_the_host_without_growth(tmp_path: Path) -> None:
    evaluated(tmp_path, f"agent={HERE}:Waiting", "controllers=[none]", "episodes=1")
    ours, bare = load_episodes(tmp_path / "episodes.jsonl")
    assert ours.score == bare.score


def test_an_agent_is_scored_on_the_tasks_of_a_split(tmp_path: Path) -> None:
    overrides = prepare([f"agent={HERE}:Waiting", "tasks=cifar_zoo", "split=heldout", "controllers=[none]"])
    small = ("episodes=3", "environment.envs=3", "environment.workers=0", "environment.threads=1")
    composed = compose_config("evaluate", [*overrides, *SMALL_ZOO, *small])
    evaluate(composed, tmp_path, Console(quiet=True))
    episodes = [episode for episode in load_episodes(tmp_path / "episodes.jsonl") if episode.arm == "Waiting"]
    assert sorted(str(episode.host).partition("_")[2] for episode in episodes) == ["five_blocks", "kernel5", "waist"]


def test_a_split_and_the_experiment_of_a_distribution_are_added_to_the_command() -> None:
    assert prepare(["tasks=cifar_zoo", "split=test"]) == ["+experiment=zoo_ppo", "tasks=cifar_zoo", "tasks.split=test"]
    assert prepare(["+experiment=mine", "tasks=cifar_zoo"]) == ["+experiment=mine", "tasks=cifar_zoo"]
    assert prepare(["tasks=single"]) == ["tasks=single"]
    assert prepare(["episodes=2"]) == ["episodes=2"]


def test_changed_code_of_an_agent_gives_other_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "class Agent:\n    def act(self, observation, info):\n        return 0\n"
    (tmp_path / "changing_agent.py").write_text(code)
    before = agent_settings("changing_agent:Agent")
    assert agent_settings("changing_agent:Agent") == before
    (tmp_path / "changing_agent.py").write_text(code + "# changed\n")
    assert agent_settings("changing_agent:Agent") != before


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("Waiting", r"agent=Waiting: must be module:Class, such as my_agent:MyAgent\."),
        ("no_such_module:Waiting", r"agent=no_such_module:Waiting: there is no module no_such_module"),
        (f"{HERE}:Wating", rf"agent={HERE}:Wating: {HERE} has no class Wating; the nearest is Waiting\."),
        (f"{HERE}:HERE", rf"agent={HERE}:HERE: {HERE} has no class HERE"),
        (f"{HERE}:Mute", rf"agent={HERE}:Mute: Mute must have a method act\(observation, info\)"),
        (f"{HERE}:NeedsMore", r"the argument temperature of NeedsMore must have a default, or be one of actions, colu"),
        (f"{HERE}:none", r"the class must not have the name of an arm"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused(agent: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_arms(config(agent))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (
            "LastAction",
            r"agent=.*:LastAction: action 78 \(FOSSILIZE block3\) is not legal in step 0 of host; must",
        ),
        ("Silent", r"agent=.*:Silent: act returned None; must be a number from 0 to \d+\."),
        ("PruningController", r"agent=.*: PRUNE block2 is not legal in step 0; legal ops are WAIT, GERMINATE"),
        ("FlatController", r"agent=.*: act must return an int64 tensor of shape \[1, 4\] and its memory\."),
    ],
)
def test_an_action_that_is_not_legal_is_refused_by_name(agent: str, message: str) -> None:
    composed = config(f"{HERE}:{agent}")
    environment = build_environment(composed)
    controller = build_agent(composed, environment)
    job = EpisodeJob(agent, None, (1,), controller, EpisodeStart(), "")
    with pytest.raises(ValueError, match=message):
        run_jobs(environment, [job], {}, lambda: None, test=False)
