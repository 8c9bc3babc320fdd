"""The arguments of `warm`; imports nothing that takes time."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass warm` takes."""
    parser.description = (
        "Loads kernels onto a GPU, so that no later process waits for the driver to compile them: what it "
        "compiles from PTX, it keeps in its cache. Without --shape and --kernels, all that run there. Exit "
        "status: 0 done, 1 a kernel could not be loaded, 2 wrong usage or no GPU."
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B,H,S,D[,WORD...]",
        help="only the kernels chosen for this problem, as in `profile`, such as 8,32x8,1x4096,128 or "
        "1,8,512,64,causal; may be repeated",
    )
    parser.add_argument(
        "--kernels",
        action="append",
        default=[],
        metavar="GLOB",
        help="only kernels whose name matches, such as '*_d128_*'; may be repeated",
    )
    parser.add_argument("--dtype", choices=("f16", "bf16"), help="of the kernels (default: both)")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
