"""Randomness belongs to someone: every random stream is derived from (purpose, seed, index)."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(purpose: str, rng_seed: int, index: int = 0) -> int:
    """A 63-bit seed for one purpose of one run; distinct triples give unrelated seeds."""
    digest = hashlib.blake2b(f"{purpose}/{rng_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(purpose: str, rng_seed: int, index: int = 0, device: torch.device | None = None) -> torch.Generator:
    """A generator of its own for one purpose; draws from it disturb no other stream."""
    return torch.Generator(device=device or torch.device("cpu")).manual_seed(derive_seed(purpose, rng_seed, index))


@contextmanager
def seeded_init(rng_seed: int) -> Iterator[None]:
    """Build modules inside: their initial weights follow from `seed`, and the global generator is left as it was.

    torch's initialisers draw from the process-wide CPU generator, so this belongs in the main thread only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng_seed)
        yield
