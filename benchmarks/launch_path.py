"""Where the microseconds between a Python call and a queued kernel go, at the mission shape.

    python -m benchmarks.launch_path
    python -m benchmarks.launch_path --json benchmarks/results/launch_path/CARD.json

Every line of the table is the time that the calling thread spends on one statement. Statements take turns, a
loop of 50 at a time, which nothing waits for and which is too short to fill the stream's queue; `us` is the
median over the loops, `us_min` the least. Three groups:

    parts     what a call through Python consists of; they do not add up to it exactly, because Python's own
              steps between them are not listed
    dry       whole calls that end before the library: a function that does nothing stands in for its own. A
              new signature is one token more in a key cache, other new ones differ in what they name; all of
              them with the choice of their kernel
    launched  whole calls as they are, and torch's own beside them; only on a GPU, since on a CPU the kernel
              runs within the call

Whole calls take the compiled path where there is one; with SDPA_CUTLASS_LAUNCHER=off they take that through
Python. `env` in the file says which it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import json
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass
from sdpa_cutlass.call import launch, plan_cache
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.library.abi import Library

FORMAT = 1
SHAPE = (1, 8, 512, 64)  # batch, heads, sequence, head_dim
CALLS = 50
ROUNDS = 200
_STEP = 1011  # odd: all sizes up to a power of two, in no order
_BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch math": SDPBackend.MATH,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One statement to time, under `context`."""

    group: str
    name: str
    statement: str
    context: AbstractContextManager[Any] = dataclasses.field(default_factory=nullcontext)


PARTS = (
    Step("parts", "an empty loop", "pass"),
    Step("parts", "is torch tracing?", "is_dynamo_compiling()"),
    Step("parts", "addresses of q, k, v", "q.data_ptr(); k.data_ptr(); v.data_ptr()"),
    Step("parts", "sizes, strides, dtypes, devices", "signature_of(q), signature_of(k), signature_of(v)"),
    Step("parts", "comparing signatures", "signature == same_signature"),
    Step("parts", "looking a signature up", "cache[same_signature]"),
    Step("parts", "requires grad?", "q.requires_grad or k.requires_grad or v.requires_grad"),
    Step("parts", "allocating out", "torch.empty_like(q)"),
    Step("parts", "the C struct", "pack(head, 1 << 46, 1 << 46, 1 << 46, 1 << 46, 0, 0, 0, rest)"),
    Step("parts", "an empty ctypes call", "kernel_count()"),
)
PARTS_ON_A_GPU = (
    Step("parts", "torch's current stream", "current_stream(device_index)"),
    Step("parts", "sdpa_plan_launch, everything ready", "launch_plan(native, addresses, stream)"),
)
_CALLS = {
    "plan.run": "{plan}.run(q, k, v, out)",
    "scaled_dot_product_attention": "scaled_dot_product_attention(q, k, v{scale})",
    "attention": "attention(q, k, v{scale})",
    "attention, out given": "attention(q, k, v{scale}, out=out)",
    "attention, with softmax_lse": "attention(q, k, v{scale}, return_lse=True)",
    "attention, padding mask": "attention(q, k, v{scale}, attn_mask=mask)",
    "attention, seqlens_k": "attention(q, k, v{scale}, seqlens_k=seqlens_k)",
    "attention, dropout": "attention(q, k, v{scale}, p_dropout=0.1)",
    "attention_varlen": "attention_varlen(*packed, cu_seqlens, cu_seqlens, 512, 512{scale})",
}
_NEW_CALLS = {
    "attention, a new signature": "kv = next(growing); attention(row, kv, kv{scale})",
    "attention, a new batch": "x = next(batches); attention(x, x, x{scale})",
    "attention, a new prompt": "x = next(prompts); attention(x, x, x{scale})",
    "attention, a new causal prompt": "x = next(causal); attention(x, x, x{scale}, causal='top_left')",
    "attention, a new padding mask": "kv, m = next(masked); attention(row, kv, kv{scale}, attn_mask=m)",
    "attention, seqlens_k, new keys": "kv = next(padded); attention(row, kv, kv{scale}, seqlens_k=length)",
    "attention, dropout, a new prompt": "x = next(dropped); attention(x, x, x{scale}, p_dropout=0.1)",
    "attention_varlen, a new total": "attention_varlen(*next(totals){scale})",
}
DRY = tuple(
    Step("dry", name, statement.format(plan="dry_plan", scale=", scale=dry_scale"))
    for name, statement in (_CALLS | _NEW_CALLS).items()
)
LAUNCHED = tuple(
    Step("launched", name, statement.format(plan="plan", scale="")) for name, statement in _CALLS.items()
)


