"""What several commands' arguments have in common; imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def names_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: a comma-separated list of names out of `allowed`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            wrong = ", ".join(unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"{wrong} is not among {', '.join(allowed)}")
        return names

    return parse


def positive(text: str) -> int:
    """An argparse type: an integer from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Adds how `compare` and `bench` measure: device, dtype, seed, repeats and whether they show progress."""
    how = parser.add_argument_group("how")
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is a GPU"
    )
    how.add_argument(
        "--dtype", choices=("f16", "bf16"), default="f16", help="element type (default: %(default)s)"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    how.add_argument(
        "--repeats",
        type=positive,
        metavar="N",
        help="timed repetitions (default: 2 on a CPU; on a GPU at most 25, fewer where they take long)",
    )
    how.add_argument("--quiet", action="store_true", help="no progress bar")
