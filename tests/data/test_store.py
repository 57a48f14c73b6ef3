import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from esper.data.store import DataError, cache_directory, data_directory, download, verify_checksum, write_atomically


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404, "Not Found Here")
            return
        self.send_response(200)
        self.send_header("Content-Length", "1000" if self.path == "/broken" else "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_download_is_complete(server: str, tmp_path: Path) -> None:
    download(f"{server}/file", tmp_path / "file", md5="5d41402abc4b2a76b9719d911017c592")
    assert (tmp_path / "file").read_bytes() == b"hello"


def test_an_incomplete_download_is_refused(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/broken: the download ended after 5 of 1,000 bytes\.$"):
        download(f"{server}/broken", tmp_path / "file")


def test_the_message_has_the_reason_of_a_failed_download(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/missing could not be downloaded \(Not Found Here\)\.$"):
        download(f"{server}/missing", tmp_path / "file")
    with pytest.raises(DataError, match=r"could not be downloaded \(Connection refused\)\.$"):
        download("http://127.0.0.1:9/file", tmp_path / "file")


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(DataError, match="is damaged: its md5 is 5d41402abc4b2a76b9719d911017c592, not beef"):
        verify_checksum(tmp_path / "file", "md5", "beef")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), DataError("bad")])
def test_a_failed_write_leaves_no_files(tmp_path: Path, failure: BaseException) -> None:
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else DataError

    def make() -> None:
        with write_atomically(tmp_path / "target") as path:
            path.write_bytes(b"partial")
            raise failure

    with pytest.raises(expected):
        make()
    assert os.listdir(tmp_path) == []


def test_a_complete_file_or_directory_is_renamed_to_its_target(tmp_path: Path) -> None:
    for _ in range(2):  # the second time it exists already
        with write_atomically(tmp_path / "folder") as path:
            path.mkdir()
            (path / "inside").write_text("complete")
        with write_atomically(tmp_path / "file") as path:
            path.write_text("complete")
    assert (tmp_path / "folder" / "inside").read_text() == (tmp_path / "file").read_text() == "complete"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_environment_variables_set_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "mine"))
    assert data_directory(None) == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
    monkeypatch.delenv("ESPER_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "esper"


def test_the_message_names_a_directory_that_is_missing_or_cannot_be_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "nowhere", tmp_path / "file", "~unknown-user/x"):
        with pytest.raises(DataError, match=f"root={wrong}: must be an existing directory"):
            data_directory(wrong)
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match="cannot be created"):
        data_directory(None)
