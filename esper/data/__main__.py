"""python -m esper.data NAME: download and verify a data set ahead of time, and summarise it."""

import argparse
import signal
import sys
from collections.abc import Sequence

NAMES = ("cifar10", "fashion_mnist", "tinystories")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m esper.data", description="Download and verify data ahead of time.")
    parser.add_argument("name", choices=[*NAMES, "all"], help="the data set")
    parser.add_argument(
        "--root",
        metavar="DIR",
        help="directory of its files; missing files are downloaded to it (default: ESPER_DATA, or esper in your cache)",
    )
    options = parser.parse_args(arguments)
    from esper.data.store import DataError, data_directory
    from esper.data.summary import SUMMARIES

    failed = False
    for name in NAMES if options.name == "all" else [options.name]:
        try:
            print(SUMMARIES[name](data_directory(options.root)))
        except DataError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that partial files are removed
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; no partial files are left")
