"""Device-resident data: CIFAR-10, TinyStories and synthetic data, in three splits, as streams of batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.data.images import ImageData, ImageOptions, Labelled
    from esper.data.protocols import Data, Stream
    from esper.data.store import DataError
    from esper.data.text import TextData

_MODULES = {  # imported when a name is used, so that `python -m esper.data --help` does not import torch
    "Data": "protocols",
    "DataError": "store",
    "ImageData": "images",
    "ImageOptions": "images",
    "Labelled": "images",
    "Stream": "protocols",
    "TextData": "text",
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
    "Labelled",
    "Stream",
    "TextData",
]
