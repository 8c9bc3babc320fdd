"""Makes the result tables between the markers of README.md, docs/performance.md and docs/results.md.

    python -m benchmarks.documents                    # every block again, from the files that it names
    python -m benchmarks.documents FILE...            # result files into every block that shows their suites
    python -m benchmarks.documents --check            # writes nothing; exit status 1 when a block is stale
    python -m benchmarks.documents --page FILE.html   # the interactive page, and nothing else

Exit status: 0 success, 1 a document is stale, 2 wrong usage or something missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.documents import explore, report
from sdpa_cutlass.cli import USAGE, CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: sys.argv); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents",
        description="Makes the result tables between the markers of README.md, and of docs/performance.md "
        "and docs/results.md next to it, from result files as `bench` writes them. Without FILE, from those "
        "that the markers name.",
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="a result file (.json)")
    parser.add_argument(
        "--readme", type=Path, default=Path("README.md"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw this picture (.png) and show it")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when one is stale")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the interactive page of all committed results there"
    )
    try:
        options = parser.parse_args(argv)
        return explore.run(options) if options.page else report.run(options)
    except CommandError as error:
        print(f"benchmarks.documents: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
