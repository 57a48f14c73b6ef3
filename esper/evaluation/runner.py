"""Run controllers on the same episodes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from esper.controllers import Controller
from esper.environment import Environment, rated
from esper.records import EpisodeLog, episode, plain


def run_round(
    environment: Environment, controller: Controller[Any], seeds: Sequence[int], on_step: Callable[[], None]
) -> tuple[EpisodeLog, float]:
    """N whole episodes side by side, and the seconds they took."""
    started = time.perf_counter()
    observation, memory = environment.reset(seeds), controller.begin(seeds)
    log = EpisodeLog(environment.space, list(seeds))
    for _ in range(environment.steps):
        action, memory = controller.act(observation, memory)
        step = environment.step(action)
        log.add(action, step)
        observation = step.observation
        on_step()
    return log, time.perf_counter() - started


def run_episodes(
    environment: Environment,
    controller: Controller[Any],
    seeds: Sequence[int],
    about: Mapping[str, Any],
    on_step: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Each seed's episode, with its score on the test split, as plain data; `seeds` fill the environments in turn."""
    width = environment.envs
    for start in range(0, len(seeds), width):
        chunk = list(seeds[start : start + width])
        padded = chunk + chunk[:1] * (width - len(chunk))  # idle environments repeat the first, and are not recorded
        log, seconds = run_round(environment, controller, padded, on_step)
        test, view = environment.test(), environment.view
        score = rated(test["score"], view.now.parameters / view.host_parameters)
        for env in range(len(chunk)):
            final = {
                "test_loss": plain(test["loss"][env]),
                "test_accuracy": plain(test["accuracy"][env]),
                "test_score": plain(test["score"][env]),
                "score": plain(score[env]),
                "parameters": plain(view.now.parameters[env]),
                "flops": plain(view.now.flops[env]),
                "seconds": seconds / width,
            }
            yield episode(environment, log, env, {**about, **final})
