"""Text to tokens and back: plain bytes, or byte-level pairs learned from the training text."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from esper.data.store import DataError

END = "<|endoftext|>"  # stands between stories, in files and as a token
PLAIN_BYTES = 257  # vocabulary of 256 bytes and the end of a story
LEARN_FROM = 50_000_000  # characters are plenty to count pairs in


class Tokenizer(Protocol):
    """Encodes stories; the end of a story is a token of its own."""

    vocabulary: int  # tokens there are
    end: int  # the token at the end of a story

    def encode(self, stories: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self) -> list[int]:
        """How many bytes of text each token stands for; the end of a story stands for none."""

    def state(self) -> str:
        """What `from_state` needs to make this tokenizer again."""


class ByteTokenizer:
    """A token for each byte."""

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
    """Byte-level pair encoding; every text can be encoded."""

    end = 0

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self.vocabulary: int = model.get_vocab_size()

    @classmethod
    def learned(cls, stories: Sequence[str], vocabulary: int) -> "PairTokenizer":
        """Learn up to `vocabulary` tokens; a small text may have pairs for fewer."""
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(_beginning(stories), trainer)
        return cls(model)

    def encode(self, stories: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch(list(stories), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_bytes(self) -> list[int]:
        lengths = [0] * self.vocabulary
        for piece, index in self._model.get_vocab().items():
            lengths[index] = 0 if piece == END else len(piece)  # a byte-level piece has a character a byte
        return lengths

    def state(self) -> str:
        state: str = self._model.to_str()
        return state


def _beginning(stories: Sequence[str]) -> Iterator[str]:
    left = LEARN_FROM
    for story in stories:
        if left <= 0:
            return
        left -= len(story)
        yield story


def learn(stories: Sequence[str], vocabulary: int) -> Tokenizer:
    """A tokenizer with at most `vocabulary` tokens for these stories; 257 means plain bytes."""
    if vocabulary < PLAIN_BYTES:
        raise DataError(f"data.vocabulary={vocabulary}: must be {PLAIN_BYTES} (plain bytes) or more (byte pairs).")
    return ByteTokenizer() if vocabulary == PLAIN_BYTES else PairTokenizer.learned(stories, vocabulary)


def from_state(state: str) -> Tokenizer:
    return PairTokenizer(tokenizers.Tokenizer.from_str(state)) if state else ByteTokenizer()
