"""Quantised attention on a GPU: whole calls and their errors in the same row, and the accuracy contract.

    python -m benchmarks.quantised                             # 1K to 16K, head_dim 64 and 128: minutes
    python -m benchmarks.quantised --seqlens 4096 --head-dims 128 --causal --json FILE
    python -m benchmarks.quantised --kernels '*_s2_w4_*'       # of other tiles, those of these names
    python -m benchmarks.quantised --errors                    # the contract alone

One row is one whole call: 16-bit tensors in and out, K and V quantised within. `sm_89` is this library's
16-bit kernel of the same instructions, `exact` the one that it would choose on this card (on Hopper one of
another instruction set), next to torch's flash and cuDNN backends. `sm_89` and `exact` are left out where a
library has quantised kernels alone. Other quantised kernels of a head_dim go by their tiles. TFLOP/s count
the mathematical problem, whatever multiplies. Errors are those of 128 rows of every head against float64:
relative L2 and 1 - cosine of the worst head, the largest difference. Exit status 1 when a result breaks the
contract of docs/quantised.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.quantised_data import CONTRACTS, FAMILIES, errors_of_heads, family
from sdpa_cutlass import Causal, DType, Precision, Problem, attention, explain
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.timing import Contestant, time_on_gpu
from sdpa_cutlass.errors import NoKernelError

FORMAT = 2
HEADS = 16
TOKENS = 16384  # of a problem: batch = TOKENS / seqlen, at least 1
CHECKED_ROWS = 128
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ERRORS_SEQLEN = 2048

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(tensors: Tensors, rows: torch.Tensor, causal: Causal | None) -> torch.Tensor:
    """The rows `rows` of the result in float64, [B, Hq, rows, D]."""
    q, k, v = tensors
    groups = q.shape[1] // k.shape[1]
    outs = []
    for b in range(q.shape[0]):
        keys, values = (t[b].double().repeat_interleave(groups, 0) for t in (k, v))
        scores = (q[b, :, rows].double() @ keys.mT) / math.sqrt(q.shape[3])
        if causal is not None:
            columns = torch.arange(k.shape[2], device=q.device)
            scores = scores.masked_fill(columns[None] > rows[:, None], -math.inf)
        outs.append(scores.softmax(-1) @ values)
    return torch.stack(outs)


def errors(out: torch.Tensor, ref: torch.Tensor) -> dict[str, float]:
    """Of the worst head."""
    l2, angle = errors_of_heads(out, ref)
    return {
        "l2": l2.max().item(),
        "one_minus_cosine": angle.max().item(),
        "largest": (out.double() - ref).abs().max().item(),
    }


def breaks(precision: Precision, found: dict[str, float], *, is_normal: bool) -> bool:
    """Whether these errors are more than the contract allows. A NaN breaks it."""
    contract = CONTRACTS[precision.accuracy]
    l2 = contract.normal if is_normal else contract.every_family
    angle = contract.cosine_normal if is_normal else contract.cosine_every
    return not (found["l2"] <= l2 and found["one_minus_cosine"] <= angle)


def tile_of(kernel: str) -> str:
    """The tile in a kernel's name: m64n64_s2_w4."""
    return "_".join(re.findall(r"_(m\d+n\d+|s\d+|w\d+)(?=_)", kernel))


