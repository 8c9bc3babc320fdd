"""Chunks of a prompt next to its keys, which make too few tiles for the card, in one process on a GPU.

    python -m benchmarks.splits
    python -m benchmarks.splits --every-number --json benchmarks/results/splits/FILE.json
    python -m benchmarks.splits --every-number --decode 1 --json benchmarks/results/splits/FILE.json
    python -m benchmarks.splits --every-number --uneven --json benchmarks/results/splits/FILE.json

A problem is a prompt's latest queries, causal at the bottom right, in the heads that one of several GPUs has,
or a few rows that see all keys; with --decode SEED, one row next to caches of 48 MiB and more, drawn as by
`bench --suite random`; with --uneven, one row of so many heads that some SMs have a tile more than others.
The cheapest split kernel of each family by its cost model takes part, with the number of splits that the
model gives it, and the cheapest kernel that does not split, beside torch's flash and cuDNN; with
--every-number also Hopper's split kernels with other numbers, or of decoding problems the cheapest two with
KV groups and, but with --uneven, the first two of all. All take turns, replay by replay
(sdpa_cutlass/cli/timing.py). Times are in microseconds. Outputs are compared with the chosen kernel's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.windows import contestant
from sdpa_cutlass import AttentionPlan, explain, plan
from sdpa_cutlass.choice.cost.fmha_fwd import FmhaFwd
from sdpa_cutlass.choice.cost.fmha_fwd_sm90 import FmhaFwdSm90
from sdpa_cutlass.cli import environment, random_suite
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.timing import Contestant, time_on_gpu
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Causal

FORMAT = 1
BUDGET_S = 0.06
TOLERANCE = 0.01  # between kernels: another order of sums
NUMBERS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_CTAS = 5 * 132
MOST_CTAS_OF_UNEVEN = 24 * 132
LEAST_CACHE = 48 << 20  # bytes of K and V

Sizes = tuple[int, int, int, int, int, int, bool]
"""B, Hq, Hkv, Sq, Sk, D, causal"""

PROBLEMS: tuple[Sizes, ...] = (
    *((1, 8, 1, rows, keys, 128, True) for rows in (128, 512, 1024) for keys in (4096, 16384, 65536)),
    *((1, 32, 8, rows, keys, 128, True) for rows in (128, 256) for keys in (8192, 32768)),
    *((1, 8, 8, rows, 16384, 64, causal) for rows in (192, 512) for causal in (False, True)),
    *((1, heads, heads, 300, 8192, d, False) for heads in (4, 12) for d in (64, 80, 96, 160, 192, 256)),
    *((2, 4, 2, 512, 12000, head_dim, True) for head_dim in (80, 96, 160, 192, 256)),
    (8, 1, 1, 565, 14161, 96, False),
    (4, 8, 2, 292, 8186, 72, False),
    (1, 5, 5, 2048, 2048, 128, False),
    (1, 2, 2, 4096, 4096, 64, True),
    (1, 1, 1, 24201, 24201, 168, True),
    (1, 1, 1, 18014, 18014, 248, False),
    (1, 1, 1, 32768, 32768, 64, True),
    (1, 1, 1, 30684, 30684, 72, True),
    (4, 20, 10, 128, 16384, 256, False),
    (7, 20, 10, 128, 8192, 128, False),
    (1, 16, 16, 1280, 4096, 64, False),
    (1, 29, 29, 70, 38335, 216, False),
    (8, 2, 2, 145, 65536, 240, False),
    (2, 4, 4, 90, 25411, 128, False),
    (2, 44, 44, 29, 43455, 48, False),
    (1, 28, 28, 55, 41170, 128, False),
    (16, 11, 11, 21, 16384, 80, False),
    (1, 10, 10, 287, 41497, 168, False),
)  # fmt: skip

UNEVEN: tuple[Sizes, ...] = tuple(
    (*sizes, False)
    for sizes in (
        # 48 to 66 heads of keys
        (16, 3, 3, 1, 41350, 80),
        (8, 6, 6, 1, 16384, 72),
        (1, 50, 50, 1, 16384, 128),
        (4, 13, 13, 1, 20000, 160),
        (1, 56, 56, 1, 30000, 248),
        (2, 60, 30, 1, 20000, 64),
        (4, 12, 12, 1, 63196, 96),
        # more than run at once
        (8, 220, 44, 1, 16384, 40),
        (16, 20, 20, 1, 14003, 32),
        (16, 40, 20, 1, 14003, 32),
        (32, 14, 14, 1, 16384, 32),
        (32, 14, 14, 1, 4096, 32),
        (8, 62, 62, 1, 8192, 32),
        (8, 44, 44, 1, 16384, 40),
        (16, 18, 18, 1, 4096, 160),
        (4, 100, 100, 1, 8192, 64),
        (8, 64, 64, 1, 4096, 128),
        (2, 160, 160, 1, 8192, 96),
        (16, 43, 43, 1, 4096, 72),
        (16, 21, 21, 1, 2607, 80),
        (8, 96, 96, 1, 4096, 192),
        (16, 18, 18, 1, 4096, 192),
        (16, 25, 25, 1, 2155, 192),
        (4, 70, 70, 1, 6000, 256),
        (32, 20, 20, 1, 3000, 48),
        (16, 32, 16, 1, 8192, 112),
        (8, 100, 50, 1, 5000, 224),
        (32, 32, 32, 1, 2048, 128),
        (4, 148, 37, 1, 4155, 248),
        (32, 36, 9, 1, 4096, 64),
        (16, 72, 36, 1, 4096, 64),
        (32, 40, 20, 1, 8192, 40),
        (64, 11, 11, 1, 630, 80),
        (64, 11, 11, 1, 2048, 80),
        (64, 10, 10, 1, 584, 128),
        (64, 5, 5, 1, 378, 64),
    )
)


def name_of(sizes: Sizes) -> str:
    """As results name them."""
    batch, heads, heads_kv, rows, keys, head_dim, causal = sizes
    return f"b{batch}_h{heads}x{heads_kv}_q{rows}_k{keys}_d{head_dim}" + ("_causal" if causal else "")


def decoding(seed: int, count: int) -> Iterator[Sizes]:
    """Of the first `count` problems of a seed, those of one query whose keys are many bytes."""
    for case in random_suite.draw(seed, count):
        kv_bytes = 4 * case.batch * case.num_heads_kv * case.seqlen_k * case.head_dim
        if case.seqlen_q == 1 and kv_bytes >= LEAST_CACHE:
            heads = case.num_heads_q, case.num_heads_kv
            yield case.batch, *heads, 1, case.seqlen_k, case.head_dim, False


@contextlib.contextmanager
def splits_of(number: int | None) -> Iterator[None]:
    """Plans that are made meanwhile have this number, not the cost models'."""
    with contextlib.ExitStack() as patches:
        for model in (FmhaFwd, FmhaFwdSm90) if number is not None else ():
            cost = model.cost
            given = mock.patch.object(
                model, "cost", lambda self, problem, cost=cost: (cost(self, problem)[0], number)
            )
            patches.enter_context(given)
        yield


