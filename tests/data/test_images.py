from itertools import product

import pytest
import torch

from esper.config import load_preset
from esper.data import DataError, ImageData
from esper.data.images import Labelled
from esper.rng import make_generator


def labelled(count: int, rng_seed: int) -> Labelled:
    generator = torch.Generator().manual_seed(rng_seed)
    images = torch.randint(256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return Labelled(images, torch.arange(count) % 10)


def black(count: int) -> Labelled:
    return Labelled(torch.zeros(count, 32, 32, 3, dtype=torch.uint8), torch.arange(count) % 10)


KNOWN, UNSEEN = labelled(500, 0), labelled(100, 1)


def data(**changes: object) -> ImageData:
    options = {
        "train": 300, "validation": 100, "test": 50, "split_seed": 0, "resolution": 32, "pad": 4, "flip": True,
        "device": "cpu",
    }  # fmt: skip
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    return ImageData(name="noise", known=KNOWN, unseen=UNSEEN, mean=mean, std=std, **{**options, **changes})


def rows(part: Labelled) -> set[bytes]:
    return {image.numpy().tobytes() for image in part.images}


def test_splits_are_balanced_and_disjoint() -> None:
    splits = data().splits
    for split, each in (("train", 30), ("validation", 10), ("test", 5)):
        assert torch.bincount(splits[split].labels).tolist() == [each] * 10
    assert not rows(splits["train"]) & rows(splits["validation"])
    assert rows(splits["test"]) <= rows(UNSEEN)


def test_splits_depend_on_split_seed_and_not_on_the_size_of_other_splits() -> None:
    one = data().splits
    assert rows(data().splits["validation"]) == rows(one["validation"])
    assert rows(data(split_seed=1).splits["validation"]) != rows(one["validation"])
    assert rows(data(train=50).splits["validation"]) == rows(one["validation"])
    assert rows(data(train=50).splits["train"]) < rows(one["train"])
    assert rows(data(validation=50).splits["train"]) == rows(one["train"])


def test_train_none_uses_all_images_that_are_not_held_out() -> None:
    assert data(train=None).size("train") == 400


def test_a_size_that_classes_do_not_divide_is_split_as_evenly_as_possible() -> None:
    assert sorted(torch.bincount(data(train=33).splits["train"].labels).tolist()) == [3] * 7 + [4] * 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": 600}, r"data\.train=600: must be between 1 and 500"),
        ({"validation": 0}, r"data\.validation=0: must be between 1 and 500"),
        ({"test": 101}, r"data\.test=101: must be between 1 and 100"),
        ({"train": 450}, r"data\.validation=100, data\.train=450: together must be at most 500"),
        ({"resolution": 20}, r"data\.resolution=20: must be one of 1, 2, 4, 8, 16, 32"),
        ({"pad": -1}, r"data\.pad=-1: must be at least 0"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        data(**changes)


def test_a_stream_depends_on_its_generator_only() -> None:
    images = data()
    one, same, other = (images.stream(64, make_generator("data", rng_seed)) for rng_seed in (1, 1, 2))
    for _ in range(12):  # more than one pass over the data
        x, y = one.next()
        torch.rand(3)
        other_x, _ = other.next()
        same_x, same_y = same.next()
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
        assert not torch.equal(x, other_x)


def test_a_stream_has_every_image_once_per_pass() -> None:
    images = data(train=200, pad=0, flip=False)
    stream = images.stream(40, make_generator("data", 0))
    first, second = ([stream.next()[0] for _ in range(5)] for _ in range(2))
    everything, _ = next(images.batches("train", 200))

    def ordered(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).sum(1).sort().values

    assert torch.equal(ordered(torch.cat(first)), ordered(everything))
    assert torch.equal(ordered(torch.cat(second)), ordered(everything))
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_the_batches_of_a_stream_do_not_depend_on_how_many_are_prepared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    for size in (1, 2**20, 2**23):  # one batch, several, more than a pass over the data
        monkeypatch.setattr("esper.data.images.CHUNK_BYTES", size)
        stream = data().stream(20, make_generator("data", 0))
        drawn.append([stream.next() for _ in range(20)])
    for other in drawn[1:]:
        for (x, y), (other_x, other_y) in zip(drawn[0], other, strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)


def test_augmented_images_are_crops_of_the_padded_image_possibly_flipped() -> None:
    images = data(train=10)
    index = torch.arange(10).repeat(40)
    x, y = images.crop(index, *images.draw_crops(len(index), make_generator("data", 0)))
    assert torch.equal(y, images.splits["train"].labels[index])
    black = (0 - 127.5) / 63.75
    source, _ = next(images.batches("train", 10))
    padded = torch.nn.functional.pad(source, (4, 4, 4, 4), value=black)
    places = list(product(range(9), range(9), (False, True)))
    windows = [padded[:, :, row : row + 32, column : column + 32] for row, column, _ in places]
    crops = torch.stack([crop.flip(3) if place[2] else crop for crop, place in zip(windows, places, strict=True)])
    seen = set()
    for image, where in zip(x, index, strict=True):
        (match,) = torch.isclose(crops[:, where], image).flatten(1).all(1).nonzero().flatten().tolist()
        seen.add(places[match])
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(9))
    assert {flipped for _, _, flipped in seen} == {False, True}


def test_batches_are_normalised_in_channels_last_and_complete() -> None:
    images = data(validation=90)
    parts = list(images.batches("validation", 40))
    assert [len(y) for _, y in parts] == [40, 40, 10]
    x = torch.cat([x for x, _ in parts])
    raw = images.splits["validation"].images.permute(0, 3, 1, 2).float()
    torch.testing.assert_close(x, (raw / 255 - 0.5) / 0.25)
    assert parts[0][0].is_contiguous(memory_format=torch.channels_last)
    assert images.stream(8, None).next()[0].is_contiguous(memory_format=torch.channels_last)


def test_a_lower_resolution_averages_the_images() -> None:
    full, half = data(), data(resolution=16)
    means = full.splits["test"].images.float().unflatten(2, (16, 2)).unflatten(1, (16, 2)).mean((2, 4))
    assert torch.equal(half.splits["test"].images, means.round().to(torch.uint8))
    x, _ = half.stream(8, make_generator("data", 0)).next()
    assert x.shape == (8, 3, 16, 16)


@pytest.mark.parametrize("batch", [0, 301])
def test_a_batch_that_is_empty_or_larger_than_the_split_is_refused(batch: int) -> None:
    with pytest.raises(DataError, match=rf"batch={batch}: must be between 1 and the 300 samples of the training split"):
        data().stream(batch, None)


def test_streams_run_on_the_meta_device() -> None:
    """A hidden CPU tensor or a read of a value would raise here."""
    images = data()
    images.splits["train"] = Labelled(*(t.to("meta") for t in (KNOWN.images[:300], KNOWN.labels[:300])))
    images._padded, images._mean, images._std = (t.to("meta") for t in (images._padded, images._mean, images._std))
    images.device = torch.device("meta")
    x, y = images.stream(64, None).next()
    assert (x.shape, y.shape, x.device.type) == ((64, 3, 32, 32), (64,), "meta")


@pytest.mark.parametrize("preset", ["cifar10", "synthetic_images"])
def test_the_presets_load(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.data.cifar10.read_cifar10", lambda root: (black(50_000), black(10_000)))
    images = load_preset(f"data/{preset}", resolution=8)
    assert images.name == preset
    assert images.size("train") >= 10_000
