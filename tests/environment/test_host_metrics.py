from concurrent.futures import ThreadPoolExecutor

import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from esper.environment.host_metrics import batch_sums, means


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    sizes = [8] * (count - 1) + [3]  # the last batch of a split is smaller
    return [(torch.randn(n, 5, generator=draws), torch.randint(5, (n,), generator=draws)) for n in sizes]


def evaluate(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return means([batch_sums(output, y) for output, y in parts])


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
