"""The table of features, scaled to about [-1, 1].

Adding a feature is one entry in BASE or PER_SLOT. -1 stands for "not yet seen" wherever a figure may be missing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.lifecycle import Blend, Op, Stage
from esper.observation.view import HISTORY, View

SYMLOG_SCALE = 3.0  # symlog of a loss or norm of 20 is 3


@dataclass(frozen=True)
class Feature:
    """A named part of the observation; `make` gives [envs, width], or [envs, slots, width] for a slot's."""

    name: str
    width: int
    make: Callable[[View], Tensor]
    meaning: str


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|), scaled; what is not finite is as far out as can be."""
    x = torch.nan_to_num(x, nan=1e4, posinf=1e4, neginf=-1e4)
    return (x.sign() * x.abs().log1p() / SYMLOG_SCALE).clamp(-2, 2)


def _seen(x: Tensor, scaled: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.full_like(scaled, -1.0), scaled)


def _points(x: Tensor) -> Tensor:
    """Score points, of which one matters for accuracy and a hundred may pass for text."""
    return symlog(torch.nan_to_num(x, nan=0.0))


def _one(x: Tensor) -> Tensor:
    return x.float().unsqueeze(-1)


def _score(x: Tensor) -> Tensor:
    """Accuracy in points, 0 to 100, or bits per byte times -100."""
    return (x.sign() * (x.abs() / 100).log1p()).clamp(-2, 1)


def _share(x: Tensor, view: View) -> Tensor:
    return _one((x.float() / view.steps).clamp(max=1))


def _gain(view: View) -> Tensor:
    return view.scores[:, -1] - view.scores[:, -2]


def _count(view: View, *stages: Stage) -> Tensor:
    return view.slots.in_stage(stages).float().mean(1)


def _one_hot(x: Tensor, size: int) -> Tensor:
    """All zeros where x is -1."""
    return F.one_hot(x + 1, size + 1)[..., 1:].float()


BASE: tuple[Feature, ...] = (
    Feature(
        "progress", 1, lambda v: torch.full((len(v.best), 1), v.step / v.steps), "share of the episode that is over"
    ),
    Feature("loss", 1, lambda v: _one(symlog(v.now.loss)), "validation loss, symlog"),
    Feature("score", 1, lambda v: _one(_score(v.now.score)), "validation score, ln(1 + score / 100) with its sign"),
    Feature(
        "train_loss", 1, lambda v: _one(_seen(v.now.train_loss, symlog(v.now.train_loss))), "training loss, symlog"
    ),
    Feature(
        "train_accuracy", 1, lambda v: _one(_seen(v.now.train_accuracy, v.now.train_accuracy)), "training accuracy"
    ),
    Feature(
        "gap",
        1,
        lambda v: _one(_seen(v.now.train_accuracy, (v.now.train_accuracy - v.now.accuracy).clamp(-1, 1))),
        "training minus validation accuracy",
    ),
    Feature(
        "gain", 1, lambda v: _one(_seen(_gain(v), _points(_gain(v)))), "change of the score in the last step, symlog"
    ),
    Feature("losses", HISTORY, lambda v: _seen(v.losses, symlog(v.losses)), "the last validation losses, symlog"),
    Feature("scores", HISTORY, lambda v: _seen(v.scores, _score(v.scores)), "the last scores, likewise"),
    Feature(
        "below_best", 1, lambda v: _one(_points(v.best - v.now.score)), "best score so far minus the present, symlog"
    ),
    Feature("stale", 1, lambda v: _share(v.stale, v), "steps since the best score, as a share of the episode"),
    Feature(
        "growth", 1, lambda v: _one((v.now.parameters / v.host_parameters).log().clamp(max=3) / 3), "ln of growth / 3"
    ),
    Feature(
        "gradient_norm", 1, lambda v: _one(_seen(v.now.gradient_norm, symlog(v.now.gradient_norm))), "host, symlog"
    ),
    Feature("health", 1, lambda v: _one(_seen(v.now.health, v.now.health)), "of the host's gradients, 0 to 1"),
    Feature("training", 1, lambda v: _one(_count(v, Stage.GERMINATED, Stage.TRAINING)), "share of slots that train"),
    Feature("blending", 1, lambda v: _one(_count(v, Stage.BLENDING)), "share of slots that blend"),
    Feature("holding", 1, lambda v: _one(_count(v, Stage.HOLDING)), "share of slots that hold"),
    Feature("fossilized", 1, lambda v: _one(_count(v, Stage.FOSSILIZED)), "share of slots that are fossils"),
    Feature("last_op", len(Op), lambda v: _one_hot(v.last_op, len(Op)), "the op just done, one-hot"),
    Feature("rollback", 1, lambda v: _one(v.rollback), "whether the governor stepped in"),
)
PER_SLOT: tuple[Feature, ...] = (
    Feature("stage", len(Stage), lambda v: _one_hot(v.slots.stage, len(Stage)), "one-hot"),
    Feature("blend", len(Blend), lambda v: _one_hot(v.slots.blend, len(Blend)), "one-hot; zeros without a seed"),
    Feature("alpha", 1, lambda v: _one(v.slots.alpha), "how much is blended in"),
    Feature("alpha_target", 1, lambda v: _one(v.slots.alpha_target), "where alpha is going"),
    Feature(
        "ramp",
        1,
        lambda v: _one(v.slots.ramp_done / v.slots.ramp_ticks.clamp(min=1)),
        "share of the present ramp that is done",
    ),
    Feature("steps_in_stage", 1, lambda v: _share(v.slots.steps_in_stage, v), "as a share of the episode"),
    Feature("age", 1, lambda v: _share(v.slots.age, v), "epochs since germination, as a share of the episode"),
    Feature(
        "contribution",
        1,
        lambda v: _one(_seen(v.slots.contribution, _points(v.slots.contribution))),
        "the latest measured, symlog",
    ),
    Feature(
        "contribution_age",
        1,
        lambda v: _one(torch.where(v.slots.contribution_age < 0, -1.0, _share(v.slots.contribution_age, v)[..., 0])),
        "epochs since it was measured, as a share of the episode",
    ),
    Feature(
        "progress", 1, lambda v: _one(_seen(v.now.progress, _points(v.now.progress))), "score since germination, symlog"
    ),
    Feature(
        "isolated_gain",
        1,
        lambda v: _one(_seen(v.now.isolated_gain, v.now.isolated_gain.clamp(-1, 1))),
        "loss it would save",
    ),
    Feature(
        "gradient_norm", 1, lambda v: _one(_seen(v.now.seed_gradient_norm, symlog(v.now.seed_gradient_norm))), "symlog"
    ),
    Feature("health", 1, lambda v: _one(_seen(v.slots.health, v.slots.health)), "of its gradients, 0 to 1"),
    Feature(
        "size",
        1,
        lambda v: _one((v.seed_parameters / v.host_parameters[:, None]).log1p().clamp(max=3) / 3),
        "ln growth",
    ),
    Feature(
        "last",
        1,
        lambda v: _one(_one_hot(v.last_slot, v.slots.stage.shape[1])),
        "whether the last op was done here",
    ),
)
BASE_WIDTH = sum(feature.width for feature in BASE)
SLOT_WIDTH = sum(feature.width for feature in PER_SLOT)


def observation_page() -> str:
    """Every feature as a page in Markdown: docs/observation.md."""
    lines = ["# What a controller sees", ""]
    lines.append(
        "Every feature is scaled to about [-1, 1]; -1 stands for what was not yet seen. The page is made from the"
    )
    lines.append("table in `esper/environment/observation.py`, by `document()`.")
    for title, table in (("Of the host", BASE), ("Of each slot", PER_SLOT)):
        lines += ["", f"## {title}: {sum(feature.width for feature in table)} numbers", ""]
        lines += ["| feature | width | meaning |", "|---|---|---|"]
        lines += [f"| `{feature.name}` | {feature.width} | {feature.meaning} |" for feature in table]
    lines += ["", "Beside them: each slot's blueprint as a number for an embedding (0 is none), and all masks.", ""]
    return "\n".join(lines)
