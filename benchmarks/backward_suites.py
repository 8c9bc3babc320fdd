"""What `benchmarks.backward` leaves out of training, beside torch: `python -m benchmarks.backward_suites`.

    small      few and short sequences, causal and not
    bias       a bias [1, H, S, S], [1, 1, S, S] or [B, H, S, S] that requires grad
    varlen     packed sequences of random lengths
    block      a block of a GPT, weights and all: torch's function, with each backend, and under `enable()`
    forward    our forward alone: with softmax_lse, which a backward needs, and without; with inputs that
               require grad, and without

Times are those of replayed CUDA graphs; a line has ours in milliseconds, by the median of the rounds, and
every other one over ours. Gradients are compared with those of math or mem-efficient, and repeated to the
same bits; what is wrong is printed, and makes the exit code 1. --json writes all rounds and peaks of memory.
Needs a GPU. --from FILE prints such a file as tables of Markdown instead, and needs none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import sdpa_cutlass
from benchmarks.gradient_timing import BACKENDS, Forward, by_backend, milliseconds, replay_of, timed, write
from sdpa_cutlass import attention, attention_varlen

MATH = {"math": SDPBackend.MATH}
MATH_SCORES = 2**28  # with more, its float32 copies take too much memory
LARGEST_ERROR = 2e-2  # of a gradient, over its largest element


@dataclass(frozen=True)
class Case:
    """Functions of the same inputs. Those that come last are what gradients are compared with."""

    suite: str
    name: str
    inputs: list[torch.Tensor]
    forwards: dict[str, Forward]
    facts: dict[str, Any] = field(default_factory=dict)


def tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, and requires grad."""
    return torch.randn(size, device="cuda", dtype=dtype).requires_grad_()


def small(dtype: torch.dtype) -> Iterator[Case]:
    """Problems that do not fill a card, or hardly."""
    shapes = ((1, 8, 128, 64), (1, 8, 512, 64), (8, 8, 256, 64), (2, 12, 1024, 64), (1, 16, 512, 128))
    for shape in shapes:
        for is_causal in (False, True):
            causal = "top_left" if is_causal else None

            def ours(q: Any, k: Any, v: Any, causal: str | None = causal) -> Any:
                return attention(q, k, v, causal=causal)

            def torchs(q: Any, k: Any, v: Any, is_causal: bool = is_causal) -> Any:
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

            yield Case(
                "small",
                f"{shape}{' causal' if is_causal else ''}",
                [tensor(*shape, dtype=dtype) for _ in range(3)],
                {"ours": ours, **by_backend(torchs, BACKENDS | MATH)},
            )


