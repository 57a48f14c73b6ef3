"""Tokenizers: plain bytes, or byte-level byte-pair encoding (BPE) learned from the training text."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from esper.data.store import DataError

END = "<|endoftext|>"  # separates stories, in files and as a token
PLAIN_BYTES = 257  # tokens: 256 bytes and the end of a story
LEARN_FROM = 50_000_000  # characters; more hardly change the pairs


class Tokenizer(Protocol):
    """Converts stories to tokens and back; the end of a story is a separate token."""

    vocabulary: int  # number of tokens
    end: int  # the token at the end of a story

    def encode(self, stories: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self) -> list[int]:
        """Number of bytes of text of each token; 0 for the end of a story."""

    def state(self) -> str:
        """The tokenizer as a string, for `from_state`."""


class ByteTokenizer:
    """One token per byte."""

    vocabulary = PLAIN_BYTES
    end = 256

    def encode(self, stories: Sequence[str]) -> list[list[int]]:
        return [list(story.encode()) for story in stories]

    def decode(self, tokens: Sequence[int]) -> str:
        parts: list[bytes] = [END.encode() if token == self.end else bytes([token]) for token in tokens]
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self) -> list[int]:
        return [1] * 256 + [0]

    def state(self) -> str:
        return ""


class PairTokenizer:
    """Byte-level BPE; it can encode every text."""

    end = 0

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self.vocabulary: int = model.get_vocab_size()

    @classmethod
    def train(cls, stories: Sequence[str], vocabulary: int) -> "PairTokenizer":
        """Learn at most `vocabulary` tokens; a small text may have fewer pairs."""
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(_first_characters(stories), trainer)
        return cls(model)

    def encode(self, stories: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch(list(stories), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_bytes(self) -> list[int]:
        lengths = [0] * self.vocabulary
        for piece, index in self._model.get_vocab().items():
            lengths[index] = 0 if piece == END else len(piece)  # a byte-level piece has one character per byte
        return lengths

    def state(self) -> str:
        state: str = self._model.to_str()
        return state


def _first_characters(stories: Sequence[str]) -> Iterator[str]:
    """The first stories, about LEARN_FROM characters."""
    remaining = LEARN_FROM
    for story in stories:
        if remaining <= 0:
            return
        remaining -= len(story)
        yield story


def learn(stories: Sequence[str], vocabulary: int) -> Tokenizer:
    """A tokenizer with at most `vocabulary` tokens for these stories; 257 means plain bytes."""
    if vocabulary < PLAIN_BYTES:
        raise DataError(f"data.vocabulary={vocabulary}: must be {PLAIN_BYTES} (plain bytes) or more (byte pairs).")
    return ByteTokenizer() if vocabulary == PLAIN_BYTES else PairTokenizer.train(stories, vocabulary)


def from_state(state: str) -> Tokenizer:
    """The tokenizer with that state."""
    return PairTokenizer(tokenizers.Tokenizer.from_str(state)) if state else ByteTokenizer()
