"""Variants of a data set that is already loaded: fewer classes, other colours, wrong labels, less data.

A variant has no images or tokens of its own. It selects from those of its base and changes each batch, so that many
variants of one data set fit into memory. A variant in another process is built again there, from its arguments and from
its base, whose tensors are shared.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.data.images import ImageData, ImageStream, pack_pixels, unpack_pixels
from esper.data.splits import interleave_classes
from esper.data.store import DataError
from esper.data.text import Number, TextData, TextStream, bytes_per_token
from esper.rng import make_generator

Colour = Literal["rgb", "grey", "mean"]

MAX_LABEL_NOISE = 0.4  # share of the training labels
LUMINANCE = (19_595, 38_470, 7_471)  # of red, green and blue, in 65,536ths (ITU-R BT.601, as in Pillow)


class ImageVariant:
    """A variant of an image data set, with the methods of `ImageData` that hosts and streams use.

    With the default arguments its batches are bit-equal to those of its base.

    Arguments:
        base: the data set
        classes: number of classes, which are chosen at random, or a list of classes; None is all. Labels are numbered
            from 0, in the order of the labels of the base
        colour: rgb leaves images as they are; grey replaces each pixel by its luminance, in all three channels; mean
            replaces each pixel by the mean colour of its image, without the border of a crop
        label_noise: share of training labels that are replaced by another class, drawn uniformly
        train: training images, balanced over classes; None is all
        permuted: reorder the pixels by one fixed permutation, after the crop, the same in all splits
        rng_seed: selects classes, training images, wrong labels and the permutation, independently of each other
    """

    kind = "images"

    def __init__(
        self,
        base: ImageData,
        *,
        classes: int | Sequence[int] | None = None,
        colour: Colour = "rgb",
        label_noise: float = 0.0,
        train: int | None = None,
        permuted: bool = False,
        rng_seed: int = 0,
    ) -> None:
        if colour not in get_args(Colour):
            raise DataError(f"colour={colour}: must be one of {', '.join(get_args(Colour))}.")
        if not 0 <= label_noise <= MAX_LABEL_NOISE:
            raise DataError(f"label_noise={label_noise}: must be between 0 and {MAX_LABEL_NOISE}.")
        self.base, self.device, self.resolution = base, base.device, base.resolution
        self._colour, self._permuted = colour, permuted
        self._label_noise, self._rng_seed = float(label_noise), rng_seed
        kept = _choose_classes(classes, base, rng_seed)
        self.classes = len(kept)
        index, labels = {}, {}
        for split, part in base.splits.items():
            original = part.labels.cpu()
            index[split] = torch.isin(original, kept).nonzero().flatten()  # in order, so that parts stay balanced
            labels[split] = torch.searchsorted(kept, original[index[split]])
        size = len(index["train"])
        if train is not None and not self.classes <= train <= size:
            raise DataError(
                f"train={train}: must be between {self.classes}, the number of classes, and {size:,}, their images."
            )
        self._train = None if train == size else train
        if self._train is not None:
            chosen = _choose_images(labels["train"], self._train, rng_seed)
            index["train"], labels["train"] = index["train"][chosen], labels["train"][chosen]
        labels["train"] = _replace_labels(labels["train"], label_noise, self.classes, rng_seed)
        self._kept = kept.tolist() if self.classes < base.classes else None
        self._index = {
            split: each.to(self.device, torch.int32) for split, each in index.items()
        }  # of the base's images
        self._labels = {split: each.to(self.device, torch.int16) for split, each in labels.items()}
        order = torch.randperm(self.resolution**2, generator=make_generator("variant pixels", rng_seed))
        self._order = order.to(self.device)  # of the pixels, if they are permuted
        levels = torch.arange(256, dtype=torch.float32, device=self.device).view(256, 1, 1, 1)
        self._levels = base.normalise(levels.repeat(1, 1, self.resolution, 3))[:, :, 0, 0]  # [256, 3], by luminance
        self.name = self._make_name()

    def __reduce__(self) -> tuple[Callable[[ImageData], "ImageVariant"], tuple[ImageData]]:
        arguments = {key: value for key, value in self.describe().items() if key != "base"}
        return partial(type(self), **arguments), (self.base,)

    def _make_name(self) -> str:
        """The base, and all that differs from it."""
        classes = "" if self._kept is None else f" of classes {'-'.join(map(str, self._kept))}"
        is_random = self._label_noise or self._train is not None or self._permuted
        changes = {
            "grey": self._colour == "grey",
            "mean colour": self._colour == "mean",
            f"label noise {self._label_noise:g}": self._label_noise > 0,
            f"train {self._train}": self._train is not None,
            "permuted": self._permuted,
            f"seed {self._rng_seed}": is_random,
        }
        return ", ".join([f"{self.base.name}{classes}", *(change for change, is_made in changes.items() if is_made)])

    def describe(self) -> dict[str, Any]:
        """The name of the base, and the arguments with the classes that were chosen, as plain data."""
        return {
            "base": self.base.name,
            "classes": self._kept,
            "colour": self._colour,
            "label_noise": self._label_noise,
            "train": self._train,
            "permuted": self._permuted,
            "rng_seed": self._rng_seed,
        }

    def preparation(self) -> dict[str, Any]:
        """How inputs are prepared: like those of the base, changed as in `variant`."""
        return {**self.base.preparation(), "name": self.name, "classes": self.classes, "variant": self.describe()}

    @property
    def options(self) -> int:
        """Number of classes."""
        return self.classes

    def size(self, split: str) -> int:
        """Number of images in a split."""
        return len(self._labels[split])

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """The score of the base."""
        return self.base.score(split, loss, accuracy)

    def stream(self, batch: int, generator: torch.Generator | None) -> ImageStream:
        """Endless, augmented training batches; all randomness comes from `generator`."""
        return ImageStream(self, batch, generator)

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order, not augmented; the last batch may be smaller."""
        images, index, labels = self.base.splits[split].images, self._index[split], self._labels[split]
        for start in range(0, len(index), batch):
            selected = images.index_select(0, index[start : start + batch].long())
            yield self._prepare(selected), labels[start : start + batch].long()

    def draw_crops(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Rows and columns of random crops, like those of the base."""
        return self.base.draw_crops(count, generator)

    def crop(self, index: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Crops of training images `index` [batch]: float [batch, 3, side, side], and labels."""
        selected, labels = self._index["train"][index].long(), self._labels["train"][index].long()
        if self._colour == "mean":
            return self._prepare(self.base.splits["train"].images.index_select(0, selected)), labels
        pixels = self._permute(self.base.crop_packed(selected, rows, columns))
        if self._colour == "grey":
            return self._prepare_grey(pixels), labels
        return self.base.normalise(unpack_pixels(pixels)), labels

    def _prepare(self, images: Tensor) -> Tensor:
        """Images uint8 [batch, side, side, 3] -> float32 [batch, 3, side, side] in channels_last."""
        if self._colour == "mean":
            means = images.flatten(1, 2).sum(1, dtype=torch.float32) / self.resolution**2
            return self.base.normalise(means.repeat(1, self.resolution**2).view(images.shape))
        images = self._permute(images)
        return self._prepare_grey(pack_pixels(images)) if self._colour == "grey" else self.base.normalise(images)

    def _permute(self, images: Tensor) -> Tensor:
        """Images [batch, side, side, ...] with their pixels in the order of the variant."""
        if not self._permuted:
            return images
        return images.flatten(1, 2).index_select(1, self._order).view(images.shape)

    def _prepare_grey(self, pixels: Tensor) -> Tensor:
        """Packed pixels int32 [batch, side, side] -> normalised luminance, float32 [batch, 3, side, side]."""
        return F.embedding(_luminance(pixels), self._levels).permute(0, 3, 1, 2)  # faster than computing each channel


def _choose_classes(classes: int | Sequence[int] | None, base: ImageData, rng_seed: int) -> Tensor:
    """The classes of a variant, int64 [n], in order."""
    if classes is None:
        return torch.arange(base.classes)
    if isinstance(classes, int):
        if not 2 <= classes <= base.classes:
            raise DataError(f"classes={classes}: must be between 2 and {base.classes}, the classes of {base.name}.")
        return (
            torch.randperm(base.classes, generator=make_generator("variant classes", rng_seed))[:classes].sort().values
        )
    listed = sorted(set(classes))
    if len(listed) != len(classes) or len(listed) < 2 or not 0 <= listed[0] <= listed[-1] < base.classes:
        raise DataError(
            f"classes={list(classes)}: must be at least 2 different classes of {base.name}, "
            f"from 0 to {base.classes - 1}."
        )
    return torch.tensor(listed)


def _choose_images(labels: Tensor, count: int, rng_seed: int) -> Tensor:
    """Indices of a random part of `labels` [n], balanced over classes; a larger part has all of a smaller one."""
    order = torch.randperm(len(labels), generator=make_generator("variant train", rng_seed))
    return order[interleave_classes(labels[order])][:count].sort().values


def _replace_labels(labels: Tensor, share: float, classes: int, rng_seed: int) -> Tensor:
    """`labels` [n] with a share of them replaced by another class."""
    generator = make_generator("variant label noise", rng_seed)
    count = round(share * len(labels))
    replaced = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, classes, (count,), generator=generator)
    return labels.index_put((replaced,), (labels[replaced] + shift) % classes)


