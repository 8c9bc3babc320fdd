"""The options of the `profile` command. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser of the `profile` command."""
    parser.description = (
        "Says what a kernel is made of and what bounds it. --static reads the machine code of the CUDA "
        "library and needs no GPU: registers, shared memory, occupancy, instructions of every loop. --shape "
        "runs one problem under Nsight Compute (ncu) and names what bounds it."
    )
    what = parser.add_argument_group("what")
    what.add_argument("--static", action="store_true", help="read the compiled code; needs no GPU")
    what.add_argument(
        "--shape",
        metavar="B,H,S,D[,WORD...]",
        help="profile one launch; H may be 32x8 (heads of q x of k and v), S may be 1x4096 (of q x of k); "
        "words: causal, causal_bottom_right, dropout, and a mask such as dense, padding, lengths or bias_f16",
    )
    what.add_argument(
        "--from",
        dest="saved",
        type=Path,
        metavar="FILE",
        help="show a launch again that `--shape --json FILE` saved, or all those in a folder as a table; "
        "needs no GPU",
    )
    what.add_argument(
        "--kernel",
        metavar="GLOB",
        help="--static: the kernels whose name matches (default: every fused kernel); "
        "--shape: the one to run instead of the chosen one, or a backward kernel",
    )
    what.add_argument(
        "--dtype", choices=("f16", "bf16"), default="f16", help="of --shape (default: %(default)s)"
    )
    files = parser.add_argument_group("files to write")
    files.add_argument("--json", type=Path, metavar="FILE", help="everything that was found, as JSON")
    files.add_argument(
        "--write-gates",
        type=Path,
        metavar="FILE",
        help="--static: the table of all kernels that the tests compare the library with (.md)",
    )
