"""Stories as tokens on a device, and their batches."""

import hashlib
import math
import pickle
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from esper.data.splits import Shuffle
from esper.data.store import DataError, show_status, write_atomically
from esper.data.tokens import Tokenizer, from_state, learn

Number = TypeVar("Number", float, Tensor)

ENCODE_BATCH = 1_000  # stories per call of the tokenizer; more only take memory
HOLD_OUT_EVERY = 10  # one story in ten is held out for validation


class TextOptions(TypedDict):
    """Options of every text data set. Sizes are in bytes of text, so they do not depend on the tokenizer."""

    train_bytes: int | None  # training text at most; None is all of the nine tenths that are not held out
    validation_bytes: int | None  # validation text at most; None is all of the tenth that is held out
    test_bytes: int | None  # test text at most; None is all
    split_seed: int  # selects the validation stories
    vocabulary: int  # number of tokens: 257 is plain bytes, more are byte pairs learned from the training text
    block_size: int  # context length, in tokens
    device: str | torch.device  # where the tokens are stored


class TextData:
    """Training, validation and test text as tokens on one device, in blocks without padding.

    Arguments:
        name: name of the data set in use; differs from the requested one after a fallback
        known: stories for training and validation
        unseen: stories for test
        cache: directory to save the tokens in; None does not save them
        train_bytes: training text at most, in bytes; None is all
        validation_bytes: validation text at most, in bytes; None is all
        test_bytes: test text at most, in bytes; None is all
        split_seed: selects the validation stories
        vocabulary: number of tokens at most; 257 is plain bytes
        block_size: context length, in tokens
        device: where the tokens are stored
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
        training = [story for story in known if not _is_held_out(story, split_seed)]
        held_out = [story for story in known if _is_held_out(story, split_seed)]
        stories = {
            "train": _truncate(training, train_bytes, "data.train_bytes"),
            "validation": _truncate(held_out, validation_bytes, "data.validation_bytes"),
            "test": _truncate(unseen, test_bytes, "data.test_bytes"),
        }
        self.tokenizer, tokens = _tokenise(stories, vocabulary, cache)
        self.vocabulary = vocabulary
        self.splits = {split: ids.to(self.device) for split, ids in tokens.items()}
        self._bytes_per_token = {}
        for split, ids in tokens.items():
            if self.size(split) < 1:
                raise DataError(f"data.block_size={block_size}: must be below {len(ids):,}, the tokens of {split}.")
            targets = ids[1 : self.size(split) * block_size + 1]
            self._bytes_per_token[split] = bytes_per_token(self.tokenizer, targets)

    def size(self, split: str) -> int:
        """Number of blocks in a split."""
        return (len(self.splits[split]) - 1) // self.block_size

    def preparation(self) -> dict[str, Any]:
        """How inputs are prepared: at most `block_size` tokens; `esper.data.tokens.from_state` loads the tokenizer."""
        sizes = {"block_size": self.block_size, "vocabulary": self.vocabulary}
        return {"name": self.name, "kind": self.kind, **sizes, "tokenizer": self.tokenizer.state()}

    @property
    def options(self) -> int:
        """Number of tokens of the tokenizer."""
        return self.tokenizer.vocabulary

    def bits_per_byte(self, split: str, loss: Number) -> Number:
        """A split's mean loss, in nats per token, as bits per byte, which is comparable between tokenizers."""
        return loss / math.log(2) / self._bytes_per_token[split]

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """-100 x bits per byte, so that higher is better and the scale is similar to percentage points."""
        return -100 * self.bits_per_byte(split, loss)

    def stream(self, batch: int, generator: torch.Generator | None) -> "TextStream":
        """Endless training batches; all randomness comes from `generator`."""
        return TextStream(self, batch, generator)

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order; the last batch may be smaller."""
        blocks = torch.arange(self.size(split), device=self.device)
        for start in range(0, len(blocks), batch):
            yield self.blocks(split, blocks[start : start + batch])

    def blocks(self, split: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [batch] of a split: int64 tokens [batch, block_size], and the tokens that follow each."""
        positions = index[:, None] * self.block_size + torch.arange(self.block_size + 1, device=index.device)
        tokens = self.splits[split][positions].long()
        return tokens[:, :-1], tokens[:, 1:]


def bytes_per_token(tokenizer: Tokenizer, tokens: Tensor) -> float:
    """Mean number of bytes of text of tokens [n]."""
    return torch.tensor(tokenizer.token_bytes())[tokens.long()].sum().item() / len(tokens)


class TrainingText(Protocol):
    """What a stream needs of its data set; the methods are those of `TextData`."""

    device: torch.device

    def size(self, split: str) -> int: ...

    def blocks(self, split: str, index: Tensor) -> tuple[Tensor, Tensor]: ...


class TextStream:
    """An endless stream of training batches."""

    def __init__(self, data: TrainingText, batch: int, generator: torch.Generator | None) -> None:
        self._data = data
        self._shuffle = Shuffle(data.size("train"), batch, generator, data.device)

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: int64 tokens [batch, block_size], and the tokens that follow each."""
        return self._data.blocks("train", self._shuffle.take())


def _is_held_out(story: str, split_seed: int) -> bool:
    """Whether a story is for validation; it depends on the story's text only, not on which other stories are read."""
    digest = hashlib.blake2b(f"{split_seed}/{story}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HOLD_OUT_EVERY == 0


def _truncate(stories: Sequence[str], max_bytes: int | None, key: str) -> list[str]:
    """The first stories, the last one truncated, with at most `max_bytes` bytes in total; None is all stories."""
    if max_bytes is None:
        return list(stories)
    if max_bytes < 1:
        raise DataError(f"{key}={max_bytes}: must be at least 1, or null for all.")
    remaining, result = max_bytes, []
    for story in stories:
        content = story.encode()
        result.append(content[:remaining].decode(errors="ignore"))
        remaining -= len(content)
        if remaining <= 0:
            break
    return result


def _tokenise(
    stories: dict[str, list[str]], vocabulary: int, cache: Path | None
) -> tuple[Tokenizer, dict[str, Tensor]]:
    """The tokenizer learned from the training stories, and int32 tokens [n] of each split."""
    path = cache / f"tokens-{_fingerprint(stories, vocabulary)}.pt" if cache else None
    if path and path.is_file():
        try:
            saved = torch.load(path, weights_only=True)
            return from_state(saved["tokenizer"]), {split: saved["tokens"][split] for split in stories}
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, OSError):
            pass  # a damaged cache is written again
    with show_status("tokenising text"):
        tokenizer = learn(stories["train"], vocabulary)
        tokens = {split: _encode(tokenizer, texts) for split, texts in stories.items()}
    if path:
        with write_atomically(path) as target:
            torch.save({"tokenizer": tokenizer.state(), "tokens": tokens}, target)
    return tokenizer, tokens


def _fingerprint(stories: dict[str, list[str]], vocabulary: int) -> str:
    digest = hashlib.sha256(str(vocabulary).encode())
    for split, texts in stories.items():
        digest.update(f"/{split}/{len(texts)}".encode())
        for text in texts:
            digest.update(f"/{len(text)}/{text}".encode())
    return digest.hexdigest()[:16]


def _encode(tokenizer: Tokenizer, stories: Sequence[str]) -> Tensor:
    ids = array("i")
    for start in range(0, len(stories), ENCODE_BATCH):
        for encoded in tokenizer.encode(stories[start : start + ENCODE_BATCH]):
            ids.extend(encoded)
            ids.append(tokenizer.end)
    return torch.frombuffer(ids, dtype=torch.int32).clone() if ids else torch.empty(0, dtype=torch.int32)
