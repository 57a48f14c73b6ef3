"""Random generators: each random stream is derived from (purpose, random seed, index)."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(purpose: str, rng_seed: int, index: int = 0) -> int:
    """A 63-bit random seed for one purpose; distinct (purpose, rng_seed, index) give independent random seeds."""
    digest = hashlib.blake2b(f"{purpose}/{rng_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(purpose: str, rng_seed: int, index: int = 0, device: torch.device | None = None) -> torch.Generator:
    """A separate generator for one purpose; sampling from it changes no other stream."""
    return torch.Generator(device=device or torch.device("cpu")).manual_seed(derive_seed(purpose, rng_seed, index))


@contextmanager
def seeded_init(rng_seed: int) -> Iterator[None]:
    """Context in which the initial weights of new modules follow from `rng_seed`; restores the global generator.

    torch's initialisers draw from the process-wide CPU generator, so use this in the main thread only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng_seed)
        yield
