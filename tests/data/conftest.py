from pathlib import Path

import pytest

from esper.data import cifar10
from tests.data.fixtures_files import PER_BATCH, channel_means


@pytest.fixture
def data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty data directory; CIFAR-10 cannot be downloaded unless the test changes that."""
    monkeypatch.setattr(cifar10, "PER_BATCH", PER_BATCH)
    monkeypatch.setattr(cifar10, "CHANNEL_MEANS", channel_means())
    monkeypatch.setattr(cifar10, "CIFAR10_URL", (tmp_path / "offline" / cifar10.ARCHIVE).as_uri())
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