def _luminance(pixels: Tensor) -> Tensor:
    """Packed pixels int32 -> luminance int32, 0 to 255. Integers, so that it does not depend on the batch."""
    red, green, blue = pixels & 255, (pixels >> 8) & 255, pixels >> 16
    total = red.mul_(LUMINANCE[0]).add_(green.mul_(LUMINANCE[1])).add_(blue.mul_(LUMINANCE[2]))
    return total.add_(2**15).bitwise_right_shift_(16)


class TextVariant:
    """A variant of a text data set with less training text, and the methods of `TextData` that hosts and streams use.

    The tokens are those of the base, which were learned from all of its training text.

    Arguments:
        base: the data set
        train: training tokens, a contiguous part; None is all
        rng_seed: selects where the part begins; None is the start of the training text
    """

    kind = "text"

    def __init__(self, base: TextData, *, train: int | None = None, rng_seed: int | None = None) -> None:
        tokens, block_size = len(base.splits["train"]), base.block_size
        if train is not None and not block_size < train <= tokens:
            raise DataError(
                f"train={train}: must be between {block_size + 1:,}, one block, and {tokens:,}, the training tokens."
            )
        self.base, self.device, self.tokenizer = base, base.device, base.tokenizer
        self._train = None if train == tokens else train
        self._rng_seed = rng_seed
        self._blocks = base.size("train") if train is None else (train - 1) // block_size
        self._first = 0  # block
        if rng_seed is not None:
            starts = base.size("train") - self._blocks + 1
            self._first = int(torch.randint(starts, (), generator=make_generator("variant text", rng_seed)))
        part = "" if self._train is None else f", train {self._train}" + (f", seed {rng_seed}" if self._first else "")
        self.name = f"{base.name}{part}"

    def __reduce__(self) -> tuple[Callable[[TextData], "TextVariant"], tuple[TextData]]:
        return partial(type(self), train=self._train, rng_seed=self._rng_seed), (self.base,)

    def describe(self) -> dict[str, Any]:
        """The name of the base, and the arguments, as plain data."""
        return {"base": self.base.name, "train": self._train, "rng_seed": self._rng_seed}

    def preparation(self) -> dict[str, Any]:
        """How inputs are prepared: like those of the base."""
        return {**self.base.preparation(), "name": self.name, "variant": self.describe()}

    @property
    def options(self) -> int:
        """Number of tokens of the tokenizer."""
        return self.base.options

    def size(self, split: str) -> int:
        """Number of blocks in a split."""
        return self._blocks if split == "train" else self.base.size(split)

    def bits_per_byte(self, split: str, loss: Number) -> Number:
        """A split's mean loss, in nats per token, as bits per byte, which is comparable between tokenizers."""
        if split == "train":
            return loss / math.log(2) / self._train_bytes_per_token
        return self.base.bits_per_byte(split, loss)

    @cached_property
    def _train_bytes_per_token(self) -> float:
        start, size = self._first * self.base.block_size, self._blocks * self.base.block_size
        return bytes_per_token(self.tokenizer, self.base.splits["train"][start + 1 : start + size + 1].cpu())

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """-100 x bits per byte, as for the base."""
        return -100 * self.bits_per_byte(split, loss)

    def stream(self, batch: int, generator: torch.Generator | None) -> TextStream:
        """Endless training batches; all randomness comes from `generator`."""
        return TextStream(self, batch, generator)

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order; the last batch may be smaller."""
        blocks = torch.arange(self.size(split), device=self.device)
        for start in range(0, len(blocks), batch):
            yield self.blocks(split, blocks[start : start + batch])

    def blocks(self, split: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [batch] of a split: int64 tokens [batch, block_size], and the tokens that follow each."""
        return self.base.blocks(split, index + self._first if split == "train" else index)
