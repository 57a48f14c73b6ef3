"""The episodes of a run as plain data: gathered while they are played, written as lines, summed up as figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from esper.environment import Environment, Step
from esper.lifecycle import Op, Stage
from esper.ppo import PPO, Rollout
from esper.ppo.agree import summed
from esper.records import EpisodeLog, episode, plain
from esper.telemetry.lines import RoundFile
from esper.telemetry.timeline import contribution


class Episodes:
    """Watches rounds of growing hosts; `latest` has the newest episodes of each kind of round."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.blueprints = environment.space.blueprints
        self.hosts = environment.stock.names if len(environment.stock) > 1 else ()
        self.latest: dict[str, list[dict[str, Any]]] = {}

    def round_begins(self, kind: str, seeds: Sequence[int], steps: int) -> None:
        self._log = EpisodeLog(self._environment.space, self._environment.rules, list(seeds))

    def step_done(self, action: Tensor, step: Step) -> None:
        self._log.add(action, step)

    def round_ends(self, rollout: Rollout) -> None:
        now = self._environment.view.now
        self.latest[rollout.kind] = [
            episode(
                self._environment, self._log, env, {
                    "controller": "ppo",
                    "kind": rollout.kind,
                    "score": plain(rollout.outcome["score"][env]),
                    "parameters": plain(now.parameters[env]),
                    "flops": plain(now.flops[env]),
                },
            )
            for env in range(len(rollout.seeds))
        ]  # fmt: skip


class EpisodeRecords(Callback):
    """Reports what happened in episodes, and writes them to `episodes.jsonl` as evaluation does.

    Arguments:
        directory: of the run
        episodes: where they are gathered; None where nothing grows
        write: whether to write them
    """

    def __init__(self, directory: str | Path, episodes: Episodes | None, *, write: bool) -> None:
        self._file, self.gatherer, self._write = RoundFile(Path(directory) / "episodes.jsonl"), episodes, write

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        if self._write and self.gatherer is not None:
            self._file.begin(pl_module.counters.rounds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        if self.gatherer is None:
            return
        found = figures(self.gatherer.latest["training"], self.gatherer.blueprints, self.gatherer.hosts)
        mine = torch.tensor(list(found.values()), dtype=torch.float64, device=pl_module.device)
        measured = summed(torch.stack([mine.nan_to_num(nan=0.0), mine.isfinite().double()]))
        values = torch.where(measured[1] > 0, measured[0] / measured[1], torch.nan).tolist()  # means over ranks
        pl_module.report(dict(zip(found, values, strict=True)))
        self._save(pl_module, "training")

    @rank_zero_only
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Held-out episodes of a round that were cut off when they were first played are played again."""
        assert isinstance(pl_module, PPO)
        if self._write and self.gatherer is not None:
            rounds = pl_module.counters.rounds
            self._file.keep(lambda line: line["round"] < rounds or line["kind"] == "training")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert isinstance(pl_module, PPO)
        if self.gatherer is not None:
            self._save(pl_module, batch.kind)

    @rank_zero_only
    def _save(self, module: PPO, kind: str) -> None:
        if self._write and self.gatherer is not None:
            for line in self.gatherer.latest[kind]:
                self._file.write({"round": module.counters.rounds, **line})

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()


def figures(
    episodes: Sequence[dict[str, Any]], blueprints: Sequence[str], hosts: Sequence[str] = ()
) -> dict[str, float]:
    """Means over episodes of what happened in them; the same names for every round of a run.

    `hosts` are those that episodes draw from, where there are several.
    """
    count, slots = len(episodes), episodes[0]["slots"]
    steps = [step for each in episodes for step in each["steps"]]
    germinations = [step["action"] for step in steps if step["action"]["op"] == Op.GERMINATE.name]
    fossils = [
        (slot, contribution(each["steps"], index, slot))
        for each in episodes
        for index, step in enumerate(each["steps"])
        for slot, entered in enumerate(step["entered"])
        if Stage.FOSSILIZED.name in entered
    ]
    first = [_first(each["steps"]) for each in episodes]
    gains = [gain for _, gain in fossils if gain is not None]
    found = {
        "seeds/germinated": len(germinations) / count,
        "seeds/fossilized": sum(each["fossilized"] for each in episodes) / count,
        "seeds/pruned": sum(each["pruned"] for each in episodes) / count,
        "seeds/rollbacks": sum(each["rollbacks"] for each in episodes) / count,
        "seeds/first": _mean([step for step in first if step is not None]),
        "seeds/contribution": _mean(gains),
    }
    for index, slot in enumerate(slots):
        found[f"seeds/fossilized_{slot}"] = sum(place == index for place, _ in fossils) / count
    for blueprint in blueprints:
        named = sum(action.get("blueprint", blueprints[0]) == blueprint for action in germinations)
        found[f"seeds/germinated_{blueprint}"] = named / count
    for term in episodes[0]["steps"][0]["parts"]:
        paid = [step["parts"][term] for step in steps]
        found[f"reward/{term}"] = sum(float("nan") if part is None else part for part in paid) / count
    for name in ("reward_hacking", "ransomware"):
        found[f"seeds/finding_{name}"] = sum(entry.startswith(name) for s in steps for entry in s["findings"]) / count
    for name in ("train_loss", "train_accuracy", "gradient_norm", "health"):
        last = [each["steps"][-1][name] for each in episodes]
        found[f"host/{name}"] = _mean([value for value in last if value is not None])
    for host in hosts:
        own = [each for each in episodes if each["host"] == host]
        found[f"hosts/score_{host}"] = _mean([each["score"] for each in own if each["score"] is not None])
        found[f"hosts/growth_{host}"] = _mean([each["parameters"] / each["host_parameters"] for each in own])
    return found


def _first(steps: Sequence[dict[str, Any]]) -> int | None:
    return next((index for index, step in enumerate(steps) if step["action"]["op"] == Op.GERMINATE.name), None)


def _mean(values: Sequence[float]) -> float:
    """NaN is not measured."""
    return sum(values) / len(values) if values else float("nan")
