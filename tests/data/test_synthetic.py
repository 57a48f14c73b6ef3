import torch
from torch import nn

from esper.config import load_preset
from esper.data import synthetic
from esper.growth import GrowingHost
from esper.rng import make_generator


def test_the_images_are_reproducible_and_balanced() -> None:
    first = synthetic._make_images("unseen", 500)
    synthetic._make_images.cache_clear()
    assert torch.equal(synthetic._make_images("unseen", 500).images, first.images)
    assert torch.bincount(first.labels).tolist() == [50] * 10
    assert not torch.equal(synthetic._make_images("known", 500).images, first.images)


def test_colours_are_independent_of_the_class() -> None:
    images = synthetic._make_images("known", 5000)
    mean = images.images.float().mean((1, 2))
    by_class = torch.stack([mean[images.labels == label].mean(0) for label in range(10)])
    assert by_class.std(0).max() < 6  # of 255; the images themselves differ by about 50
    assert mean.std(0).min() > 35


def test_a_host_with_3x3_convolutions_learns_the_images_and_one_with_1x1_does_not() -> None:
    data = load_preset("data/synthetic_images", resolution=16)
    accuracy = {}
    for name in ("cifar_blind", "cifar_baseline"):
        torch.manual_seed(0)
        growing = GrowingHost(load_preset(f"host/{name}", resolution=16), coadapt=True)
        optimizer = load_preset("optimizer/sgd", model=growing)
        stream = data.stream(64, make_generator("data", 0))
        for step in range(150):
            x, y = stream.next()
            nn.functional.cross_entropy(growing(x, {}), y).backward()
            optimizer.step(step / 150)
        growing.eval()
        with torch.no_grad():
            hits = [(growing(x, {}).argmax(1) == y).sum().item() for x, y in data.batches("validation", 500)]
        accuracy[name] = 100 * sum(hits) / data.size("validation")
    assert accuracy["cifar_blind"] < 35
    assert 50 < accuracy["cifar_baseline"] < 95
