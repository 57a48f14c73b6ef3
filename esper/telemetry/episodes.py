"""The episodes of a training run: collected while they run, written to `episodes.jsonl`, summarised as metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from esper.environment import Environment, GrowthStep
from esper.lifecycle import Stage
from esper.ppo import PPO, Rollout
from esper.ppo.distributed import reduce_sum
from esper.records import EpisodeLog, EpisodeRecord, make_record, to_plain
from esper.telemetry.round_file import RoundFile
from esper.telemetry.task_metrics import task_metrics
from esper.telemetry.timeline import contribution


class EpisodeBuffer:
    """A RoundListener that records episodes; `latest` has those of the latest round of each kind."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.blueprints, self.slots = environment.space.blueprints, environment.space.slots
        self.tasks = tasks = environment.host_pool.tasks()
        self.groups = {name: task.family or name for name, task in tasks.items()} if len(tasks) > 1 else {}
        self.latest: dict[str, list[EpisodeRecord]] = {}

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None:
        self._log = EpisodeLog(self._environment.space, self._environment.rules, list(episode_seeds))

    def on_step(self, action: Tensor, step: GrowthStep) -> None:
        self._log.add(action, step)

    def on_round_end(self, rollout: Rollout) -> None:
        now = self._environment.view.now
        self.latest[rollout.kind] = [
            make_record(
                self._environment, self._log, env,
                arm="ppo",
                kind=rollout.kind,
                score=to_plain(rollout.outcome["score"][env]),
                parameters=to_plain(now.parameters[env]),
                flops=to_plain(now.flops[env]),
            )
            for env in range(len(rollout.episode_seeds))
        ]  # fmt: skip


class EpisodeWriter(Callback):
    """Reports metrics of episodes and writes episodes to `episodes.jsonl`, in the format of evaluation.

    Arguments:
        directory: directory of the run
        episodes: buffer of the latest episodes; None if no hosts grow
        write: whether to write `episodes.jsonl`
    """

    def __init__(self, directory: str | Path, episodes: EpisodeBuffer | None, *, write: bool) -> None:
        self._file, self.episode_buffer, self._write = RoundFile(Path(directory) / "episodes.jsonl"), episodes, write

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        if self._write and self.episode_buffer is not None:
            self._file.open_after(pl_module.counters.rounds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        if self.episode_buffer is None:
            return
        buffer = self.episode_buffer
        episodes = buffer.latest["training"]
        metrics = episode_metrics(episodes, buffer.slots, buffer.blueprints, buffer.groups)
        _report_means(pl_module, {**metrics, **task_metrics(episodes, buffer.tasks)})
        self._save(pl_module, "training")

    @rank_zero_only
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove validation episodes of this round: a run that stopped while it validated validates again."""
        assert isinstance(pl_module, PPO)
        if self._write and self.episode_buffer is not None:
            rounds = pl_module.counters.rounds
            self._file.filter_lines(lambda line: line["round"] < rounds or line["kind"] == "training")

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
        if self.episode_buffer is not None:
            metrics = task_metrics(self.episode_buffer.latest[batch.kind], self.episode_buffer.tasks)
            named = {tag.removeprefix("tasks/"): value for tag, value in metrics.items()}
            _report_means(pl_module, {f"validation/{batch.kind}_{name}": value for name, value in named.items()})
            self._save(pl_module, batch.kind)

    @rank_zero_only
    def _save(self, module: PPO, kind: str) -> None:
        if self._write and self.episode_buffer is not None:
            for episode in self.episode_buffer.latest[kind]:
                self._file.write({"round": module.counters.rounds, **episode.to_dict()})

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()


def _report_means(module: PPO, metrics: Mapping[str, float]) -> None:
    """Report the means over ranks of those that measured a metric."""
    if not metrics:
        return
    local = torch.tensor(list(metrics.values()), dtype=torch.float64, device=module.device)
    measured = reduce_sum(torch.stack([local.nan_to_num(nan=0.0), local.isfinite().double()]))
    values = torch.where(measured[1] > 0, measured[0] / measured[1], torch.nan).tolist()
    module.report_metrics(dict(zip(metrics, values, strict=True)))


def episode_metrics(
    episodes: Sequence[EpisodeRecord],
    slots: Sequence[str],
    blueprints: Sequence[str],
    groups: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Means over episodes; every round of a run has the same names.

    Arguments:
        episodes: of one round
        slots, blueprints: all names of the action space; a host need not have all slots
        groups: by the name of a host, if there are several: the family of its task, or the name itself
    """
    count = len(episodes)
    steps = [step for each in episodes for step in each.steps]
    germinations = [germination for each in episodes for germination in each.germinations]
    fossils = [
        (each.slots[slot], contribution(each.steps, index, slot))
        for each in episodes
        for index, step in enumerate(each.steps)
        for slot, entered in enumerate(step.entered)
        if Stage.FOSSILIZED.name in entered
    ]
    first = [each.germinations[0].step for each in episodes if each.germinations]
    gains = [gain for _, gain in fossils if gain is not None]
    metrics = {
        "seeds/germinated": len(germinations) / count,
        "seeds/fossilized": sum(each.fossilized for each in episodes) / count,
        "seeds/pruned": sum(each.pruned for each in episodes) / count,
        "seeds/rollbacks": sum(each.rollbacks for each in episodes) / count,
        "seeds/first": _mean(first),
        "seeds/contribution": _mean(gains),
    }
    for slot in slots:
        own = sum(slot in each.slots for each in episodes)
        kept = sum(fossil_slot == slot for fossil_slot, _ in fossils)
        metrics[f"seeds/fossilized_{slot}"] = kept / own if own else float("nan")
    for blueprint in blueprints:
        metrics[f"seeds/germinated_{blueprint}"] = sum(each.blueprint == blueprint for each in germinations) / count
    for term in episodes[0].steps[0].reward_terms:
        rewards = [step.reward_terms[term] for step in steps]
        metrics[f"reward/{term}"] = sum(float("nan") if part is None else part for part in rewards) / count
    for name in ("reward_hacking", "ransomware"):
        metrics[f"seeds/finding_{name}"] = sum(entry.startswith(name) for s in steps for entry in s.findings) / count
    for name in ("train_loss", "train_accuracy", "gradient_norm", "health"):
        last = [getattr(each.steps[-1], name) for each in episodes]
        metrics[f"host/{name}"] = _mean([value for value in last if value is not None])
    groups = groups or {}
    for group in dict.fromkeys(groups.values()):
        own_group = [each for each in episodes if groups.get(each.host or "") == group]
        metrics[f"hosts/score_{group}"] = _mean([each.score for each in own_group if each.score is not None])
        metrics[f"hosts/growth_{group}"] = _mean([each.growth for each in own_group])
    return metrics


def _mean(values: Sequence[float]) -> float:
    """NaN if there are no values: not measured."""
    return sum(values) / len(values) if values else float("nan")