def cheapest(ranked: Sequence[Any], belongs: Callable[[KernelInfo], bool]) -> str | None:
    """The first kernel of a ranking that belongs."""
    return next((one.kernel.name for one in ranked if one.refusal is None and belongs(one.kernel)), None)


def cheapest_of_decoding(ranked: Sequence[Any], uneven: bool) -> list[KernelInfo]:
    """Split kernels: the first two unless `uneven`, and the two with KV groups whose price is lowest."""
    legal = [one for one in ranked if one.refusal is None and one.kernel.is_split]
    grouped = [one for one in legal if one.kernel.kv_groups > 1]
    by_price = sorted(grouped, key=lambda one: float(one.estimate.cycles))
    found = {one.kernel.name: one.kernel for one in (*(() if uneven else legal[:2]), *by_price[:2])}
    return list(found.values())


def is_hopper(kernel: KernelInfo) -> bool:
    """Of the family for sm_90."""
    return kernel.family is Family.FMHA_FWD_SM90


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Contestant]:
    """torch's flash, and cuDNN where it has the mask: its causal ones are aligned at the top left."""
    flash, cudnn = torch.ops.aten._flash_attention_forward, torch.ops.aten._cudnn_attention_forward
    sizes = q.shape[2], k.shape[2]
    bshd = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))
    found = {
        "torch_flash": Contestant(
            lambda _: flash(*bshd, None, None, *sizes, 0.0, causal, False)[0], torch.no_grad, 1
        )
    }
    if not causal:
        tail = (None, None, None, *sizes, False, 0.0, False, False)
        found["torch_cudnn"] = Contestant(lambda _: cudnn(q, k, v, *tail)[0], torch.no_grad, 1)
    return found


