"""Every metric that a run reports: its meaning, its healthy range, and its chart in TensorBoard.

Tags have placeholders: {head}, {op}, {term}, {slot}, {blueprint}, {host}, {family}, {kind}, {metric}, {statistic}, {detector}.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

PAGES = ("Controller", "Episodes", "Seeds", "Reward", "Health", "Time")
HEALTHY_KL = (0.003, 0.03)  # of an update: large enough to learn, small enough for the noise of one round


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics; `chart` names its chart on `page`, or is empty if it has none."""

    tag: str
    page: str
    chart: str
    meaning: str
    healthy: str = ""

    def matches(self, tag: str) -> bool:
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(self.tag)), tag) is not None


METRICS: tuple[Metric, ...] = (
    Metric("round", "", "", "number of finished rounds"),
    Metric("episode/score", "Episodes", "score", "validation score minus `environment.rent` times ln(parameters / host parameters), mean over a round's episodes", "rises"),
    Metric("validation/{kind}_score", "Episodes", "score", "the same on validation episodes, sampled or greedy", "rises"),
    Metric("validation/{kind}_gain", "Episodes", "gain", "`tasks/gain` of validation episodes, sampled or greedy", "rises"),
    Metric("validation/{kind}_{metric}", "", "", "any other metric of episodes or tasks, on validation episodes"),
    Metric("episode/return", "Episodes", "return", "sum of an episode's rewards", "rises"),
    Metric("episode/validation_score", "Episodes", "accuracy", "accuracy in points, or -100 times bits per byte", "rises"),
    Metric("episode/growth", "Episodes", "growth", "final parameters / host parameters"),
    Metric("episode/fossils", "Episodes", "fossils", "fossilised seeds at the end of an episode"),
    Metric("episode/loss", "Episodes", "loss", "validation loss at the end of an episode", "falls"),
    Metric("episode/gflops", "Episodes", "GFLOPs", "GFLOPs spent in an episode"),
    Metric("episode/length", "Episodes", "length", "decisions in an episode"),
    Metric("host/train_loss", "Episodes", "host training", "training loss in the last step"),
    Metric("host/train_accuracy", "Episodes", "host training", "training accuracy in the last step, 0 to 1"),
    Metric("hosts/score_{host}", "Episodes", "score by host", "mean score of the episodes with this host or family of tasks, if there are several", "rises"),
    Metric("hosts/growth_{host}", "Episodes", "growth by host", "mean growth of the episodes with this host or family of tasks; differs if the controller distinguishes hosts"),
    Metric("tasks/gain", "Episodes", "gain", "validation score minus that of `none` on the same task, in points; mean over the round's tasks whose score without growth is known", "above 0, and rises"),
    Metric("tasks/gain_{family}", "Episodes", "gain by family", "the same over the tasks of a family", "not below 0 where growth does not help"),
    Metric("tasks/grew", "Episodes", "tasks with growth", "share of the round's tasks on which the controller grew the host; a task counts with the share of its episodes that end with a fossil"),
    Metric("tasks/grew_{family}", "Episodes", "growth by family", "the same over the tasks of a family; differs if the controller distinguishes tasks"),
    Metric("tasks/regret", "Episodes", "regret", "validation score of the best known plan of the task minus that of the controller, in points; mean over the round's tasks with known plans", "falls"),
    Metric("policy/op_{op}", "Controller", "share of each op", "share of decisions with this op", "no op near 1 for long"),
    Metric("policy/entropy_{head}", "Controller", "entropy", "normalised entropy of a head (0 to 1), mean over the steps where it is available", "falls slowly; above 0.1"),
    Metric("policy/usage_{head}", "Controller", "usage", "share of decisions in which the head is active"),
    Metric("policy/kl", "Controller", "KL", "KL between the acting and the updated policy", "{} to {}".format(*HEALTHY_KL)),
    Metric("policy/kl_{head}", "Controller", "KL by head", "each head's part of the KL"),
    Metric("policy/clipped_{head}", "Controller", "clipped", "share of ratios outside the clip range", "below 0.3"),
    Metric("policy/ratio_max", "Controller", "ratio", "largest ratio in the last minibatch", "below 5"),
    Metric("policy/ratio_min", "Controller", "ratio", "smallest ratio in the last minibatch", "above 0.1"),
    Metric("policy/epochs", "Controller", "passes", "passes of the policy over the round in this update"),
    Metric("policy/kl_stop", "Controller", "passes", "1 if the KL ended the update"),
    Metric("policy/forced", "Controller", "forced", "share of decisions with only one legal action"),
    Metric("policy/entropy_bonus", "Controller", "entropy bonus", "weight of entropy in the loss"),
    Metric("losses/policy", "Controller", "losses", "clipped surrogate loss, summed over heads"),
    Metric("losses/value", "Controller", "losses", "loss of the critic, in units of the return scale", "falls"),
    Metric("losses/explained_variance", "Controller", "explained variance", "share of the variance of the rest of the return that the critic explains, among episodes of a task at the same step, beyond what the reward so far predicts; a constant critic has 0, a perfect one 1", "above 0, and not far below"),
    Metric("policy/advantage_mean", "Controller", "advantages", "mean advantage before normalisation, over steps with an active head"),
    Metric("policy/advantage_std", "Controller", "advantages", "standard deviation of the same"),
    Metric("policy/advantage_scale", "Controller", "advantages", "with `ppo.baseline=leave_one_out`: standard deviation within tasks that advantages are divided by"),
    Metric("policy/critic_gflops", "", "", "GFLOPs of a separate critic in this update"),
    Metric("policy/advantage_{statistic}", "Controller", "advantages, normalised", "normalised advantages: minimum, maximum, skewness, share above 0"),
    Metric("policy/return_mean", "Controller", "returns and values", "mean of returns (discounted by gamma)"),
    Metric("policy/return_std", "Controller", "returns and values", "standard deviation of returns"),
    Metric("policy/return_scaled_{statistic}", "Controller", "returns, scaled", "normalised returns: mean and standard deviation", "about 0 and 1"),
    Metric("policy/value_mean", "Controller", "returns and values", "mean of the critic's predictions"),
    Metric("policy/value_std", "Controller", "returns and values", "standard deviation of the critic's predictions"),
    Metric("seeds/germinated", "Seeds", "events", "seeds germinated per episode"),
    Metric("seeds/fossilized", "Seeds", "events", "seeds fossilised per episode"),
    Metric("seeds/pruned", "Seeds", "events", "seeds pruned per episode"),
    Metric("seeds/first", "Seeds", "first germination", "step of the first germination, over episodes that have one"),
    Metric("seeds/contribution", "Seeds", "contribution", "contribution of seeds when they were fossilised, in points", "above 0"),
    Metric("seeds/germinated_{blueprint}", "Seeds", "germinated by blueprint", "seeds of this blueprint germinated per episode"),
    Metric("seeds/fossilized_{slot}", "Seeds", "fossilised by slot", "share of episodes with a seed fossilised in this slot, of those whose host has it"),
    Metric("seeds/rollbacks", "Health", "rollbacks", "rollbacks by the governor per episode", "0"),
    Metric("seeds/finding_{detector}", "Health", "findings", "steps per episode in which a detector finds credit that a seed did not earn", "0"),
    Metric("reward/{term}", "Reward", "terms", "sum of the reward term over an episode"),
    Metric("health/gradient_norm", "Health", "gradient norm", "gradient norm of the policy before clipping, largest of the update"),
    Metric("health/gradient_{head}", "Health", "gradient by head", "gradient norm of each head, and of the critic (`value`); of a separate critic the largest of the update", "above 0 if the head is used"),
    Metric("health/policy", "Health", "gradient health", "gradients of the policy: 1 - 0.5 x share of vanishing tensors - 0.8 x share of exploding tensors", "above 0.5"),
    Metric("health/critic", "Health", "gradient health", "the same for a separate critic", "above 0.5"),
    Metric("host/health", "Health", "gradient health", "the same for the hosts, in the last step", "above 0.5"),
    Metric("host/gradient_norm", "Health", "host gradient norm", "gradient norm of the hosts in the last step, before clipping"),
    Metric("health/lstm_rms", "Health", "LSTM", "root mean square of the LSTM state at the end of episodes", "0.001 to 10"),
    Metric("health/lstm_max", "Health", "LSTM", "largest absolute value of the LSTM state"),
    Metric("health/skipped", "Health", "skipped", "minibatches skipped for non-finite values, so far", "0"),
    Metric("health/anomalies", "Health", "anomalies", "findings of the anomaly checks so far, repeated ones included"),
    Metric("health/memory_gb", "Health", "memory", "peak memory of the process, in GB"),
    Metric("health/device_memory_gb", "Health", "memory", "peak memory of the device, in GB"),
    Metric("time/environment", "Time", "seconds", "seconds of a round in the environment"),
    Metric("time/train", "Time", "seconds", "seconds of the environment in which hosts train"),
    Metric("time/measure", "Time", "seconds", "seconds of the environment in which hosts are measured"),
    Metric("time/policy", "Time", "seconds", "seconds of a round in the policy"),
    Metric("time/update", "Time", "seconds", "seconds of the update"),
    Metric("time/decisions_per_second", "Time", "decisions per second", "decisions per second of round and update"),
    Metric("time/samples_per_second", "Time", "samples per second", "training samples of the hosts per second of round and update"),
)  # fmt: skip