def main() -> int:
    """Runs the command line."""
    options = _parser().parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    env = environment.record(device)
    rows = measure(device, rounds=options.rounds)
    environment.close(env, device)
    show(rows)
    if options.json:
        record = {"format": FORMAT, "env": env, "shape": list(SHAPE), "dtype": "f16", "calls": CALLS}
        record |= {"rounds": options.rounds, "rows": rows}
        write_atomically(options.json, json.dumps(record, indent=1) + "\n")
        print(f"wrote {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="loops of each statement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save what was measured")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def measure(
    device: torch.device, *, shape: Sequence[int] = SHAPE, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """One row per statement: group, name, statement, us and us_min; of a refused one, why (`refused`)."""
    on_gpu = device.type == "cuda"
    names = _names(device, shape)
    steps = [*PARTS, *(PARTS_ON_A_GPU if on_gpu else ()), *DRY, *(LAUNCHED + _peers() if on_gpu else ())]
    timers = {step: timeit.Timer(step.statement, globals=names) for step in steps}
    library, _ = launch.library_for(names["q"])
    refused = {}
    for step in steps:
        with _around(step, library):
            if (reason := _first_run(step, timers[step])) is not None:
                refused[step] = reason
    samples: dict[Step, list[float]] = {step: [] for step in steps if step not in refused}
    for _ in range(rounds):
        for step, times in samples.items():
            with _around(step, library):
                times.append(1e6 * timers[step].timeit(CALLS) / CALLS)
            if on_gpu:
                torch.cuda.synchronize()
    rows = []
    for step in steps:
        row: dict[str, Any] = {"group": step.group, "name": step.name, "statement": step.statement}
        if step in refused:
            row["refused"] = refused[step]
        else:
            row |= {"us": statistics.median(samples[step]), "us_min": min(samples[step])}
        rows.append(row)
    return rows


def _around(step: Step, library: Library) -> AbstractContextManager[None]:
    return _dry(library) if step.group == "dry" else step.context


def _first_run(step: Step, timer: timeit.Timer) -> str | None:
    """Runs a statement twice, so that plans are made; the reason of a backend that refuses, or None."""
    try:
        timer.timeit(2)
    except RuntimeError as error:
        if not step.name.startswith("torch "):
            raise
        return str(error).splitlines()[0]
    return None


def _peers() -> tuple[Step, ...]:
    statement = "F.scaled_dot_product_attention(q, k, v)"
    default = Step("launched", "torch, its own choice", statement)
    masked = "F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
    return (
        default,
        *(Step("launched", name, statement, _Backend(backend)) for name, backend in _BACKENDS.items()),
        Step("launched", "torch, its own choice, padding mask", masked),
    )


class _Backend(AbstractContextManager[None]):
    """torch's context for one backend, which can be entered more than once."""

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(sdpa_kernel([self._backend]))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _names(device: torch.device, shape: Sequence[int]) -> dict[str, Any]:
    """What the statements refer to."""
    q, k, v = (torch.randn(shape, device=device).half() for _ in range(3))
    library, info = launch.library_for(q)
    # Its own scale is written out: to the cache another signature, so dry plans never serve real calls.
    dry_scale = shape[-1] ** -0.5
    plan = sdpa_cutlass.plan(q, k, v)
    launch_plan, native, current_stream, device_index, size, rest = plan._plan._ready
    out = torch.empty_like(q)
    batch, heads, rows, head_dim = shape
    mask = torch.ones(batch, 1, 1, rows, dtype=torch.bool, device=device)
    packed = tuple(torch.randn(batch * rows, heads, head_dim, device=device).half() for _ in range(3))
    workspace, workspace_address = plan._plan._make_workspace(out, 0) if size else (None, 0)
    words = (tensor.data_ptr() for tensor in (q, k, v, out))
    names = {
        "torch": torch, "F": F, "q": q, "k": k, "v": v, "out": out, "mask": mask, "packed": packed,
        "seqlens_k": torch.full((batch,), rows, dtype=torch.int32, device=device),
        "cu_seqlens": rows * torch.arange(batch + 1, dtype=torch.int32, device=device),
        "attention": sdpa_cutlass.attention, "attention_varlen": sdpa_cutlass.attention_varlen,
        "scaled_dot_product_attention": sdpa_cutlass.scaled_dot_product_attention,
        "plan": plan, "dry_scale": dry_scale, "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "signature_of": plan_cache.signature_of, "pack": launch._pack, "head": launch._head, "rest": rest,
        "workspace": workspace, "native": native, "launch_plan": launch_plan,
        "addresses": launch._pack(launch._head, *words, 0, workspace_address, size, rest),
        "row": q[:1, :, :1], "length": torch.ones(1, dtype=torch.int32, device=device),
        **_new_inputs(q),
        "kernel_count": _untyped(library, "sdpa_kernel_count"),
        "current_stream": current_stream, "device_index": device_index,
        "stream": None if current_stream is None else launch._keep_stream(current_stream(info.index)),
    }  # fmt: skip
    with _dry(library):
        names["dry_plan"] = sdpa_cutlass.plan(q, k, v, scale=dry_scale)
        for step in DRY:
            timeit.timeit(step.statement, number=2, globals=names)  # makes its plan, then its launcher
    signature, same_signature = (tuple(map(plan_cache.signature_of, (q, k, v))) for _ in range(2))
    return names | {
        "signature": signature,
        "same_signature": same_signature,
        "cache": {signature: plan},
    }


def _new_inputs(query: torch.Tensor) -> dict[str, Iterator[Any]]:
    """Inputs of another size each time, by name; none comes again while plans of it are kept.

    A cache grows by a token; other sizes come in no order, so that most have new prices.
    """
    _, heads, _, head_dim = query.shape
    longest = 2 * plan_cache.MAX_PLANS
    cache = query.new_zeros((1, heads, longest, head_dim))
    packed = query.new_zeros((longest, heads, head_dim))
    mask = torch.ones((1, 1, 1, longest), dtype=torch.bool, device=query.device)
    ends = torch.tensor([0, 1, 1], dtype=torch.int32, device=query.device)

    def each(make: Callable[[int], Any], step: int = 1) -> Iterator[Any]:
        return itertools.cycle([make(1 + step * i % longest) for i in range(longest)])

    def prompts() -> Iterator[Any]:
        return each(lambda size: packed[:size].transpose(0, 1)[None], _STEP)

    return {
        "growing": each(lambda size: cache[:, :, :size]),
        "masked": each(lambda size: (cache[:, :, :size], mask[..., :size])),
        "padded": each(lambda size: cache[:, :, :size]),
        "batches": each(lambda size: packed[:size, :, None], _STEP),
        "prompts": prompts(), "causal": prompts(), "dropped": prompts(),
        "totals": each(lambda size: (*3 * (packed[:size],), ends, ends, size, size), _STEP),
    }  # fmt: skip


def _untyped(library: Library, function: str) -> Any:
    """A function of the library without argument types, as the launch path calls it."""
    found = ctypes.CDLL(str(library.path))[function]
    found.restype = ctypes.c_int
    return found


@contextlib.contextmanager
def _dry(library: Library) -> Iterator[None]:
    """Plans made meanwhile launch nothing and succeed."""
    real = library.launch_plan
    library.launch_plan = ctypes.CDLL(None)[
        "pthread_equal"
    ]  # of a plan and addresses: 0, as a launch's success
    try:
        yield
    finally:
        library.launch_plan = real


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table."""
    print(f"{'':40} {'us':>8} {'least':>8}")
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            print(f"{group}:")
        times = f"{row['us']:8.2f} {row['us_min']:8.2f}" if "us" in row else f"refused: {row['refused']}"
        print(f"  {row['name']:38} {times}")


if __name__ == "__main__":
    raise SystemExit(main())
