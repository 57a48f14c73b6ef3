"""python -m esper.growthbench NAME: score an agent or a trained controller on the instances of a task distribution."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.growthbench", description=__doc__)
    parser.add_argument("name", help="the distribution, a preset of the group tasks such as cifar_zoo")
    parser.add_argument("--split", action="append", default=[], help="test or heldout; default: all of the list")
    parser.add_argument("--out", type=Path, help="directory of the episodes; one with episodes is continued")
    parser.add_argument("--instances", type=Path, help="file of the list; default: the one that comes with esper")
    parser.add_argument(
        "--write", type=Path, nargs="+", metavar="DIR", help="write the list from finished evaluations instead"
    )
    parser.add_argument("overrides", nargs="*", help="agent=module:Class or ckpt=DIR, and other keys of esper.evaluate")
    options = parser.parse_intermixed_args(arguments)
    import torch

    from esper.data import DataError
    from esper.evaluation.growthbench_run import score_splits, write_instances
    from esper.files import OutputError, describe_os_error

    torch.set_num_threads(1)  # hosts run in their own processes or threads
    try:
        if options.write:
            print(write_instances(options.name, options.write, options.instances))
        else:
            directory = options.out or Path("outputs") / "growthbench" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
            score_splits(options.name, options.split, options.overrides, directory, options.instances)
    except OSError as error:
        sys.exit(describe_os_error(error))
    except (ValueError, DataError, OutputError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
