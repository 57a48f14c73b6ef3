"""Commands in processes of their own that start quickly: they are forked from a process that has imported esper.

Importing takes most of the time of a tiny run. `python -m` is used where the start of the process matters too.
"""

import multiprocessing
import os
import signal
import sys
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

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
    """

    def __init__(
        self, module: str, *arguments: str, directory: Path, output: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._output = output
        call = (module, arguments, directory, output, {**os.environ, **(environment or {})})
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
        self._process.join(timeout=120)
        printed = self._output.read_text()
        assert self._process.exitcode == code, printed
        return printed


def _run(module: str, arguments: tuple[str, ...], directory: Path, output: Path, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [module, *arguments]
    import_module(module).cli()