def contestants(
    tensors: Tensors, causal: Causal | None, kernels: str = "*"
) -> dict[str, tuple[Callable[[], torch.Tensor], Any, str]]:
    """name → (a call, the context around it, the kernel that runs).

    `kernels`: which quantised ones stand next to the chosen ones, a glob of names.
    """
    q, k, v = tensors
    found: dict[str, tuple[Callable[[], torch.Tensor], Any, str]] = {}
    out = torch.empty_like(q)

    def own(**options: Any) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            attention(q, k, v, causal=causal, out=out, **options)
            return out

        return call

    for precision in Precision:
        try:
            asked = explain(q, k, v, causal=causal, precision=precision)
        except NoKernelError:  # a library of some kernels
            continue
        chosen = asked.choice.kernel
        found[precision.value] = own(precision=precision), contextlib.nullcontext, chosen.name
        for row in asked.candidates:  # other tiles, by name
            kernel = row.kernel
            if kernel is chosen or not fnmatch.fnmatch(kernel.name, kernels):
                continue
            if row.refusal is None and kernel.head_dim == q.shape[3]:
                name = f"{precision.value} {tile_of(kernel.name)}"
                found[name] = (
                    own(precision=precision, kernel=kernel.name),
                    contextlib.nullcontext,
                    kernel.name,
                )
    with contextlib.suppress(NoKernelError):
        exact = explain(q, k, v, causal=causal)
        sm89 = next(
            row.kernel.name
            for row in exact.candidates
            if row.refusal is None and row.kernel.arch == 89 and not row.kernel.is_general
        )
        found["sm_89"] = own(kernel=sm89), contextlib.nullcontext, sm89
        found["exact"] = own(), contextlib.nullcontext, exact.choice.kernel.name

    def torchs() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal is not None, enable_gqa=q.shape[1] != k.shape[1]
        )

    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        found[name] = torchs, lambda backend=backend: sdpa_kernel(backend), f"torch {name}"
    return found


