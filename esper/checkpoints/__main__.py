"""python -m esper.checkpoints RUN FILE: keep a trained controller as one small file, to play it elsewhere."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from esper.checkpoints import save_controller


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.checkpoints", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the directory of a training run, or one of its checkpoints")
    parser.add_argument("file", metavar="FILE", type=Path, help="where the controller goes")
    given = parser.parse_args(arguments)
    try:
        size = save_controller(given.run, given.file)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except ValueError as error:
        sys.exit(str(error))
    print(f"{given.file}: {size / 1e3:,.0f} kB; play it by python -m esper.evaluate ckpt={given.file}")


if __name__ == "__main__":
    main()
