"""Grow a small GPT-2 of Hugging Face while Lightning trains it on TinyStories.

    pip install 'esper[examples]'
    python examples/grow_gpt2.py --root DIR    about a minute on one core; DIR has train.txt and valid.txt

Without --root, TinyStories is downloaded once, 1.9 GB.
"""

import argparse
from importlib.util import find_spec

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.config import load_preset
from esper.data import Data, DataError

if find_spec("transformers") is None:
    raise SystemExit("examples/grow_gpt2.py needs transformers: pip install 'esper[examples]'.")

from transformers import GPT2Config, GPT2LMHeadModel

SLOTS = r"model\.transformer\.h\.\d+"  # a regular expression: the output of every block


class StoryModel(L.LightningModule):
    """GPT2LMHeadModel as it is; the batches are tokens and the tokens that follow each."""

    def __init__(self, tokens: int, block_size: int, epochs: int = 10, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.epochs = epochs
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_inner": width}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=tokens, n_positions=block_size, use_cache=False, **sizes, **dropout, **ends)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


def load_stories(root: str | None) -> Data:
    """TinyStories in blocks of 64 tokens of a vocabulary of 512."""
    sizes = {"train_bytes": 3_000_000, "validation_bytes": 100_000, "test_bytes": 400_000}
    return load_preset("data/tinystories", root=root, vocabulary=512, block_size=64, **sizes)


def load(data: Data, split: str, batch: int) -> DataLoader:
    """Batches of tokens and of the tokens that follow each."""
    return DataLoader(TensorDataset(*next(data.batches(split, data.size(split)))), batch, shuffle=split == "train")


def train(data: Data, epochs: int = 10, batches: int = 150, batch: int = 32) -> nn.Module:
    """Train on `batches` batches in each epoch; the merged network."""
    torch.manual_seed(0)
    model = StoryModel(data.options, data.block_size, epochs)
    grow = esper.Grow(slots=SLOTS, causal=True, monitor="val_loss", mode="min")
    trainer = L.Trainer(max_epochs=epochs, limit_train_batches=batches, accelerator="cpu", callbacks=[grow])
    trainer.fit(model, load(data, "train", batch), load(data, "validation", 128))
    merged = esper.merge(model).eval()
    tokens, _ = next(data.batches("test", 16))
    print(f"outputs are equal after merging: {torch.equal(merged(tokens), model.eval()(tokens))}")
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description="Grow a small GPT-2 on TinyStories.")
    parser.add_argument("--root", help="directory with train.txt and valid.txt; default: ESPER_DATA or the cache")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    try:
        train(load_stories(options.root), options.epochs)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