def bias(dtype: torch.dtype) -> Iterator[Case]:
    """As T5, Swin and AlphaFold have them: a bias of each head, of all, and of each element of the batch."""
    cases = (
        ((64, 16, 49, 32), (1, 16, 49, 49)),
        ((8, 12, 512, 64), (1, 12, 512, 512)),
        ((8, 32, 2048, 64), (1, 32, 2048, 2048)),
        ((8, 32, 2048, 64), (1, 1, 2048, 2048)),
        ((2, 32, 2048, 64), (2, 32, 2048, 2048)),
        ((2, 32, 4096, 64), (1, 32, 4096, 4096)),
        ((8, 16, 2048, 128), (1, 16, 2048, 2048)),
    )

    def ours(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention(q, k, v, attn_mask=mask)

    def torchs(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    backends = {name: BACKENDS[name] for name in ("efficient", "cudnn")}
    for shape, size in cases:
        batch, heads, seqlen, _ = shape
        with_math = MATH if batch * heads * seqlen**2 <= MATH_SCORES else {}
        inputs = [tensor(*shape, dtype=dtype) for _ in range(3)]
        yield Case(
            "bias",
            f"{shape} bias {size}",
            [*inputs, tensor(*size, dtype=dtype)],
            {"ours": ours, **by_backend(torchs, backends | with_math)},
        )


def varlen(dtype: torch.dtype) -> Iterator[Case]:
    """16 sequences of 128 to 2048 tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(128, 2049, (16,), generator=draw)
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().cuda()
    total, longest = int(lengths.sum()), int(lengths.max())
    flash, efficient = torch.ops.aten._flash_attention_forward, torch.ops.aten._efficient_attention_forward
    for heads, head_dim in ((32, 64), (16, 128)):
        for is_causal in (False, True):
            causal = "top_left" if is_causal else None

            def ours(q: Any, k: Any, v: Any, causal: str | None = causal) -> Any:
                return attention_varlen(q, k, v, ends, ends, longest, longest, causal=causal)

            def of_flash(q: Any, k: Any, v: Any, is_causal: bool = is_causal) -> Any:
                return flash(q, k, v, ends, ends, longest, longest, 0.0, is_causal, False)[0]

            def of_efficient(q: Any, k: Any, v: Any, is_causal: bool = is_causal) -> Any:
                qkv = (x[None] for x in (q, k, v))
                return efficient(*qkv, None, ends, ends, longest, longest, 0.0, int(is_causal), True)[0][0]

            yield Case(
                "varlen",
                f"({total}, {heads}, {head_dim}){' causal' if is_causal else ''}",
                [tensor(total, heads, head_dim, dtype=dtype) for _ in range(3)],
                {"ours": ours, "flash": of_flash, "efficient": of_efficient},
                {"lengths": lengths.tolist()},
            )


def block(dtype: torch.dtype) -> Iterator[Case]:
    """[8, 1024, 1024], 16 heads of 64; and 8 heads of 128."""
    for heads in (16, 8):
        width = 1024
        x = tensor(8, 1024, width, dtype=dtype)
        sizes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        weights = [(torch.randn(size, device="cuda") / 32).to(dtype).requires_grad_() for size in sizes]

        def forward(x: Any, qkv: Any, proj: Any, up: Any, down: Any, heads: int = heads) -> Any:
            batch, seqlen, width = x.shape
            rows = F.linear(F.layer_norm(x, (width,)), qkv).view(batch, seqlen, 3, heads, width // heads)
            q, k, v = rows.permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(out.transpose(1, 2).reshape(x.shape), proj)
            return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), up)), down)

        def enabled(*inputs: Any, forward: Forward = forward) -> Any:
            with sdpa_cutlass.enabled() as usage:
                out = forward(*inputs)
            if usage.served != 1:
                raise RuntimeError(f"enable() served {usage.served} calls of 1: {dict(usage.fallbacks)}")
            return out

        yield Case(
            "block",
            f"8 x 1024 tokens of {width}, {heads} heads, causal",
            [x, *weights],
            {"ours": enabled, "torch": forward, **by_backend(forward)},
        )


def forward(dtype: torch.dtype) -> Iterator[Case]:
    """Nothing is differentiated."""
    shapes = ((1, 8, 512, 64), (8, 8, 256, 64), (8, 32, 2048, 64), (8, 16, 2048, 128), (2, 8, 8192, 256))
    for shape in shapes:
        for is_causal in (False, True):
            causal = "top_left" if is_causal else None

            def of(*, is_leaf: bool, causal: str | None = causal, **options: Any) -> Forward:
                def run(*inputs: torch.Tensor) -> Any:
                    given = inputs if is_leaf else [x.detach() for x in inputs]
                    return attention(*given, causal=causal, **options)

                return run

            yield Case(
                "forward",
                f"{shape}{' causal' if is_causal else ''}",
                [tensor(*shape, dtype=dtype) for _ in range(3)],
                {
                    "ours": of(is_leaf=False),
                    "ours again": of(is_leaf=False),
                    "softmax_lse": of(is_leaf=False, return_lse=True),
                    "requires grad": of(is_leaf=True),
                },
            )


SUITES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "small": small,
    "bias": bias,
    "varlen": varlen,
    "block": block,
    "forward": forward,
}


def forward_times(case: Case, rounds: int, budget_ms: float) -> dict[str, Any]:
    """Milliseconds of the forward of every function, all rounds, in turns."""
    replays = {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name, run in case.forwards.items():
            for _ in range(2):
                run(*case.inputs)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run(*case.inputs)
            replays[name] = replay_of(graph, case.inputs)
    times: dict[str, dict[str, list[float]]] = {name: {"forward": []} for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name]["forward"].append(milliseconds(replay, budget_ms))
    return {"milliseconds": times, "refused": {}}


def check(case: Case, repeats: int) -> list[str]:
    """What is wrong with our gradients; empty when nothing is."""
    out = case.forwards["ours"](*case.inputs)
    dout = torch.randn_like(out).detach()
    grads = torch.autograd.grad(out, case.inputs, dout)
    wrong = []
    for _ in range(repeats):
        again = torch.autograd.grad(case.forwards["ours"](*case.inputs), case.inputs, dout)
        if not all(map(torch.equal, grads, again)):
            wrong.append(f"{case.suite} {case.name}: other bits in another run")
            break
    others = [name for name in case.forwards if name in ("flash", "efficient", "math")]
    for name in reversed(others):
        try:
            expected = torch.autograd.grad(case.forwards[name](*case.inputs), case.inputs, dout)
        except Exception:  # `timed` says why
            torch.cuda.synchronize()
            continue
        for i, (one, other) in enumerate(zip(grads, expected, strict=True)):
            error, most = (one - other).abs().max().item(), other.abs().max().item()
            if not error <= LARGEST_ERROR * most:
                off = f"{error:.2e} of {most:.2e}"
                wrong.append(f"{case.suite} {case.name}: gradient {i} is off {name}'s by {off}")
        return wrong
    wrong.append(f"{case.suite} {case.name}: nothing to compare with")
    return wrong


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each case and part: ours in milliseconds, and every other one over ours."""
    for row in rows:
        times = row["milliseconds"]
        for part in times.get("ours", {}):
            ours = statistics.median(times["ours"][part])
            others = "  ".join(
                f"{name} {statistics.median(parts[part]) / ours:.3f}"
                for name, parts in times.items()
                if name != "ours"
            )
            yield f"{row['suite']:8} {row['name']:52} {part:9} {ours:9.4f} ms   / ours: {others}"


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each suite: ours, of all parts together, the others over ours, and memory over ours."""
    for suite in dict.fromkeys(row["suite"] for row in rows):
        listed = [row for row in rows if row["suite"] == suite]
        part = "forward" if suite == "forward" else "both"
        others = [
            name for name in dict.fromkeys(n for row in listed for n in row["milliseconds"]) if name != "ours"
        ]
        yield f"| {suite} | ours, ms | " + " | ".join(others) + " | most memory of ours, MB | of others |"
        yield "|---|--:|" + "--:|" * (len(others) + 2)
        for row in listed:
            times = {name: statistics.median(parts[part]) for name, parts in row["milliseconds"].items()}
            cells = [f"{times[name] / times['ours']:.2f}" if name in times else "–" for name in others]
            memory = row.get("peak_bytes", {})
            peaks = [f"{memory['ours'] / 1e6:.0f}" if memory else "–"]
            peaks.append(
                ", ".join(f"{name} {memory[name] / 1e6:.0f}" for name in others if name in memory) or "–"
            )
            yield "| " + " | ".join([row["name"], f"{times['ours']:.3f}", *cells, *peaks]) + " |"
        yield ""


def main() -> int:
    """0 when all gradients agree."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backward_suites",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suites", choices=tuple(SUITES), nargs="+", default=list(SUITES))
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-ms", type=float, default=10, help="of one provider's run in one round")
    parser.add_argument("--repeats", type=int, default=10, help="of the check for the same bits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="print what --json wrote")
    options = parser.parse_args()
    if options.saved is not None:
        print("\n".join(markdown(json.loads(options.saved.read_text(encoding="utf-8"))["rows"])))
        return 0
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for suite in options.suites:
        for case in SUITES[suite](getattr(torch, options.dtype)):
            if suite == "forward":
                found = forward_times(case, 3 * options.rounds, options.budget_ms)
            else:
                wrong += check(case, options.repeats)
                found = timed(case.forwards, case.inputs, options.rounds, options.budget_ms)
            rows.append({"suite": suite, "name": case.name, "dtype": options.dtype, **case.facts, **found})
            print("\n".join(table(rows[-1:])), flush=True)
            for name, reason in found["refused"].items():
                print(f"  {name}: {reason}")
            torch.cuda.empty_cache()
    print("\n".join(wrong) or "gradients agree, the same bits in every run")
    write(options.json, {"wrong": wrong, "rows": rows})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
