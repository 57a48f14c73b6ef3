"""python -m esper.tasks NAME: list the tasks of a distribution, or measure what there is to learn in them."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.tasks", description=__doc__)
    parser.add_argument("name", help="the distribution, a preset of the group tasks such as cifar_zoo")
    parser.add_argument("--split", default="train", help="train (default), validation, test or heldout")
    parser.add_argument("--count", type=int, help="number of tasks; default: all of the split")
    parser.add_argument(
        "--headroom",
        action="store_true",
        help="run fixed plans: does the best plan of each task gain more than the best plan for all tasks?",
    )
    parser.add_argument(
        "--plans",
        default="refined",
        help="of the headroom: screened (each blueprint in all slots and in the last) or refined (default: also other "
        "moments, and pairs of the best blueprints)",
    )
    parser.add_argument("--finalists", type=int, default=2, help="best plans of each task that run once more")
    parser.add_argument("--fresh", type=int, default=2, help="episodes of the chosen plans, which alone count")
    parser.add_argument(
        "--write", action="store_true", help="write the tasks, and their results, into the shipped list"
    )
    parser.add_argument("overrides", nargs="*", help="such as data=synthetic_images or environment.envs=16")
    options = parser.parse_intermixed_args(arguments)
    from esper.data import DataError
    from esper.evaluation.task_report import report_headroom, report_tasks

    try:
        if options.headroom:
            report_headroom(
                options.name, options.split, options.count, options.overrides,
                plans=options.plans, finalists=options.finalists, fresh=options.fresh, write=options.write,
            )  # fmt: skip
        else:
            report_tasks(options.name, options.split, options.count, options.overrides, write=options.write)
    except (ValueError, DataError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")


if __name__ == "__main__":
    main()
