import os
from pathlib import Path

import pytest
import torch

from esper.config import load_preset
from esper.data import DataError, TextData, tinystories
from esper.data.__main__ import main
from esper.data.tokens import END, ByteTokenizer, learn
from esper.rng import make_generator

KNOWN = [f"Story {n}: the cat número {n} sat on mat {n * 7}.\nIt was happy." for n in range(200)]
UNSEEN = [f"Another story {n} about a dog." for n in range(40)]


def data(**changes: object) -> TextData:
    options = {
        "train_bytes": None, "validation_bytes": 500, "test_bytes": None, "split_seed": 0, "vocabulary": 300,
        "block_size": 16, "device": "cpu", "cache": None,
    }  # fmt: skip
    return TextData(name="cats", known=KNOWN, unseen=UNSEEN, **{**options, **changes})


def stories_of(text: TextData, split: str) -> list[str]:
    return text.tokenizer.decode(text.splits[split].tolist()).split(END)[:-1]


@pytest.mark.parametrize("vocabulary", [257, 300])
def test_decoding_inverts_encoding_and_token_bytes_add_up(vocabulary: int) -> None:
    tokenizer = learn(KNOWN, vocabulary)
    for story, tokens in zip([*UNSEEN, "Ünknown ☃"], tokenizer.encode([*UNSEEN, "Ünknown ☃"]), strict=True):
        assert tokenizer.decode(tokens) == story
        assert sum(tokenizer.token_bytes()[token] for token in tokens) == len(story.encode())
        assert tokenizer.end not in tokens
    assert len(tokenizer.token_bytes()) == tokenizer.vocabulary == vocabulary
    assert tokenizer.token_bytes()[tokenizer.end] == 0


def test_a_vocabulary_of_257_is_plain_bytes_and_a_smaller_one_is_refused() -> None:
    assert isinstance(learn(KNOWN, 257), ByteTokenizer)
    with pytest.raises(DataError, match=r"data\.vocabulary=256: must be 257 \(plain bytes\) or more"):
        learn(KNOWN, 256)


def test_pairs_are_learned_from_the_training_split_only() -> None:
    odd = ["zqzqzqzqzqzq " * 50]
    text = TextData(
        name="cats", known=KNOWN, unseen=odd, cache=None, train_bytes=None, validation_bytes=500, test_bytes=None,
        split_seed=0, vocabulary=300, block_size=16, device="cpu",
    )  # fmt: skip
    assert len(text.splits["test"]) == len(odd[0]) + 1  # none of its pairs was learned


def test_validation_stories_are_not_in_the_training_split() -> None:
    text = data(validation_bytes=None)
    held_out, trained = stories_of(text, "validation"), stories_of(text, "train")
    assert sorted(held_out + trained) == sorted(KNOWN)
    assert 8 <= len(held_out) <= 40
    assert stories_of(data(validation_bytes=None, split_seed=1), "validation") != held_out
    assert stories_of(text, "test") == UNSEEN


def test_validation_stories_do_not_depend_on_how_much_is_read() -> None:
    held_out = stories_of(data(validation_bytes=500), "validation")
    less = TextData(
        name="cats", known=KNOWN[:150], unseen=UNSEEN, cache=None, train_bytes=900, validation_bytes=500,
        test_bytes=None, split_seed=0, vocabulary=300, block_size=16, device="cpu",
    )  # fmt: skip
    assert stories_of(less, "validation") == held_out
    assert not set(stories_of(data(), "train")) & set(held_out)


def test_sizes_are_maxima_in_bytes_of_text() -> None:
    text = data(train_bytes=1000, test_bytes=400)
    assert sum(len(story.encode()) for story in stories_of(text, "train")) in (999, 1000)  # never a part of a character
    assert stories_of(data(train_bytes=1000, vocabulary=257), "train") == stories_of(text, "train")
    assert sum(len(story.encode()) for story in stories_of(text, "test")) == 400
    assert stories_of(data(test_bytes=10**9), "test") == UNSEEN


def test_blocks_are_consecutive_without_padding_and_targets_are_the_next_tokens() -> None:
    text = data()
    parts = list(text.batches("validation", 4))
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    tokens = text.splits["validation"].long()
    count = (len(tokens) - 1) // 16
    assert x.shape == y.shape == (count, 16)
    assert torch.equal(x.flatten(), tokens[: count * 16])
    assert torch.equal(y.flatten(), tokens[1 : count * 16 + 1])


