"""Labelled images on a device, and their batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.data.splits import Shuffle, interleave_classes, stratified_split
from esper.data.store import DataError

SIDE = 32  # pixels per side at full resolution
CHUNK_BYTES = 2**21  # of the batches that a stream prepares at once: few calls, and they stay in the cache


@dataclass(frozen=True)
class Labelled:
    """uint8 images [n, height, width, 3] and int64 labels [n]; batches are then in channels_last without a copy."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> "Labelled":
        """The images and labels at some indices."""
        return Labelled(self.images[index], self.labels[index])


class ImageOptions(TypedDict):
    """Options of every image data set."""

    train: int | None  # training images, balanced over classes like the other splits; None is all that are not held out
    validation: int  # validation images
    test: int  # test images
    split_seed: int  # selects the validation images
    resolution: int  # pixels per side; the images are averaged down to it
    pad: int  # padding before a random crop of training images, in pixels at full resolution
    flip: bool  # random horizontal flip of training images
    device: str | torch.device  # where the images are stored


class ImageData:
    """Training, validation and test images on one device.

    Arguments:
        name: name of the data set in use; differs from the requested one after a fallback
        known: images for training and validation
        unseen: images for test
        mean: mean of each channel, on the scale 0 to 1
        std: standard deviation of each channel, on the scale 0 to 1
        train: training images; None is all that are not held out
        validation: validation images
        test: test images
        split_seed: selects the validation images
        resolution: pixels per side
        pad: padding before a random crop, in pixels at full resolution
        flip: random horizontal flip
        device: where the images are stored
    """

    kind = "images"

    def __init__(
        self,
        *,
        name: str,
        known: Labelled,
        unseen: Labelled,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        train: int | None,
        validation: int,
        test: int,
        split_seed: int,
        resolution: int,
        pad: int,
        flip: bool,
        device: str | torch.device,
    ) -> None:
        if resolution < 1 or SIDE % resolution:
            allowed = ", ".join(str(side) for side in range(1, SIDE + 1) if SIDE % side == 0)
            raise DataError(f"data.resolution={resolution}: must be one of {allowed}.")
        if pad < 0:
            raise DataError(f"data.pad={pad}: must be at least 0.")
        self.name = name
        self.classes = int(known.labels.max()) + 1
        self.resolution = resolution
        self.device = torch.device(device)
        self._pad = pad * resolution // SIDE
        self._flip = flip
        self._mean = (torch.tensor(mean, device=device) * 255).repeat(resolution)  # of a row of pixels
        self._std = (torch.tensor(std, device=device) * 255).repeat(resolution)
        sizes = {"rng_seed": split_seed, "classes": self.classes}
        held_out, training = stratified_split(
            known.labels, validation, train, keys=("data.validation", "data.train"), **sizes
        )
        tested, _ = stratified_split(unseen.labels, test, None, keys=("data.test", "data.test"), **sizes)
        self.splits = {
            "train": self._to_device(known.take(training)),
            "validation": self._to_device(known.take(held_out[interleave_classes(known.labels[held_out])])),
            "test": self._to_device(unseen.take(tested)),
        }
        self._padded = pack_pixels(self.splits["train"].images, border=self._pad).flatten()

    def size(self, split: str) -> int:
        """Number of images in a split."""
        return len(self.splits[split])

    def preparation(self) -> dict[str, Any]:
        """How inputs are prepared: averaged down to `resolution`; each channel, 0 to 255, minus `mean`, over `std`."""
        scale = {"mean": self._mean[:3].tolist(), "std": self._std[:3].tolist()}
        return {"name": self.name, "kind": self.kind, "resolution": self.resolution, "classes": self.classes, **scale}

    @property
    def options(self) -> int:
        """Number of classes."""
        return self.classes

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """Accuracy in percent; `accuracy` is a share."""
        return 100 * accuracy

    def stream(self, batch: int, generator: torch.Generator | None) -> "ImageStream":
        """Endless, augmented training batches; all randomness comes from `generator`."""
        return ImageStream(self, batch, generator)

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order, not augmented; the last batch may be smaller."""
        data = self.splits[split]
        for start in range(0, len(data), batch):
            yield self.normalise(data.images[start : start + batch]), data.labels[start : start + batch]

    def draw_crops(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Rows and columns of random crops, int64 [count, side] each; columns are in reverse order in a flipped one."""
        side = torch.arange(self.resolution, device=self.device)

        def draw(options: int) -> Tensor:
            return torch.randint(options, (count, 1), generator=generator, device=self.device)

        rows = draw(2 * self._pad + 1) + side
        columns = draw(2 * self._pad + 1) + side
        if self._flip:
            columns = torch.where(draw(2) == 1, columns.flip(1), columns)
        return rows, columns

    def crop(self, index: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Crops of training images `index` [batch]: float [batch, 3, side, side], and labels."""
        images = unpack_pixels(self.crop_packed(index, rows, columns))
        return self.normalise(images), self.splits["train"].labels[index]

    def crop_packed(self, index: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Crops of training images `index` [batch]: packed pixels, int32 [batch, side, side]."""
        width = self.resolution + 2 * self._pad
        pixels = ((index * width).unsqueeze(1) + rows).unsqueeze(2) * width + columns.unsqueeze(1)
        return self._padded.index_select(0, pixels.flatten()).view(pixels.shape)  # faster than [pixels]

    def normalise(self, images: Tensor) -> Tensor:
        """Images [batch, height, width, 3] -> float32 [batch, 3, height, width] in channels_last.

        Images are uint8, or float32 from 0 to 255; float32 images are overwritten.
        """
        rows = images.to(torch.float32).flatten(2)  # by rows of pixels: loops over 3 channels would be slow
        return rows.sub_(self._mean).div_(self._std).view(images.shape).permute(0, 3, 1, 2)

    def _to_device(self, data: Labelled) -> Labelled:
        images = data.images
        factor = images.shape[1] // self.resolution
        if factor > 1:
            means = F.avg_pool2d(images.permute(0, 3, 1, 2).float(), factor)
            images = means.round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return Labelled(images.to(self.device), data.labels.to(self.device))


def pack_pixels(images: Tensor, border: int = 0) -> Tensor:
    """Images uint8 [n, height, width, 3] as int32 [n, height, width]: a pixel is one number, which is faster to gather.

    `border` is the width of a black border to add, in pixels.
    """
    count, height, width, _ = images.shape
    padded = images.new_zeros(count, height + 2 * border, width + 2 * border, 4)
    padded[:, border : border + height, border : border + width, :3] = images
    return padded.view(torch.int32).squeeze(3)


def unpack_pixels(pixels: Tensor) -> Tensor:
    """Packed pixels int32 [n, height, width] as uint8 [n, height, width, 3], without a copy."""
    return pixels.view(torch.uint8).view(*pixels.shape, 4)[..., :3]


class TrainingImages(Protocol):
    """What a stream needs of its data set; the methods are those of `ImageData`."""

    resolution: int
    device: torch.device

    def size(self, split: str) -> int: ...

    def draw_crops(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]: ...

    def crop(self, index: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]: ...


class ImageStream:
    """An endless stream of augmented training batches. Several are prepared at once."""

    def __init__(self, data: TrainingImages, batch: int, generator: torch.Generator | None) -> None:
        self._data = data
        self._batch, self._generator = batch, generator
        self._shuffle = Shuffle(data.size("train"), batch, generator, data.device)
        self._chunk = max(1, CHUNK_BYTES // (batch * data.resolution**2 * 3 * 4))
        self._images, self._labels = torch.empty(0), torch.empty(0)  # prepared and not yet returned

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: float32 images [batch, 3, side, side] in channels_last, and int64 labels [batch]."""
        if not len(self._labels):
            self._prepare()
        images, labels = self._images[: self._batch], self._labels[: self._batch]
        if len(self._labels) > self._batch:
            self._images, self._labels = self._images[self._batch :], self._labels[self._batch :]
        else:
            self._images, self._labels = torch.empty(0), torch.empty(0)
        return images, labels

    def _prepare(self) -> None:
        """Random numbers are drawn for one batch after the other, so that they do not depend on the chunk."""
        drawn = [
            (self._shuffle.take(), *self._data.draw_crops(self._batch, self._generator)) for _ in range(self._chunk)
        ]
        index, rows, columns = (torch.cat(part) for part in zip(*drawn, strict=True))
        self._images, self._labels = self._data.crop(index, rows, columns)