def measure(
    sizes: Sizes, dtype: torch.dtype, repeats: int, every_number: bool, uneven: bool = False
) -> dict[str, Any]:
    """Times by contestant, their kernels and numbers of splits, failures, and how far outputs are apart."""
    batch, heads, heads_kv, rows, keys, head_dim, causal = sizes
    generator = torch.Generator(device="cuda").manual_seed(keys + head_dim)
    q = torch.randn(batch, heads, rows, head_dim, dtype=dtype, device="cuda", generator=generator)
    k, v = (
        torch.randn(batch, heads_kv, keys, head_dim, dtype=dtype, device="cuda", generator=generator)
        for _ in "kv"
    )
    align = Causal.BOTTOM_RIGHT if causal else None
    ranked = explain(q, k, v, causal=align).candidates
    hopper = [
        one.kernel for one in ranked if one.refusal is None and one.kernel.is_split and is_hopper(one.kernel)
    ]
    asked: dict[str, tuple[str | None, int | None]] = {
        "chosen": (None, None),
        "hopper_split": (hopper[0].name if hopper else None, None),
        "split": (cheapest(ranked, lambda kernel: kernel.is_split and not is_hopper(kernel)), None),
        "whole": (cheapest(ranked, lambda kernel: not kernel.is_split), None),
    }
    if every_number:
        tried = [kernel for kernel in hopper if kernel.head_dim == hopper[0].head_dim]
        if rows == 1:
            tried = cheapest_of_decoding(ranked, uneven)
        most_ctas = MOST_CTAS_OF_UNEVEN if uneven else MOST_CTAS
        for row in tried:
            packed = heads // heads_kv if row.packs_heads else 1
            tiles = -(-rows * packed // row.block_m) * batch * heads // packed
            for splits in (1, *NUMBERS) if rows == 1 else NUMBERS:
                if tiles * splits <= most_ctas and 64 * splits <= keys:
                    asked[f"{row.name} {splits}"] = row.name, splits
    plans: dict[str, AttentionPlan] = {}
    failures: dict[str, str] = {}
    for name, (kernel, number) in asked.items():
        if kernel is None and name != "chosen":
            continue
        try:
            with splits_of(number):
                plans[name] = plan(q, k, v, causal=align, kernel=kernel)
        except SdpaError as error:
            failures[name] = str(error)
    apart, first = {}, None
    for name, made in plans.items():
        out = torch.full_like(q, float("nan"))
        made.run(q, k, v, out)
        first = out.float() if first is None else first
        apart[name] = float((out.float() - first).abs().max())
    timings = time_on_gpu(
        {name: contestant(made, q, k, v) for name, made in plans.items()} | peers(q, k, v, causal),
        budget_s=BUDGET_S,
        max_replays=repeats,
        failed=lambda name, error: failures.update({name: str(error)}),
    )
    return {
        "problem": name_of(sizes), "sizes": sizes, "apart": apart, "failures": failures,
        "times_us": {name: timing.gpu_us for name, timing in timings.items()},
        "kernels": {name: made.kernel.name for name, made in plans.items()},
        "num_splits": {name: made._plan.num_splits for name, made in plans.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of this file. Exit status 1 when kernels disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-number", action="store_true")
    drawn_from = parser.add_mutually_exclusive_group()
    drawn_from.add_argument("--decode", type=int, metavar="SEED")
    drawn_from.add_argument("--uneven", action="store_true")
    parser.add_argument("--count", type=int, default=800, metavar="N", help="problems that are drawn")
    parser.add_argument("--dtype", choices=("f16", "bf16"), default="f16")
    parser.add_argument("--repeats", type=int, default=30, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    dtype = torch.float16 if given.dtype == "f16" else torch.bfloat16
    found, disagree = [], False
    drawn = PROBLEMS
    if given.uneven:
        drawn = UNEVEN
    elif given.decode is not None:
        drawn = tuple(decoding(given.decode, given.count))
    for sizes in drawn:
        row = measure(sizes, dtype, given.repeats, given.every_number, given.uneven)
        found.append(row)
        differs = {name: apart for name, apart in row["apart"].items() if not apart <= TOLERANCE}
        disagree |= bool(differs)
        times = "  ".join(f"{name} {us:.1f}" for name, us in row["times_us"].items())
        print(f"{row['problem']:34} {row['kernels'].get('chosen')}\n    {times}", flush=True)
        for name, why in (*differs.items(), *row["failures"].items()):
            print(f"    {name}: {why}")
    if given.json:
        record = {"format": FORMAT, "env": environment.record(torch.device("cuda", 0)), "rows": found}
        write_atomically(given.json, json.dumps(record, indent=1) + "\n")
    return int(disagree)


if __name__ == "__main__":
    raise SystemExit(main())
