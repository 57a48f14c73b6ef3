import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from esper.data import Data, DataError, ImageData, ImageVariant, TextVariant
from esper.data.images import Labelled
from esper.environment.transfer import dump_shared, load_shared
from esper.rng import make_generator
from tests.data.test_images import data
from tests.data.test_text import data as text

SPLITS = ("train", "validation", "test")
CHANGES: dict[str, dict[str, object]] = {
    "default": {},
    "classes": {"classes": 3},
    "grey": {"colour": "grey"},
    "mean": {"colour": "mean"},
    "noise": {"label_noise": 0.2},
    "train": {"train": 55},
    "permuted": {"permuted": True},
    "all": {"classes": 4, "colour": "grey", "label_noise": 0.4, "train": 41, "permuted": True, "rng_seed": 3},
}


@pytest.fixture(scope="module")
def base() -> ImageData:
    return data(resolution=16)


def whole(images: Data, split: str) -> tuple[Tensor, Tensor]:
    return next(images.batches(split, 1000))


def drawn(images: Data, count: int = 12, rng_seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    stream = images.stream(32, make_generator("data", rng_seed))
    return [stream.next() for _ in range(count)]


def assert_equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    for (x, y), (other_x, other_y) in zip(one, other, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
        assert y.dtype == other_y.dtype == torch.int64


def pixels(x: Tensor) -> Tensor:
    """Normalised images as they were, 0 to 255, [n, side, side, 3]; the mean and the scale are those of `data`."""
    return (x * 63.75 + 127.5).permute(0, 2, 3, 1)


def is_balanced(labels: Tensor, classes: int) -> bool:
    counts = torch.bincount(labels, minlength=classes)
    return bool(counts.max() - counts.min() <= 1)


def test_with_default_arguments_all_batches_are_bit_equal_to_those_of_the_base(base: ImageData) -> None:
    variant = ImageVariant(base)
    assert_equal(drawn(variant), drawn(base))
    for split in SPLITS:
        assert_equal(list(variant.batches(split, 32)), list(base.batches(split, 32)))
        assert variant.size(split) == base.size(split)
    assert (variant.name, variant.kind, variant.options, variant.classes) == ("noise", "images", 10, 10)
    assert torch.equal(variant.score("test", torch.ones(2), torch.rand(2) * 0 + 0.5), torch.full((2,), 50.0))


@pytest.mark.parametrize("name", CHANGES)
def test_batches_are_in_channels_last_and_do_not_depend_on_how_many_are_prepared_at_once(
    base: ImageData, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = ImageVariant(base, **CHANGES[name])  # type: ignore[arg-type]
    at_once = drawn(variant)
    monkeypatch.setattr("esper.data.images.CHUNK_BYTES", 1)
    one_by_one = drawn(variant)
    assert_equal(at_once, one_by_one)
    for x, _ in (at_once[0], one_by_one[0], whole(variant, "test")):
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert (x.dtype, x.shape[1:]) == (torch.float32, (3, 16, 16))


@pytest.mark.parametrize("name", CHANGES)
def test_a_variant_follows_from_its_arguments(base: ImageData, name: str) -> None:
    one, same = (ImageVariant(base, **CHANGES[name]) for _ in range(2))  # type: ignore[arg-type]
    assert_equal(drawn(one), drawn(same))
    arguments = json.loads(json.dumps(one.describe()))
    assert arguments.pop("base") == "noise"
    again = ImageVariant(base, **arguments)
    assert_equal(drawn(one), drawn(again))
    assert_equal([whole(one, "validation")], [whole(again, "validation")])
    assert again.name == one.name


@pytest.mark.parametrize("classes", [2, 3, 9, [7, 1, 4]])
def test_fewer_classes_have_new_labels_and_all_their_images(base: ImageData, classes: int | list[int]) -> None:
    variant = ImageVariant(base, classes=classes)
    kept = variant.describe()["classes"]
    assert kept == sorted(classes) if isinstance(classes, list) else len(set(kept)) == classes
    assert variant.options == variant.classes == len(kept)
    for split in SPLITS:
        (x, y), (base_x, base_y) = whole(variant, split), whole(base, split)
        belongs = torch.isin(base_y, torch.tensor(kept))
        assert torch.equal(x, base_x[belongs])
        assert torch.tensor(kept)[y].equal(base_y[belongs])
        assert variant.size(split) == len(y) == base.size(split) * len(kept) // 10
    x, y = drawn(variant)[0]
    assert set(y.tolist()) == set(range(len(kept)))


def test_a_stream_of_fewer_classes_has_the_images_of_its_labels() -> None:
    plain = data(pad=0, flip=False)
    variant = ImageVariant(plain, classes=[2, 5, 8])
    images, labels = whole(plain, "train")
    label_of = {image.numpy().tobytes(): label.item() for image, label in zip(images, labels, strict=True)}
    for x, y in drawn(variant, 3):
        assert [label_of[image.contiguous().numpy().tobytes()] for image in x] == [(2, 5, 8)[label] for label in y]


def test_classes_are_chosen_by_the_random_seed(base: ImageData) -> None:
    chosen = [ImageVariant(base, classes=3, rng_seed=rng_seed).describe()["classes"] for rng_seed in range(30)]
    assert {index for kept in chosen for index in kept} == set(range(10))
    assert len({tuple(kept) for kept in chosen}) > 20
    assert ImageVariant(base, classes=10).describe()["classes"] is None


@pytest.mark.parametrize("validation", [100, 47])
@pytest.mark.parametrize("classes", [2, 5, [0, 9], None])
def test_every_part_of_the_validation_split_from_its_start_is_balanced(
    validation: int, classes: int | list[int] | None
) -> None:
    variant = ImageVariant(data(validation=validation), classes=classes, label_noise=0.4, train=60)
    _, labels = whole(variant, "validation")
    assert all(is_balanced(labels[:count], variant.classes) for count in range(1, len(labels) + 1))


def test_grey_is_the_luminance_of_each_pixel_in_all_channels(base: ImageData) -> None:
    variant = ImageVariant(base, colour="grey")
    for split in SPLITS:
        images = base.splits[split].images.numpy()
        expected = torch.from_numpy(np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in images]))
        grey = pixels(whole(variant, split)[0])
        torch.testing.assert_close(grey, expected.float().unsqueeze(3).expand(-1, -1, -1, 3))
    for (x, y), (base_x, base_y) in zip(drawn(variant), drawn(base), strict=True):
        luminance = pixels(base_x) @ torch.tensor([0.299, 0.587, 0.114])
        torch.testing.assert_close(pixels(x), luminance.unsqueeze(3).expand(-1, -1, -1, 3), atol=0.51, rtol=0)
        assert torch.equal(y, base_y)


def test_each_channel_of_a_grey_image_is_normalised_like_that_channel_of_the_base(base: ImageData) -> None:
    images = base.splits["test"].images[:, :1, :1].expand(-1, 16, 16, -1)  # one colour each
    other = ImageData(
        name="plain", known=Labelled(images, base.splits["test"].labels), unseen=base.splits["test"],
        mean=(0.1, 0.2, 0.3), std=(0.2, 0.4, 0.8), train=20, validation=20, test=20, split_seed=0, resolution=16, pad=0,
        flip=False, device="cpu",
    )  # fmt: skip
    x = whole(ImageVariant(other, colour="grey"), "validation")[0]
    grey = (x * torch.tensor([51.0, 102, 204])[:, None, None]) + torch.tensor([25.5, 51, 76.5])[:, None, None]
    torch.testing.assert_close(grey, grey[:, :1].expand_as(grey), atol=1e-3, rtol=0)


def test_mean_is_the_mean_colour_of_the_whole_image_even_in_a_crop(base: ImageData) -> None:
    variant = ImageVariant(base, colour="mean")
    for split in SPLITS:
        expected = base.splits[split].images.float().mean((1, 2))
        colours = pixels(whole(variant, split)[0])
        torch.testing.assert_close(colours, expected[:, None, None].expand_as(colours))
    known = {tuple(colour) for colour in whole(variant, "train")[0][:, :, 0, 0].tolist()}
    for x, _ in drawn(variant):
        assert torch.equal(x, x[:, :, :1, :1].expand_as(x))
        assert {tuple(colour) for colour in x[:, :, 0, 0].tolist()} <= known


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_label_noise_replaces_a_share_of_the_training_labels_by_other_classes(base: ImageData, share: float) -> None:
    variant = ImageVariant(base, label_noise=share)
    (x, y), (base_x, base_y) = whole(variant, "train"), whole(base, "train")
    assert torch.equal(x, base_x)
    assert (y != base_y).sum() == round(share * 300)
    shifts = torch.bincount((y - base_y)[y != base_y] % 10, minlength=10)
    assert shifts[0] == 0
    assert shifts[1:].min() > 0
    other = whole(ImageVariant(base, label_noise=share, rng_seed=1), "train")[1]
    assert not torch.equal(y, other)
    for split in ("validation", "test"):
        assert_equal([whole(variant, split)], [whole(base, split)])
    seen = torch.cat([(y != base_y) for (_, y), (_, base_y) in zip(drawn(variant, 9), drawn(base, 9), strict=True)])
    assert seen.float().mean().item() == pytest.approx(share, abs=0.02)  # nine batches are a pass, but for 12 images


def test_label_noise_of_fewer_classes_draws_from_these(base: ImageData) -> None:
    _, right = whole(ImageVariant(base, classes=2), "train")
    _, wrong = whole(ImageVariant(base, classes=2, label_noise=0.25), "train")
    assert set(wrong.tolist()) == {0, 1}
    assert (right != wrong).sum() == 15


def test_fewer_training_images_are_balanced_and_part_of_a_larger_number(base: ImageData) -> None:
    def rows(variant: Data) -> set[bytes]:
        return {image.contiguous().numpy().tobytes() for image in whole(variant, "train")[0]}

    parts = [ImageVariant(base, train=count) for count in (10, 37, 200, 300)]
    for part, count in zip(parts, (10, 37, 200, 300), strict=True):
        x, y = whole(part, "train")
        assert len(x) == part.size("train") == count
        assert is_balanced(y, 10)
        assert_equal([whole(part, "validation")], [whole(base, "validation")])
    assert all(rows(part) < rows(larger) for part, larger in pairwise(parts))
    assert rows(parts[-1]) == rows(base)
    assert rows(ImageVariant(base, train=37, rng_seed=1)) != rows(parts[1])
    uneven = data(train=33)
    assert [ImageVariant(uneven, train=count).size("train") for count in (31, 33)] == [31, 33]


def test_pixels_are_permuted_in_the_same_order_in_all_splits_and_after_the_crop(base: ImageData) -> None:
    variant, other = ImageVariant(base, permuted=True), ImageVariant(base, permuted=True, rng_seed=1)
    x, base_x = whole(variant, "test")[0].flatten(2), whole(base, "test")[0].flatten(2)
    place = [(base_x == x[:, :, index : index + 1]).flatten(0, 1).all(0).nonzero().item() for index in range(256)]
    assert sorted(place) == list(range(256))
    assert place != sorted(place)
    for split in SPLITS:
        (x, y), (base_x, base_y) = whole(variant, split), whole(base, split)
        assert torch.equal(x.flatten(2), base_x.flatten(2)[:, :, place])
        assert torch.equal(y, base_y)
    for (x, y), (base_x, base_y) in zip(drawn(variant), drawn(base), strict=True):
        assert torch.equal(x.flatten(2), base_x.flatten(2)[:, :, place])
        assert torch.equal(y, base_y)
    assert not torch.equal(whole(variant, "test")[0], whole(other, "test")[0])


def test_the_name_has_all_that_differs_from_the_base(base: ImageData) -> None:
    assert ImageVariant(base, rng_seed=5).name == "noise"
    assert ImageVariant(base, classes=[0, 7, 3], colour="grey").name == "noise of classes 0-3-7, grey"
    assert ImageVariant(base, colour="mean", permuted=True).name == "noise, mean colour, permuted, seed 0"
    changed = ImageVariant(base, label_noise=0.2, train=200, rng_seed=5)
    assert changed.name == "noise, label noise 0.2, train 200, seed 5"
    described = {"base": "noise", "classes": None, "colour": "rgb", "label_noise": 0.2, "train": 200}
    assert changed.describe() == {**described, "permuted": False, "rng_seed": 5}
    few = ImageVariant(base, classes=3)
    prepared = {**base.preparation(), "name": few.name, "classes": 3, "variant": few.describe()}
    assert few.preparation() == prepared


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"colour": "red"}, r"colour=red: must be one of rgb, grey, mean\.$"),
        ({"classes": 1}, r"classes=1: must be between 2 and 10, the classes of noise\.$"),
        ({"classes": 11}, r"classes=11: must be between 2 and 10"),
        ({"classes": [3]}, r"classes=\[3\]: must be at least 2 different classes of noise, from 0 to 9\.$"),
        ({"classes": [3, 3]}, r"classes=\[3, 3\]: must be at least 2 different classes"),
        ({"classes": [3, 10]}, r"classes=\[3, 10\]: must be at least 2 different classes"),
        ({"label_noise": -0.1}, r"label_noise=-0\.1: must be between 0 and 0\.4\.$"),
        ({"label_noise": 0.41}, r"label_noise=0\.41: must be between 0 and 0\.4\.$"),
        ({"label_noise": float("nan")}, r"label_noise=nan: must be between 0 and 0\.4\.$"),
        ({"train": 9}, r"train=9: must be between 10, the number of classes, and 300, their images\.$"),
        ({"train": 301}, r"train=301: must be between 10, the number of classes, and 300, their images\.$"),
        ({"classes": 3, "train": 91}, r"train=91: must be between 3, the number of classes, and 90, their images\.$"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(
    base: ImageData, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        ImageVariant(base, **arguments)  # type: ignore[arg-type]


def own_tensors(part: object) -> list[Tensor]:
    values = list(part.values()) if isinstance(part, dict) else [part]
    return [value for value in values if isinstance(value, Tensor)]


def test_a_variant_has_no_images_of_its_own(base: ImageData) -> None:
    variant = ImageVariant(base, **CHANGES["all"])  # type: ignore[arg-type]
    own = [tensor for value in vars(variant).values() for tensor in own_tensors(value)]
    assert sum(tensor.nbytes for tensor in own) < 10_000  # the base has more than 400,000


def test_variants_that_are_sent_together_share_the_tensors_of_their_base() -> None:
    base = data(resolution=16)
    variants = {name: ImageVariant(base, **changes) for name, changes in CHANGES.items()}  # type: ignore[arg-type]
    content, tensors = dump_shared(variants)
    _, alone = dump_shared(base)
    assert len(tensors) == len(alone)
    assert len(content) < 5_000
    loaded = load_shared(content, tensors)
    assert len({id(variant.base) for variant in loaded.values()}) == 1
    images = loaded["grey"].base.splits["train"].images
    assert images.data_ptr() == base.splits["train"].images.data_ptr()
    assert images.is_shared()
    for name, variant in variants.items():
        assert_equal(drawn(loaded[name], 3), drawn(variant, 3))
        assert loaded[name].describe() == variant.describe()


def test_streams_of_variants_run_on_the_meta_device() -> None:
    """A hidden CPU tensor or a read of a value would raise here."""
    for changes in CHANGES.values():
        images = data(resolution=16)
        variant = ImageVariant(images, **changes)  # type: ignore[arg-type]
        to_meta = partial(Tensor.to, device="meta")
        images.splits = {
            key: Labelled(*map(to_meta, (part.images, part.labels))) for key, part in images.splits.items()
        }
        images._padded, images._mean, images._std = map(to_meta, (images._padded, images._mean, images._std))
        variant._order, variant._levels = to_meta(variant._order), to_meta(variant._levels)
        variant._index = {key: to_meta(value) for key, value in variant._index.items()}
        variant._labels = {key: to_meta(value) for key, value in variant._labels.items()}
        images.device = variant.device = torch.device("meta")
        for x, y in (variant.stream(20, None).next(), next(variant.batches("validation", 20))):
            assert (x.shape, y.shape, x.device.type) == ((20, 3, 16, 16), (20,), "meta")


def test_a_text_variant_without_arguments_is_equal_to_its_base() -> None:
    base = text()
    variant = TextVariant(base)
    assert_equal(drawn(variant), drawn(base))
    for split in SPLITS:
        assert_equal(list(variant.batches(split, 7)), list(base.batches(split, 7)))
        assert variant.bits_per_byte(split, 2.0) == base.bits_per_byte(split, 2.0)
    assert (variant.name, variant.kind, variant.options) == (base.name, "text", base.options)


@pytest.mark.parametrize("rng_seed", [None, 1, 2])
def test_a_text_variant_has_a_contiguous_part_of_the_training_text(rng_seed: int | None) -> None:
    base = text()
    variant = TextVariant(base, train=200, rng_seed=rng_seed)
    assert variant.size("train") == 12  # blocks of 16 tokens, and one token that follows
    x, y = whole(variant, "train")
    tokens = base.splits["train"].long()
    starts = [start for start in range(0, len(tokens) - 16, 16) if torch.equal(tokens[start : start + 16], x[0])]
    found = [start for start in starts if torch.equal(tokens[start : start + 192], x.flatten())]
    assert (found == [0]) == (rng_seed is None)
    assert torch.equal(y.flatten(), tokens[found[0] + 1 : found[0] + 193])
    assert variant.name == ("cats, train 200" if rng_seed is None else f"cats, train 200, seed {rng_seed}")
    assert variant.describe() == {"base": "cats", "train": 200, "rng_seed": rng_seed}
    assert_equal([whole(variant, "test")], [whole(base, "test")])
    known = {row.numpy().tobytes() for row in x}
    assert {row.numpy().tobytes() for batch, _ in drawn_text(variant) for row in batch} == known
    sizes = torch.tensor(base.tokenizer.token_bytes())[y.flatten()].float().mean().item()
    assert variant.bits_per_byte("train", 1.0) == pytest.approx(1 / np.log(2) / sizes)
    loss = torch.tensor([1.0, 2.0])
    assert torch.equal(variant.score("validation", loss, loss), base.score("validation", loss, loss))


def drawn_text(variant: TextVariant) -> list[tuple[Tensor, Tensor]]:
    stream = variant.stream(4, make_generator("data", 0))
    return [stream.next() for _ in range(6)]


@pytest.mark.parametrize("train", [16, 10**6])
def test_a_text_variant_that_is_too_small_or_too_large_is_refused(train: int) -> None:
    tokens = f"{len(text().splits['train']):,}"
    sentence = rf"train={train}: must be between 17, one block, and {tokens}, the training tokens\.$"
    with pytest.raises(DataError, match=sentence):
        TextVariant(text(), train=train)


def test_text_variants_that_are_sent_together_share_the_tokens_of_their_base() -> None:
    base = text()
    variants = [TextVariant(base, train=count, rng_seed=2) for count in (100, 200, 300)]
    content, tensors = dump_shared(variants)
    assert len(tensors) == len(base.splits)
    loaded = load_shared(content, tensors)
    assert loaded[0].base is loaded[2].base
    assert_equal(drawn_text(loaded[1]), drawn_text(variants[1]))
