"""Stories as tokens, resident on a device, and their batches."""

import hashlib
import math
import pickle
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from esper.data.splits import Shuffle
from esper.data.store import DataError, partial, working
from esper.data.tokens import Tokenizer, from_state, learn

Number = TypeVar("Number", float, Tensor)

AT_ONCE = 1_000  # stories that are encoded together; more only take memory


HELD_OUT = 10  # one story in so many is kept out of training


class TextOptions(TypedDict):
    """What every set of stories can be asked for. Sizes are in bytes of text, so they do not depend on the tokens."""

    train_bytes: int | None  # at most; None is all there are, of nine in ten stories
    validation_bytes: int | None  # likewise, of the others
    test_bytes: int | None
    split_seed: int  # decides which stories are held out for validation
    vocabulary: int  # most tokens: 257 is plain bytes, more are byte pairs learned from the training text
    block_size: int  # tokens of context
    device: str | torch.device


class TextData:
    """Train, validation and test text as tokens on one device, cut into blocks without padding.

    The options are those of TextOptions. Arguments:
        name: of the data set that is really in use
        known: stories to train and validate on
        unseen: stories to test on
        cache: directory to keep the tokens in; None keeps none
    """

    kind = "text"

    def __init__(
        self,
        *,
        name: str,
        known: Sequence[str],
        unseen: Sequence[str],
        cache: Path | None,
        train_bytes: int | None,
        validation_bytes: int | None,
        test_bytes: int | None,
        split_seed: int,
        vocabulary: int,
        block_size: int,
        device: str | torch.device,
    ) -> None:
        if block_size < 1:
            raise DataError(f"data.block_size={block_size}: must be at least 1.")
        self.name = name
        self.block_size = block_size
        self.device = torch.device(device)
        stories = {
            "train": _first([s for s in known if not _held_out(s, split_seed)], train_bytes, "data.train_bytes"),
            "validation": _first(
                [s for s in known if _held_out(s, split_seed)], validation_bytes, "data.validation_bytes"
            ),
            "test": _first(unseen, test_bytes, "data.test_bytes"),
        }
        self.tokenizer, tokens = _tokenised(stories, vocabulary, cache)
        self.vocabulary = vocabulary
        self.splits = {split: ids.to(self.device) for split, ids in tokens.items()}
        token_bytes = torch.tensor(self.tokenizer.token_bytes())
        self._bytes_per_token = {}
        for split, ids in tokens.items():
            if self.size(split) < 1:
                raise DataError(f"data.block_size={block_size}: the {split} split has only {len(ids):,} tokens.")
            targets = ids[1 : self.size(split) * block_size + 1].long()
            self._bytes_per_token[split] = token_bytes[targets].sum().item() / len(targets)

    def size(self, split: str) -> int:
        """How many blocks; each is predicted from the token before it on."""
        return (len(self.splits[split]) - 1) // self.block_size

    def preparation(self) -> dict[str, Any]:
        """Text as tokens, at most `block_size`; `esper.data.tokens.from_state` makes the tokenizer from its state."""
        sizes = {"block_size": self.block_size, "vocabulary": self.vocabulary}
        return {"name": self.name, "kind": self.kind, **sizes, "tokenizer": self.tokenizer.state()}

    @property
    def options(self) -> int:
        """How many tokens there are to choose from."""
        return self.tokenizer.vocabulary

    def bits_per_byte(self, split: str, loss: Number) -> Number:
        """A mean loss in nats per token of a whole split, as bits per byte of its text, which any tokens compare by."""
        return loss / math.log(2) / self._bytes_per_token[split]

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """What counts: bits per byte, negative and times 100, so that more is better as with percentage points."""
        return -100 * self.bits_per_byte(split, loss)

    def stream(self, batch: int, generator: torch.Generator | None) -> "TextStream":
        """Training batches without end; all randomness comes from `generator`."""
        return TextStream(self, batch, generator)

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order; the last batch may be smaller."""
        blocks = torch.arange(self.size(split), device=self.device)
        for start in range(0, len(blocks), batch):
            yield self.blocks(split, blocks[start : start + batch])

    def blocks(self, split: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [batch] of a split: int64 tokens [batch, block_size], and the tokens that follow each."""
        places = index[:, None] * self.block_size + torch.arange(self.block_size + 1, device=index.device)
        tokens = self.splits[split][places].long()
        return tokens[:, :-1], tokens[:, 1:]


class TextStream:
    """Training batches without end."""

    def __init__(self, data: TextData, batch: int, generator: torch.Generator | None) -> None:
        self._data = data
        self._shuffle = Shuffle(data.size("train"), batch, generator, data.device)

    def next(self) -> tuple[Tensor, Tensor]:
        """int64 tokens [batch, block_size], and the tokens that follow each"""
        return self._data.blocks("train", self._shuffle.take())


def _held_out(story: str, split_seed: int) -> bool:
    """Whether a story is for validation. It is decided by its own text, so it does not depend on what else is read."""
    return int.from_bytes(hashlib.blake2b(f"{split_seed}/{story}".encode(), digest_size=8).digest()) % HELD_OUT == 0


def _first(stories: Sequence[str], most: int | None, key: str) -> list[str]:
    """Stories from the front, the last one cut, so that they have at most `most` bytes in all; None is all of them."""
    if most is None:
        return list(stories)
    if most < 1:
        raise DataError(f"{key}={most}: must be at least 1, or null for all there are.")
    left, result = most, []
    for story in stories:
        content = story.encode()
        result.append(content[:left].decode(errors="ignore"))
        left -= len(content)
        if left <= 0:
            break
    return result


def _tokenised(
    stories: dict[str, list[str]], vocabulary: int, cache: Path | None
) -> tuple[Tokenizer, dict[str, Tensor]]:
    """The tokenizer learned from the training stories, and int32 tokens [n] of each split."""
    path = cache / f"tokens-{_fingerprint(stories, vocabulary)}.pt" if cache else None
    if path and path.is_file():
        try:
            saved = torch.load(path, weights_only=True)
            return from_state(saved["tokenizer"]), {split: saved["tokens"][split] for split in stories}
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, OSError):
            pass  # a damaged cache is made again
    with working("turning text into tokens"):
        tokenizer = learn(stories["train"], vocabulary)
        tokens = {split: _ids(tokenizer, texts) for split, texts in stories.items()}
    if path:
        with partial(path) as target:
            torch.save({"tokenizer": tokenizer.state(), "tokens": tokens}, target)
    return tokenizer, tokens


def _fingerprint(stories: dict[str, list[str]], vocabulary: int) -> str:
    digest = hashlib.sha256(str(vocabulary).encode())
    for split, texts in stories.items():
        digest.update(f"/{split}/{len(texts)}".encode())
        for text in texts:
            digest.update(f"/{len(text)}/{text}".encode())
    return digest.hexdigest()[:16]


def _ids(tokenizer: Tokenizer, stories: Sequence[str]) -> Tensor:
    ids = array("i")
    for start in range(0, len(stories), AT_ONCE):
        for encoded in tokenizer.encode(stories[start : start + AT_ONCE]):
            ids.extend(encoded)
            ids.append(tokenizer.end)
    return torch.frombuffer(ids, dtype=torch.int32).clone() if ids else torch.empty(0, dtype=torch.int32)
