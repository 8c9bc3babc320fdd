"""Forward plus backward, and the backward alone, beside torch's backends: `python -m benchmarks.backward`.

Shapes are those of FlashAttention-2's paper: 16384 tokens, 2048 = heads · head_dim, seqlen 512 to 16384,
causal and not. Every time is that of a replayed CUDA graph; the providers take turns, round by round, and the
median of the rounds counts. TFLOP/s count 3.5 forwards for forward plus backward and 2.5 for the backward, as
that paper does. First, gradients are held to the numerics rule against float64, and repeated to the same
bits. Prints a table; --json writes all rounds. Needs a GPU.

--kernels GLOB times every backward kernel of that name instead, by its operator and beside torch's flash;
out and softmax_lse come from torch then, so a library that was built with backward kernels alone is enough.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass
from benchmarks.gradient_timing import (
    BACKENDS,
    DETERMINISTIC,
    Forward,
    by_backend,
    milliseconds,
    replay_of,
    timed,
    write,
)
from sdpa_cutlass import Causal, DType, Problem, attention
from sdpa_cutlass.call.launch import library_for
from sdpa_cutlass.choice.backward import legal_kernels

TOKENS, WIDTH = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """One problem: q, k and v are [batch, heads, seqlen, head_dim]."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def forward_flops(self) -> float:
        """Of a forward, halved where causal."""
        full = 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else full

    def inputs(self, count: int) -> list[torch.Tensor]:
        """Random tensors that require grad."""
        size = (self.batch, self.heads, self.seqlen, self.head_dim)
        dtype = getattr(torch, self.dtype)
        return [torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for _ in range(count)]


def providers(shape: Shape) -> dict[str, Forward]:
    """What computes attention, by name; backward follows through autograd."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = attention(q, k, v, causal="top_left" if shape.causal else None)
        assert isinstance(result, torch.Tensor)
        return result

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

    return {"ours": ours} | by_backend(torchs)


def kernel_runs(shape: Shape, names: list[str]) -> dict[str, Callable[[], Any]]:
    """The backward of each kernel and of flash, all of the same results of a forward."""
    inputs = shape.inputs(3)
    q, k, v = (tensor.detach() for tensor in inputs)
    dout = torch.randn_like(q)
    scale = 1 / math.sqrt(shape.head_dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(q, k, v, 0.0, shape.causal, scale=scale)[:2]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        node = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=shape.causal)
    causal = "top_left" if shape.causal else None

    def ours(name: str) -> Any:
        """dq, dk and dv; the operator returns those of a bias and of sinks too."""
        return torch.ops.sdpa_cutlass.attention_backward(
            dout, q, k, v, out, lse, causal=causal, kernel_name=name, needs=[True] * 3 + [False]
        )[:3]

    runs: dict[str, Callable[[], Any]] = {name: functools.partial(ours, name) for name in names}
    runs["flash"] = lambda: torch.autograd.grad(node, inputs, dout, retain_graph=True)
    return runs


def kernel_graphs(
    shape: Shape, names: list[str], repeats: int
) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Replays of `kernel_runs`, and what is wrong with their gradients."""
    stream = torch.cuda.Stream()
    found: dict[str, Callable[[], None]] = {}
    wrong = []
    with torch.cuda.stream(stream):
        runs = kernel_runs(shape, names)
        expected = runs["flash"]()
        largest = [other.abs().max().item() for other in expected]
        for name, run in runs.items():
            grads = run()
            errors = [(one - other).abs().max().item() for one, other in zip(grads, expected, strict=True)]
            if not all(error <= 2e-2 * most for error, most in zip(errors, largest, strict=True)):
                wrong.append(f"{name} at {shape}: off flash by {errors} of {largest}")
            again = [pair for _ in range(repeats) for pair in zip(grads, run(), strict=True)]
            if name != "flash" and not all(torch.equal(*pair) for pair in again):
                wrong.append(f"{name} at {shape}: other bits in another run")
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            found[name] = replay_of(graph, runs)
    return found, wrong


def compare_kernels(options: argparse.Namespace, shapes: list[Shape]) -> int:
    """TFLOP/s of the backward of every kernel that `options.kernels` matches."""
    from sdpa_cutlass.integrations import backward_ops  # noqa: F401  registers the operators

    dtype = {"float16": "f16", "bfloat16": "bf16"}[options.dtype]
    pattern = f"fmha_bwd_*_{dtype}"
    names = [row.name for row in sdpa_cutlass.kernels() if fnmatch.fnmatchcase(row.name, pattern)]
    names = [name for name in names if fnmatch.fnmatchcase(name, options.kernels)]
    rows, wrong = [], []
    for shape in shapes:
        own = [name for name in names if f"_d{shape.head_dim}_" in name]
        replays, broken = kernel_graphs(shape, own, 3)
        wrong += broken
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(options.rounds):
            for name, replay in replays.items():
                times[name].append(milliseconds(replay, options.budget_ms))
        rows.append({"shape": asdict(shape), "milliseconds": times})
        print(f"d{shape.head_dim} S{shape.seqlen}{' causal' if shape.causal else ''}")
        for name, rounds in sorted(times.items(), key=lambda pair: statistics.median(pair[1])):
            median = statistics.median(rounds)
            rate = 2.5 * shape.forward_flops / median / 1e9
            print(f"  {rate:6.0f} TFLOP/s  {median:8.3f} ms  {name}", flush=True)
        torch.cuda.empty_cache()
    print("\n".join(wrong) or "gradients agree with flash, the same bits in every run")
    write(options.json, {"wrong": wrong, "rows": rows})
    return 1 if wrong else 0


