"""Commands in processes of their own that start quickly: they are forked from a process that has imported esper.

Importing takes most of the time of a tiny run. `python -m` is used where the start of the process matters too.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from esper.records import LineWriter

TIMEOUT = 600  # seconds to wait for what happens soon; on a busy machine a process takes minutes to start
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["esper.run", "esper.evaluate", "esper.training", "esper.evaluation.run"])


class CommandProcess:
    """A running command.

    Arguments:
        module: module whose function `cli` is the command
        arguments: of the command line
        directory: working directory; it is importable, as with `python -m`
        output: file that the process writes to; errors too
        environment: changes of the environment variables
        is_interrupted: send SIGINT when the second record would be written
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        directory: Path,
        output: Path,
        environment: dict[str, str] | None = None,
        is_interrupted: bool = False,
    ) -> None:
        self._output = output
        call = (module, arguments, directory, output, {**os.environ, **(environment or {})}, is_interrupted)
        self._process: BaseProcess = FORK_SERVER.Process(target=_run, args=call)
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def finish(self, code: int = 0) -> str:
        """Wait until the command ends with an exit code; returns what it printed."""
        self._process.join(timeout=TIMEOUT)
        printed = self._output.read_text()
        assert self._process.exitcode == code, printed
        return printed


def _run(
    module: str,
    arguments: tuple[str, ...],
    directory: Path,
    output: Path,
    environment: dict[str, str],
    is_interrupted: bool,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started the fork server may have blocked signals
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [module, *arguments]
    if is_interrupted:
        _interrupt_before_second_record()
    import_module(module).cli()


def _interrupt_before_second_record() -> None:
    write, written = LineWriter.write, []

    def write_or_interrupt(writer: LineWriter, *records: Mapping[str, Any]) -> None:
        if written and records:
            os.kill(os.getpid(), signal.SIGINT)
        write(writer, *records)
        written.extend(records)

    LineWriter.write = write_or_interrupt  # type: ignore[method-assign]
