"""A Hydra application: its help, its arguments, and its errors as one sentence each.

Importing this module is cheap, so that `--help` is fast: the rest of esper is imported when a command needs it.
"""

import os
import sys
import warnings
from collections.abc import Callable

from esper.command_line import HELP_FLAGS, help_text


def run_app(main: Callable[[], None], name: str, prepare: Callable[[list[str]], list[str]]) -> None:
    """Run a Hydra application; exit with one sentence if its command line is wrong or a file cannot be written.

    Arguments:
        main: the function that `hydra.main` returns
        name: of the application's configuration
        prepare: returns the arguments that Hydra gets for those that were typed; may raise a ValueError
    """
    if HELP_FLAGS & set(sys.argv[1:]):
        print(help_text(name))
        return
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema")  # our launchers
    try:
        arguments = prepare(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    sys.argv[1:] = arguments  # hydra.main has no argument for them, and Lightning starts other ranks with sys.argv
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        from esper.config.errors import describe_error

        sys.exit(describe_error(error, name, arguments))
    except (OSError, ValueError) as error:  # commands handle their own ValueErrors: these are of Hydra
        from esper.config.errors import describe_output_error

        cause = error if isinstance(error, OSError) else error.__cause__  # logging wraps that of its file
        sys.exit(describe_output_error(cause) if isinstance(cause, OSError) else " ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(130)  # the exit code that shells use