def test_a_stream_depends_on_its_generator_only_and_has_every_block() -> None:
    text = data()
    one, same = (text.stream(10, make_generator("data", 3)) for _ in range(2))
    seen = []
    for _ in range(text.size("train") // 10):
        x, y = one.next()
        assert torch.equal(x, same.next()[0])
        assert torch.equal(x[:, 1:], y[:, :-1])
        seen.append(x)
    blocks, _ = next(text.batches("train", text.size("train")))
    assert {tuple(b) for b in torch.cat(seen).tolist()} <= {tuple(b) for b in blocks.tolist()}
    assert len(torch.cat(seen).unique(dim=0)) == len(torch.cat(seen))


@pytest.mark.parametrize("vocabulary", [257, 300])
def test_bits_per_byte_count_the_predicted_bytes(vocabulary: int) -> None:
    text = data(vocabulary=vocabulary)
    _, targets = next(text.batches("test", text.size("test")))
    predicted = text.tokenizer.decode(targets.flatten().tolist()).replace(END, "")
    nats = 1.7 * targets.numel()
    expected = nats / 0.6931471805599453 / len(predicted.encode())
    assert text.bits_per_byte("test", 1.7) == pytest.approx(expected, rel=1e-6)


def test_tokens_are_cached_and_a_damaged_cache_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data(cache=tmp_path)
    (cached,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("esper.data.text.learn", None)  # a second load must not learn
        again = data(cache=tmp_path)
    assert torch.equal(first.splits["train"], again.splits["train"])
    assert stories_of(again, "test") == UNSEEN
    data(cache=tmp_path, vocabulary=301)
    assert len(list(tmp_path.iterdir())) == 2
    cached.write_bytes(b"damaged")
    assert torch.equal(first.splits["train"], data(cache=tmp_path).splits["train"])
    for content in ([], {"tokenizer": None, "tokens": []}, {"tokenizer": "", "tokens": {"train": 1}}):
        torch.save(content, cached)
        assert torch.equal(first.splits["train"], data(cache=tmp_path).splits["train"])
    data(cache=tmp_path, vocabulary=257)
    assert stories_of(data(cache=tmp_path, vocabulary=257), "test") == UNSEEN


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"validation_bytes": 0}, r"data\.validation_bytes=0: must be at least 1, or null for all"),
        ({"test_bytes": 0}, r"data\.test_bytes=0: must be at least 1"),
        ({"block_size": 0}, r"data\.block_size=0: must be at least 1"),
        ({"block_size": 5000}, r"data\.block_size=5000: must be below 4,\d+, the tokens of train"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        data(**changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with TinyStories as downloaded: with separators, blank lines and extra spaces."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(tinystories, "TINYSTORIES_URL", f"{(tmp_path / 'offline').as_uri()}/{{}}")
    (tmp_path / "root").mkdir()
    train = f"\n{END}\n".join(story.replace("\n", " \n\n") for story in KNOWN)
    (tmp_path / "root" / "train.txt").write_text(f"{train}\n{END}\n")
    (tmp_path / "root" / "valid.txt").write_text("\n\n".join(UNSEEN))
    return tmp_path / "root"


def preset(root: Path | None, **changes: object) -> TextData:
    return load_preset("data/tinystories", root=root, validation_bytes=500, vocabulary=300, block_size=16, **changes)


def test_local_files_are_read_without_blank_lines_and_not_changed(folder: Path) -> None:
    text = load_preset("data/tinystories", root=folder, validation_bytes=None, vocabulary=300, block_size=16)
    assert text.name == "tinystories"
    assert sorted(stories_of(text, "train") + stories_of(text, "validation")) == sorted(KNOWN)
    assert stories_of(text, "test") == ["\n".join(UNSEEN)]
    assert sorted(os.listdir(folder)) == ["train.txt", "valid.txt"]


def test_the_training_file_is_read_only_as_far_as_needed(folder: Path) -> None:
    text = preset(folder, train_bytes=1000)
    assert sum(len(story.encode()) for story in stories_of(text, "train")) in (999, 1000)


def test_missing_files_are_downloaded(folder: Path, tmp_path: Path) -> None:
    offline = tmp_path / "offline"
    offline.mkdir()
    (offline / tinystories.FILES["train"]).write_text("<html>Please log in.</html>")
    (folder / "train.txt").rename(folder / "saved")
    with pytest.raises(DataError, match=r"cannot be downloaded .*: the response of .* is not TinyStories"):
        preset(None)
    assert os.listdir(tmp_path / "cache") == []
    (folder / "saved").rename(folder / "train.txt")
    (folder / "valid.txt").write_text(f"\n{END}\n".join(UNSEEN))
    for part, official in tinystories.FILES.items():
        (folder / f"{part}.txt").rename(tmp_path / "offline" / official)
    assert stories_of(preset(None), "test") == UNSEEN
    assert sorted(name for name in os.listdir(tmp_path / "cache") if not name.startswith("tokens")) == [
        "TinyStories-train.txt",
        "TinyStories-valid.txt",
    ]


def test_an_offline_machine_gets_one_sentence_and_no_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        DataError, match=r"not in .*cache, and cannot be downloaded \(set data\.root to .*\(No such file"
    ):
        preset(None)
    assert main(["tinystories"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path / "cache") == []
    fallback = preset(None, fallback=True)
    assert fallback.name == "synthetic_stories"
    assert "Using SYNTHETIC STORIES instead" in caplog.text
    assert sorted(os.listdir(folder)) == ["train.txt", "valid.txt"]


def test_a_file_that_is_not_text_or_empty_is_refused(folder: Path) -> None:
    (folder / "valid.txt").write_bytes(b"good \xff bad")
    with pytest.raises(DataError, match=r"valid.txt is damaged: it is not text in UTF-8 \(byte 5\)"):
        preset(folder)
    (folder / "valid.txt").write_text(f"\n{END}\n\n")
    with pytest.raises(DataError, match=r"valid.txt contains no stories"):
        preset(folder)


def test_a_training_file_without_separators_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.txt").write_text("\n\n".join(KNOWN))
    with pytest.raises(DataError, match=r"train.txt is refused: its stories are not separated by <\|endoftext\|>"):
        preset(folder)
    assert main(["tinystories", "--root", str(folder)]) == 1
    assert "its stories are not separated" in capsys.readouterr().err


def test_the_command_prints_a_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tinystories", "--root", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["train", "200", "stories"]
    assert lines[2].split()[:3] == ["valid", "no", "separators"]


def test_the_synthetic_stories_are_reproducible_and_refer_to_earlier_sentences() -> None:
    one, other = (load_preset("data/synthetic_stories") for _ in range(2))
    assert one.name == "synthetic_stories"
    assert torch.equal(one.splits["train"], other.splits["train"])
    story = stories_of(one, "test")[0]
    friend = story.split("a friend, the ")[1].split(".")[0]
    assert story.count(friend) >= 3
    assert not set(stories_of(one, "test")) & set(stories_of(one, "train"))