def measure(shape: Shape, rounds: int, budget_ms: float) -> dict[str, Any]:
    """What `timed` says of every provider."""
    found = timed(providers(shape), shape.inputs(3), rounds, budget_ms)
    return {"shape": asdict(shape), "kernel": kernel_of(shape), **found}


def kernel_of(shape: Shape) -> str:
    """The backward kernel that is chosen for it."""
    problem = Problem(
        dtype={"float16": DType.F16, "bfloat16": DType.BF16}[shape.dtype],
        batch=shape.batch,
        num_heads_q=shape.heads,
        num_heads_kv=shape.heads,
        seqlen_q=shape.seqlen,
        seqlen_k=shape.seqlen,
        head_dim=shape.head_dim,
        causal=Causal.TOP_LEFT if shape.causal else None,
    )
    library, device = library_for(torch.empty(1, device="cuda"))
    return legal_kernels(library, problem, device)[0].name


def tflops(row: dict[str, Any], name: str, part: str) -> float | None:
    """By the median round."""
    rounds = row["milliseconds"].get(name, {}).get(part)
    factor = 3.5 if part == "both" else 2.5
    flops = factor * Shape(**row["shape"]).forward_flops
    return flops / statistics.median(rounds) / 1e9 if rounds else None


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: TFLOP/s of both parts, and ours over flash."""
    names = ["ours", *BACKENDS, DETERMINISTIC]
    yield (
        "| d | S | causal | "
        + " | ".join(f"{name} f+b" for name in names)
        + " | ours / flash | "
        + " | ".join(f"{name} bwd" for name in names)
        + " | ours / flash |"
    )
    yield "|--:|--:|:--|" + "--:|" * (2 * len(names) + 2)
    for row in rows:
        shape = Shape(**row["shape"])
        cells = [str(shape.head_dim), str(shape.seqlen), "yes" if shape.causal else "no"]
        for part in ("both", "backward"):
            found = [tflops(row, name, part) for name in names]
            cells += ["–" if value is None else f"{value:.0f}" for value in found]
            cells.append(f"{found[0] / found[1]:.2f}" if found[0] and found[1] else "–")
        yield "| " + " | ".join(cells) + " |"


def reference(inputs: Tensors, dout: torch.Tensor, *, causal: bool, dtype: torch.dtype) -> Tensors:
    """Gradients of the plain formula in `dtype`."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    out = torch.softmax(scores, dim=-1) @ v
    return torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def check(shape: Shape, repeats: int) -> list[str]:
    """What is wrong with our gradients; empty when nothing is."""
    wrong = []
    inputs = shape.inputs(3)
    dout = torch.randn_like(inputs[0]).detach()
    forward = providers(shape)["ours"]
    grads = torch.autograd.grad(forward(*inputs), inputs, dout)
    exact = reference(tuple(inputs), dout, causal=shape.causal, dtype=torch.float64)
    plain = reference(tuple(inputs), dout, causal=shape.causal, dtype=inputs[0].dtype)
    for name, grad, ref, other in zip(("dq", "dk", "dv"), grads, exact, plain, strict=True):
        error, bound = (grad - ref).abs().max().item(), 2 * (other - ref).abs().max().item() + 1e-5
        norm = (grad - ref).norm().item()
        norm_bound = 1.5 * (other - ref).norm().item() + 1e-6 * ref.norm().item()
        if not (error <= bound and norm <= norm_bound):
            wrong.append(
                f"{name} of {shape}: {error:.2e} of {bound:.2e}, norm {norm:.2e} of {norm_bound:.2e}"
            )
    for _ in range(repeats):
        again = torch.autograd.grad(forward(*inputs), inputs, dout)
        if not all(torch.equal(one, other) for one, other in zip(grads, again, strict=True)):
            wrong.append(f"{shape}: other bits in another run")
            break
    return wrong


def main() -> int:
    """0 when all gradients keep to the rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=list(SEQLENS))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=20, help="of one provider's run in one round")
    parser.add_argument("--repeats", type=int, default=50, help="of the check for the same bits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds")
    parser.add_argument("--kernels", metavar="GLOB", help="compare these backward kernels with each other")
    options = parser.parse_args()
    shapes = [
        Shape(max(TOKENS // seqlen, 1), WIDTH // head_dim, seqlen, head_dim, causal, options.dtype)
        for head_dim in options.head_dims
        for causal in (False, True)
        for seqlen in options.seqlens
    ]
    if options.kernels:
        return compare_kernels(options, shapes)
    wrong = []
    for head_dim in options.head_dims:
        for seqlen, causal in ((1024, False), (1024, True), (1023, False), (777, True), (97, True)):
            wrong += check(Shape(2, 3, seqlen, head_dim, causal, options.dtype), options.repeats)
    print("\n".join(wrong) or "gradients: within the rule, the same bits in every run")
    rows = []
    for shape in shapes:
        rows.append(measure(shape, options.rounds, options.budget_ms))
        torch.cuda.empty_cache()
    print(f"TFLOP/s on {torch.cuda.get_device_name()}, {options.dtype}, median of {options.rounds} rounds")
    print("\n".join(table(rows)))
    for row in rows:
        for name, reason in row["refused"].items():
            print(f"{name} at {row['shape']}: {reason}")
    write(options.json, {"wrong": wrong, "rows": rows})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
