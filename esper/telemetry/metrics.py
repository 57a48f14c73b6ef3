"""Every figure a run reports: its meaning, what is healthy, and where the dashboards show it.

Tags have places for names: {head}, {op}, {term}, {slot}, {blueprint}, {host}, {kind}, {figure}.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

PAGES = ("Controller", "Episodes", "Seeds", "Reward", "Health", "Time")
HEALTHY_KL = (0.003, 0.03)  # of an update: enough to learn from, no more than a round can tell


@dataclass(frozen=True)
class Metric:
    """`chart` is the picture on a page in which the metric is a line; empty where it is shown in none."""

    tag: str
    page: str
    chart: str
    meaning: str
    healthy: str = ""

    def matches(self, tag: str) -> bool:
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(self.tag)), tag) is not None


METRICS: tuple[Metric, ...] = (
    Metric("round", "", "", "rounds played"),
    Metric("episode/score", "Episodes", "score", "validation score less ln(parameters / host's), mean of a round", "rises"),
    Metric("validation/{kind}_score", "Episodes", "score", "the same on held-out seeds, sampled or greedy", "rises"),
    Metric("validation/{kind}_{figure}", "", "", "any figure of an episode, on held-out seeds"),
    Metric("episode/return", "Episodes", "return", "sum of an episode's rewards", "rises"),
    Metric("episode/validation_score", "Episodes", "accuracy", "accuracy in points, or bits per byte times -100", "rises"),
    Metric("episode/growth", "Episodes", "growth", "parameters at the end by those of the host"),
    Metric("episode/fossils", "Episodes", "fossils", "fossilised seeds at the end"),
    Metric("episode/loss", "Episodes", "loss", "validation loss at the end", "falls"),
    Metric("episode/gflops", "Episodes", "GFLOPs", "spent on an episode"),
    Metric("episode/length", "Episodes", "length", "decisions in an episode"),
    Metric("host/train_loss", "Episodes", "host training", "training loss in the last step"),
    Metric("host/train_accuracy", "Episodes", "host training", "training accuracy in the last step, a share"),
    Metric("hosts/score_{host}", "Episodes", "score by host", "of the episodes that drew this host, where there are several", "rises"),
    Metric("hosts/growth_{host}", "Episodes", "growth by host", "unlike where the controller tells hosts apart"),
    Metric("policy/op_{op}", "Controller", "share of each op", "how often each op was chosen", "no op near 1 for long"),
    Metric("policy/entropy_{head}", "Controller", "entropy", "of a head where it had a choice, as a share of the most", "falls slowly; above 0.1"),
    Metric("policy/usage_{head}", "Controller", "usage", "share of decisions in which the head took part with a choice"),
    Metric("policy/kl", "Controller", "KL", "between the acting and the updated policy", "{} to {}".format(*HEALTHY_KL)),
    Metric("policy/kl_{head}", "Controller", "KL by head", "the part of each head"),
    Metric("policy/clipped_{head}", "Controller", "clipped", "share of ratios outside the clip range", "below 0.3"),
    Metric("policy/ratio_max", "Controller", "ratio", "largest ratio in the last pass", "below 5"),
    Metric("policy/ratio_min", "Controller", "ratio", "smallest ratio in the last pass", "above 0.1"),
    Metric("policy/epochs", "Controller", "passes", "passes over the round before the KL ended them"),
    Metric("policy/kl_stop", "Controller", "passes", "1 where the KL ended the update"),
    Metric("policy/forced", "Controller", "forced", "share of decisions without a choice"),
    Metric("policy/entropy_bonus", "Controller", "entropy bonus", "weight of entropy in the loss"),
    Metric("losses/policy", "Controller", "losses", "surrogate, summed over heads"),
    Metric("losses/value", "Controller", "losses", "of the critic, in units of the return scale", "falls"),
    Metric("losses/explained_variance", "Controller", "explained variance", "share of the returns' variance that values foretold", "above 0.3 after a tenth of the run"),
    Metric("policy/advantage_mean", "Controller", "advantages", "before normalisation, over decisions with a choice"),
    Metric("policy/advantage_std", "Controller", "advantages", "before normalisation"),
    Metric("policy/advantage_{figure}", "Controller", "advantages, normalised", "after normalisation: least, most, skew, share above 0"),
    Metric("policy/return_mean", "Controller", "returns and values", "discounted return"),
    Metric("policy/return_std", "Controller", "returns and values", "its standard deviation"),
    Metric("policy/return_scaled_{figure}", "Controller", "returns, scaled", "in units of the return scale: mean and standard deviation", "about 0 and 1"),
    Metric("policy/value_mean", "Controller", "returns and values", "what the critic expected"),
    Metric("policy/value_std", "Controller", "returns and values", "its standard deviation"),
    Metric("seeds/germinated", "Seeds", "events", "seeds germinated in an episode"),
    Metric("seeds/fossilized", "Seeds", "events", "seeds fossilised in an episode"),
    Metric("seeds/pruned", "Seeds", "events", "seeds pruned in an episode"),
    Metric("seeds/first", "Seeds", "first germination", "its step, in episodes with one"),
    Metric("seeds/contribution", "Seeds", "contribution", "points, of seeds when they were fossilised", "above 0"),
    Metric("seeds/germinated_{blueprint}", "Seeds", "germinated by blueprint", "in an episode"),
    Metric("seeds/fossilized_{slot}", "Seeds", "fossilised by slot", "share of episodes"),
    Metric("seeds/rollbacks", "Health", "rollbacks", "by the governor, in an episode", "0"),
    Metric("seeds/finding_{figure}", "Health", "findings", "credit that was not earned: steps in an episode", "0"),
    Metric("reward/{term}", "Reward", "terms", "sum over an episode of each term"),
    Metric("health/gradient_norm", "Health", "gradient norm", "of the policy before clipping, largest of the update"),
    Metric("health/gradient_{head}", "Health", "gradient by head", "norm of each head's gradient and of the critic's", "above 0 where the head is used"),
    Metric("health/policy", "Health", "gradient health", "of the policy: 1 less vanishing and exploding weights", "above 0.5"),
    Metric("host/health", "Health", "gradient health", "of the hosts in the last step", "above 0.5"),
    Metric("host/gradient_norm", "Health", "host gradient norm", "in the last step, before clipping"),
    Metric("health/lstm_rms", "Health", "LSTM", "root mean square of the memory at the end of episodes", "0.001 to 10"),
    Metric("health/lstm_max", "Health", "LSTM", "largest number in it"),
    Metric("health/skipped", "Health", "skipped", "minibatches that were not finite, so far", "0"),
    Metric("health/anomalies", "Health", "anomalies", "findings so far"),
    Metric("health/memory_gb", "Health", "memory", "most that the process has held"),
    Metric("health/device_memory_gb", "Health", "memory", "most that the device has held"),
    Metric("time/environment", "Time", "seconds", "of a round in the environment"),
    Metric("time/train", "Time", "seconds", "of that, hosts trained"),
    Metric("time/measure", "Time", "seconds", "of that, hosts were measured"),
    Metric("time/policy", "Time", "seconds", "of a round in the policy"),
    Metric("time/update", "Time", "seconds", "of the update"),
    Metric("time/decisions_per_second", "Time", "decisions a second", "round and update together"),
    Metric("time/samples_per_second", "Time", "samples a second", "that hosts were trained on"),
)  # fmt: skip


def find_metric(tag: str) -> Metric | None:
    """The entry of a tag: one without places for names if there is one, else the first that fits."""
    exact = [metric for metric in METRICS if metric.tag == tag]
    return next(iter(exact + [metric for metric in METRICS if metric.matches(tag)]), None)


def dashboard_layout(tags: Sequence[str]) -> dict[str, dict[str, list[object]]]:
    """Pages and charts of TensorBoard's custom scalars for the tags there are."""
    pages: dict[str, dict[str, list[object]]] = {page: {} for page in PAGES}
    order = {metric.tag: place for place, metric in enumerate(METRICS)}
    known = [(order[metric.tag], tag, metric) for tag in tags if (metric := find_metric(tag)) is not None]
    for _, tag, metric in sorted(known, key=lambda entry: entry[:2]):
        if metric.chart:
            chart = pages[metric.page].setdefault(metric.chart, ["Multiline", []])
            chart[1].append(f"^{re.escape(tag)}$")  # type: ignore[attr-defined]
    return {page: charts for page, charts in pages.items() if charts}


def metrics_page() -> str:
    """The glossary as a page in Markdown: docs/metrics.md."""
    lines = ["# What a run reports", ""]
    lines.append(
        "Every tag in TensorBoard and every key in `rounds.jsonl`, against the number of decisions. The page is"
    )
    lines.append("made from the table in `esper/telemetry/glossary.py`, by `document()`.")
    for page in (*PAGES, ""):
        lines += [
            "",
            f"## {page or 'Beside the pages'}",
            "",
            "| tag | chart | meaning | healthy |",
            "|---|---|---|---|",
        ]
        for metric in METRICS:
            if metric.page == page:
                lines.append(f"| `{metric.tag}` | {metric.chart} | {metric.meaning} | {metric.healthy} |")
    return "\n".join([*lines, ""])
