"""Files that are written as a whole or not at all, and errors of the file system as one sentence."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path


class OutputError(Exception):
    """A file or directory cannot be written; the message is one sentence for the user."""


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically: after an error or a kill, an earlier file of this name is unchanged."""
    unfinished = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with named_errors(path):
            with unfinished.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_buffered(path: Path, fill: Callable[[BytesIO], object]) -> None:
    """Write what `fill` writes into a buffer, atomically; torch and matplotlib hide the error of a full disk."""
    buffer = BytesIO()
    fill(buffer)
    write_file(path, buffer.getvalue())


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Context in which errors of the file system name `path`: those of writing have no file name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def describe_os_error(error: OSError, place: Path | None = None) -> str:
    """One sentence: the path, or `place` if the error does not name one, and the reason."""
    path = error.filename if error.filename is not None else place
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}." if path is None else f"{path}: {reason}."


@contextmanager
def output_errors(directory: Path, module: str = "", saved: str = "") -> Iterator[None]:
    """Context in which an error of the file system becomes an OutputError.

    Its sentence has how to resume, if there is a file to resume from. Threads do not print tracebacks of such errors
    (TensorBoard's writer raises its error again in the main thread), and log handlers print none at all.

    Arguments:
        directory: of the run, named by errors without a file name
        module: that resumes the run, `esper.run` or `esper.evaluate`; empty if there is none
        saved: file in the directory without which the run cannot be resumed
    """
    hook, raises = threading.excepthook, logging.raiseExceptions

    def ignore_os_errors(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, OSError):
            hook(arguments)

    threading.excepthook, logging.raiseExceptions = ignore_os_errors, False
    try:
        yield
    except OSError as error:
        sentence = describe_os_error(error, directory)
        if module and (directory / saved).is_file():
            sentence = f"{sentence.rstrip('.')}; resume with python -m {module} resume={directory}"
        raise OutputError(sentence) from error
    finally:
        threading.excepthook, logging.raiseExceptions = hook, raises
