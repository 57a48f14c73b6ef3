"""python -m esper.checkpoints RUN FILE: export a trained controller as one small file, to use it elsewhere."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from esper.checkpoints import save_controller
from esper.files import describe_os_error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.checkpoints", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the directory of a training run, or one of its checkpoints")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    parsed = parser.parse_args(arguments)
    try:
        size = save_controller(parsed.run, parsed.file)
    except OSError as error:
        sys.exit(describe_os_error(error))
    except ValueError as error:
        sys.exit(str(error))
    print(f"{parsed.file}: {size / 1e3:,.0f} kB; evaluate it with python -m esper.evaluate ckpt={parsed.file}")


if __name__ == "__main__":
    main()
