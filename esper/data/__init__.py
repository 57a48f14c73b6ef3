"""Device-resident data: CIFAR-10, Fashion-MNIST, TinyStories, synthetic data; three splits, as streams of batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.data.images import ImageData, ImageOptions, Labelled
    from esper.data.protocols import Data, Stream
    from esper.data.store import DataError
    from esper.data.text import TextData
    from esper.data.variants import ImageVariant, TextVariant

_MODULES = {  # imported when a name is used, so that `python -m esper.data --help` does not import torch
    "Data": "protocols",
    "DataError": "store",
    "ImageData": "images",
    "ImageOptions": "images",
    "ImageVariant": "variants",
    "Labelled": "images",
    "Stream": "protocols",
    "TextData": "text",
    "TextVariant": "variants",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "Data",
    "DataError",
    "ImageData",
    "ImageOptions",
    "ImageVariant",
    "Labelled",
    "Stream",
    "TextData",
    "TextVariant",
]
