from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from esper.environment.host_metrics import HostMetrics, batch_sums


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    sizes = [8] * (count - 1) + [3]  # the last batch of a split is smaller
    return [(torch.randn(n, 5, generator=draws), torch.randint(5, (n,), generator=draws)) for n in sizes]


def evaluate(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    metrics = HostMetrics().to(parts[0][0].device)
    for output, y in parts:
        metrics.update(batch_sums(output, y))
    means: torch.Tensor = metrics.compute()
    return means


def test_loss_and_accuracy_are_those_of_mean_metric_and_multiclass_accuracy() -> None:
    loss, accuracy = MeanMetric(), MulticlassAccuracy(5, average="micro")
    for output, y in batches():
        loss.update(torch.nn.functional.cross_entropy(output, y), weight=len(y))
        accuracy.update(output, y)
    torch.testing.assert_close(evaluate(batches()), torch.stack([loss.compute(), accuracy.compute()]))


def test_metrics_run_in_threads_and_on_the_meta_device() -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(evaluate, [batches()] * 16))
    assert all(torch.equal(result, results[0]) for result in results)
    on_meta = evaluate([(output.to("meta"), y.to("meta")) for output, y in batches()])
    assert on_meta.shape == (2,)


def test_metrics_are_not_synchronised_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = HostMetrics()
    monkeypatch.setattr(metrics, "_sync_dist", lambda **options: pytest.fail("synchronised"))
    metrics.distributed_available_fn = lambda: True
    metrics.update(batch_sums(*batches()[0]))
    assert metrics.compute().isfinite().all()
    assert not metrics.state_dict()