def measure(
    seqlen: int,
    head_dim: int,
    heads_kv: int,
    dtype: str,
    causal: Causal | None,
    budget_s: float,
    kernels: str,
    sustained_s: float | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each contestant at one problem: in turns, or each alone for `sustained_s` seconds."""
    batch = max(1, TOKENS // seqlen)
    sizes = batch, HEADS, heads_kv, seqlen, seqlen, head_dim
    q, k, v = (x.to("cuda", DTYPES[dtype]) for x in family("normal", *sizes))
    problem = Problem(
        dtype=DType(dtype),
        batch=batch,
        num_heads_q=HEADS,
        num_heads_kv=heads_kv,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        causal=causal,
    )
    rows = torch.linspace(0, seqlen - 1, min(CHECKED_ROWS, seqlen), device="cuda").long()
    ref = reference((q, k, v), rows, causal)
    calls = contestants((q, k, v), causal, kernels)
    failures: dict[str, str] = {}
    found: dict[str, dict[str, float]] = {}
    for name, (call, context, _) in list(calls.items()):
        try:
            with context():
                found[name] = errors(call()[:, :, rows], ref)
        except Exception as error:
            failures[name] = str(error).strip().splitlines()[0][:120]
            del calls[name]
    timings = time_on_gpu(
        {name: _contestant(call, context) for name, (call, context, _) in calls.items()},
        budget_s=budget_s,
        max_replays=200,
        sustained_s=sustained_s,
        failed=lambda name, error: failures.setdefault(name, str(error)[:120]),
    )
    common = {
        "seqlen": seqlen,
        "head_dim": head_dim,
        "batch": batch,
        "heads": HEADS,
        "heads_kv": heads_kv,
        "dtype": dtype,
        "causal": causal is not None,
    }
    for name in [*calls, *(name for name in failures if name not in calls)]:
        row = common | {"provider": name, "status": failures.get(name, "ok")}
        if name in timings:
            timing = timings[name]
            assert timing.gpu_us is not None
            row |= {"kernel": calls[name][2], "gpu_us": timing.gpu_us, "gpu_us_spread": timing.gpu_us_spread}
            row |= {"tflops": problem.flops / timing.gpu_us * 1e-6} | found[name]
        word = name.partition(" ")[0]
        if word in {precision.value for precision in Precision} and name in found:
            row["breaks_contract"] = breaks(Precision(word), found[name], is_normal=causal is None)
        yield row


def _contestant(
    call: Callable[[], torch.Tensor], context: Callable[[], AbstractContextManager[Any]]
) -> Contestant:
    return Contestant(lambda _: call(), context, 1)


def check_families(head_dim: int, dtype: str, precisions: Sequence[Precision]) -> Iterator[dict[str, Any]]:
    """The contract's table: every family of inputs, without time."""
    for kind in FAMILIES:
        tensors = family(kind, 1, 4, 4, ERRORS_SEQLEN, ERRORS_SEQLEN, head_dim)
        q, k, v = (x.to("cuda", DTYPES[dtype]) for x in tensors)
        rows = torch.arange(ERRORS_SEQLEN, device="cuda")
        for causal in (None, Causal.TOP_LEFT):
            ref = reference((q, k, v), rows, causal)
            for precision in precisions:
                found = errors(attention(q, k, v, causal=causal, precision=precision), ref)
                is_normal = kind == "normal" and causal is None
                yield {
                    "family": kind,
                    "head_dim": head_dim,
                    "dtype": dtype,
                    "causal": causal is not None,
                    "provider": precision.value,
                    **found,
                    "breaks_contract": breaks(precision, found, is_normal=is_normal),
                }


def table_of_times(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """As Markdown; `over` is the time of the 16-bit kernel of the same instructions over this one's."""
    yield "| S | D | causal | provider | us | TFLOP/s | over sm_89 | L2 | 1 - cos | largest |"
    yield "|--:|--:|---|---|--:|--:|--:|--:|--:|--:|"
    base = {
        (r["seqlen"], r["head_dim"], r["causal"]): r.get("gpu_us") for r in rows if r["provider"] == "sm_89"
    }
    for r in rows:
        lead = f"| {r['seqlen']} | {r['head_dim']} | {'yes' if r['causal'] else 'no'} | {r['provider']} "
        if "gpu_us" not in r:
            yield f"{lead}| {r['status']} | | | | | |"
            continue
        own = base.get((r["seqlen"], r["head_dim"], r["causal"]))
        over = "" if own is None else f"{own / r['gpu_us']:.2f}"
        broken = " **breaks the contract**" if r.get("breaks_contract") else ""
        yield (
            f"{lead}| {r['gpu_us']:.1f} | {r['tflops']:.0f} | {over} | {r['l2']:.1e} | "
            f"{r['one_minus_cosine']:.1e} | {r['largest']:.1e}{broken} |"
        )


def table_of_errors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """As Markdown: the relative L2 error of the worst head."""
    yield f"| D | causal | provider | {' | '.join(FAMILIES)} |"
    yield f"|--:|---|---|{'--:|' * len(FAMILIES)}"
    keys = dict.fromkeys((r["head_dim"], r["causal"], r["provider"]) for r in rows)
    for head_dim, causal, provider in keys:
        cells = [
            f"{r['l2']:.2e}{'!' if r['breaks_contract'] else ''}"
            for r in rows
            if (r["head_dim"], r["causal"], r["provider"]) == (head_dim, causal, provider)
        ]
        yield f"| {head_dim} | {'yes' if causal else 'no'} | {provider} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables, writes the file, and says whether the contract holds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantised", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="f16")
    parser.add_argument("--heads-kv", type=int, default=HEADS, help=f"of {HEADS}")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--budget-s", type=float, default=0.2, help="GPU time of a contestant at a problem")
    parser.add_argument(
        "--sustained", type=float, metavar="S", help="each contestant alone for so many seconds, not in turns"
    )
    parser.add_argument(
        "--kernels", default="*", metavar="GLOB", help="which other quantised kernels to time, by name"
    )
    parser.add_argument("--precisions", type=Precision, nargs="+", default=list(Precision))
    parser.add_argument("--errors", action="store_true", help="the contract alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "torch sees no GPU; tests/kernels/test_quantized.py checks the contract without one",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    env = environment.record(device)
    causal = Causal.TOP_LEFT if options.causal else None
    times: list[dict[str, Any]] = []
    if not options.errors:
        for head_dim in options.head_dims:
            for seqlen in options.seqlens:
                times += measure(
                    seqlen,
                    head_dim,
                    options.heads_kv,
                    options.dtype,
                    causal,
                    options.budget_s,
                    options.kernels,
                    options.sustained,
                )
        print("\n".join(table_of_times(times)))
    checked = [
        row
        for head_dim in options.head_dims
        for row in check_families(head_dim, options.dtype, options.precisions)
    ]
    print(f"\nS = {ERRORS_SEQLEN}, relative L2 of the worst head; ! breaks the contract\n")
    print("\n".join(table_of_errors(checked)))
    environment.close(env, device)
    if options.json:
        record = {
            "format": FORMAT,
            "env": env,
            "sustained_s": options.sustained,
            "times": times,
            "errors": checked,
        }
        write_atomically(options.json, json.dumps(record, indent=1) + "\n")
    return int(any(row.get("breaks_contract") for row in times + checked))


if __name__ == "__main__":
    sys.exit(main())