def find_metric(tag: str) -> Metric | None:
    """The entry of a tag: an entry without placeholders first, then the first that matches."""
    exact = [metric for metric in METRICS if metric.tag == tag]
    return next(iter(exact + [metric for metric in METRICS if metric.matches(tag)]), None)


def dashboard_layout(tags: Sequence[str]) -> dict[str, dict[str, list[object]]]:
    """The layout of TensorBoard's custom scalars, by page and chart, for the given tags."""
    pages: dict[str, dict[str, list[object]]] = {page: {} for page in PAGES}
    order = {metric.tag: index for index, metric in enumerate(METRICS)}
    known = [(order[metric.tag], tag, metric) for tag in tags if (metric := find_metric(tag)) is not None]
    for _, tag, metric in sorted(known, key=lambda entry: entry[:2]):
        if metric.chart:
            chart = pages[metric.page].setdefault(metric.chart, ["Multiline", []])
            chart[1].append(f"^{re.escape(tag)}$")  # type: ignore[attr-defined]
    return {page: charts for page, charts in pages.items() if charts}


def metrics_page() -> str:
    """The table as a Markdown page: docs/metrics.md."""
    lines = ["# Metrics", ""]
    lines.append("Every metric in the loggers and every key in `rounds.jsonl`. The x-axis is the number of decisions.")
    lines.append("Pages and charts are those of TensorBoard; other loggers group metrics by the first part of the tag.")
    lines.append("`metrics_page()` in `esper/telemetry/metrics.py` generates this page.")
    for page in (*PAGES, ""):
        lines += [
            "",
            f"## {page or 'Not in a chart'}",
            "",
            "| tag | chart | meaning | healthy |",
            "|---|---|---|---|",
        ]
        for metric in METRICS:
            if metric.page == page:
                lines.append(f"| `{metric.tag}` | {metric.chart} | {metric.meaning} | {metric.healthy} |")
    return "\n".join([*lines, ""])
