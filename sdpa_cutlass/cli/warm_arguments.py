"""The arguments of `warm`; imports nothing that takes time."""

from __future__ import annotations

import argparse
import dataclasses
import re

_SIZES = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:/(\d+))?,(\d+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a problem, as `--shape` has them."""

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int


def shape(text: str) -> Shape:
    """An argparse type: B,Hq[/Hkv],Sq[/Sk],D."""
    found = _SIZES.fullmatch(text.replace(" ", ""))
    allowed = "allowed is B,Hq[/Hkv],Sq[/Sk],D, such as 8,32/8,1/4096,128"
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; {allowed}")
    batch, heads, heads_kv, rows, keys, head_dim = (int(one or 0) for one in found.groups())
    sizes = Shape(batch, heads, heads_kv or heads, rows, keys or rows, head_dim)
    if min(dataclasses.astuple(sizes)) < 1 or heads % sizes.num_heads_kv:
        raise argparse.ArgumentTypeError(
            f"{text!r}: sizes are from 1 on, and Hq is a multiple of Hkv; {allowed}"
        )
    return sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass warm` takes."""
    parser.description = (
        "Loads kernels onto a GPU, so that no later process waits for the driver to compile them: what it "
        "compiles from PTX, it keeps in its cache. Without --shape and --kernels, all that run there. Exit "
        "status: 0 done, 1 a kernel could not be loaded, 2 wrong usage or no GPU."
    )
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="SIZES",
        help="only the kernels chosen for B,Hq[/Hkv],Sq[/Sk],D, full and causal; may be repeated",
    )
    parser.add_argument(
        "--kernels",
        action="append",
        default=[],
        metavar="GLOB",
        help="only kernels whose name matches, such as '*_d128_*'; may be repeated",
    )
    parser.add_argument(
        "--dtype", choices=("f16", "bf16"), help="of the kernels (default: both element types)"
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
