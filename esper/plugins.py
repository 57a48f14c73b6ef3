"""Modules of the user and optional packages: an import that fails ends in one sentence."""

import traceback
from importlib import import_module
from importlib.util import find_spec

OPTIONAL = {  # module of esper -> the package that it needs, and its extra
    "esper.gym": ("gymnasium", "gym"),
    "esper.tuning": ("cmaes", "tune"),
}


def import_user_module(module: str, argument: str) -> None:
    """Import a module that the user named; raises ValueError with the reason if that fails.

    `argument` is the key and value that named it.
    """
    try:
        import_module(module)
    except (Exception, SystemExit) as error:  # code of the user may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise ValueError(
                f"{argument}: there is no module {module}; its directory must be here or on PYTHONPATH."
            ) from None
        raise ValueError(f"{argument}: the import of {module} failed: {describe_import_error(error)}.") from error


def check_optional_package(target: str, argument: str) -> None:
    """Raise ValueError for a target in a module of esper whose optional package is not installed."""
    package, extra = OPTIONAL.get(target.rpartition(".")[0], (None, None))
    if package is not None and find_spec(package) is None:
        raise ValueError(f"{argument}: needs {package}, which is not installed; pip install 'esper[{extra}]' adds it.")


def describe_import_error(error: BaseException) -> str:
    """Type, message and line of an error, in one line."""
    message = " ".join(str(error).split()).rstrip(".")
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return text  # a syntax error has its line in the message
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"
