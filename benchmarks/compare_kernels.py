"""Every general kernel of one head_dim on the same problems, beside torch's kernels, in one process.

    python -m benchmarks.compare_kernels --head-dim 64 --head-dim 128
    python -m benchmarks.compare_kernels --head-dim 128 --seqlen 2048 --kinds packed,window --json FILE

Which family should serve lengths, packed sequences, windows and sinks on this card, and is the choice that of
the cost model? All take turns, replay by replay (see sdpa_cutlass/cli/timing.py). Times are in microseconds;
`*` is the kernel that is chosen. Outputs are compared with the first kernel's: this finds a wrong kernel, but
does not replace the tests.

    full, causal    nothing else: what general kernels cost there
    lengths         seqlens_k [B], 50 to 100 % of seqlen_k
    packed          such sequences one behind the other; packed_causal
    window          causal, every row sees the last quarter of seqlen_k
    sinks           causal, a logit for every head
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sdpa_cutlass
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.timing import Contestant, time_on_gpu
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo, Takes
from sdpa_cutlass.problem import DType

FORMAT = 1
KINDS = ("full", "causal", "lengths", "packed", "packed_causal", "window", "sinks")
TOKENS = 16384
HEADS = {64: 32, 80: 24, 96: 20, 128: 16, 256: 8}
LEAST_LENGTH = 0.5  # of seqlen
BUDGET_S = 0.2
_WANTED = Takes.LENGTHS | Takes.PACKED | Takes.WINDOW | Takes.SINKS
_TOLERANCE = 0.02  # between kernels: another order of sums, and P rounded against another reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One problem, and what makes it: `q`, `k`, `v` are [B, H, S, D], packed [total, H, D]."""

    kind: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seqlen: int
    lengths: torch.Tensor  # int32 [B]

    @property
    def is_causal(self) -> bool:
        return self.kind not in ("full", "lengths", "packed")

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [B + 1]"""
        zero = self.lengths.new_zeros(1)
        return torch.cat((zero, self.lengths.cumsum(0, dtype=torch.int32)))

    @property
    def options(self) -> dict[str, Any]:
        """What `attention` or `attention_varlen` is given besides the tensors."""
        options: dict[str, Any] = {"causal": "top_left" if self.is_causal else None}
        if self.kind == "lengths":
            options["seqlens_k"] = self.lengths
        if self.kind == "window":
            options["window"] = (self.seqlen // 4, 0)
        if self.kind == "sinks":
            options["sinks"] = torch.zeros(self.q.shape[1], dtype=torch.float32, device=self.q.device)
        return options

    def own(self, kernel: str | None) -> Callable[[], torch.Tensor]:
        """A call of this library."""
        out, options = torch.empty_like(self.q), {**self.options, "kernel": kernel}
        if self.kind.startswith("packed"):
            cu = self.cu_seqlens
            return lambda: sdpa_cutlass.attention_varlen(
                self.q, self.k, self.v, cu, cu, self.seqlen, self.seqlen, out=out, **options
            )
        return lambda: sdpa_cutlass.attention(self.q, self.k, self.v, out=out, **options)

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """torch's flash and cuDNN where they compute the problem: padding as a boolean mask, no sinks."""
        flash, cudnn = torch.ops.aten._flash_attention_forward, torch.ops.aten._cudnn_attention_forward
        causal, s = self.is_causal, self.seqlen
        if self.kind == "sinks":
            return {}
        if self.kind.startswith("packed"):
            qkv, cu = (self.q, self.k, self.v), self.cu_seqlens
            return {
                "torch_flash": lambda: flash(*qkv, cu, cu, s, s, 0.0, causal, False)[0],
                "torch_cudnn": lambda: cudnn(*qkv, None, cu, cu, s, s, False, 0.0, causal, False)[0],
            }
        qkv = (self.q, self.k, self.v)
        rows = tuple(x.transpose(1, 2).contiguous() for x in qkv)  # flash takes [B, S, H, D]
        if self.kind == "window":
            left = s // 4
            return {
                "torch_flash": lambda: flash(
                    *rows, None, None, s, s, 0.0, True, False, window_size_left=left, window_size_right=0
                )[0]
            }
        if self.kind == "lengths":
            seen = torch.arange(s, device=self.q.device) < self.lengths[:, None]
            bias = torch.zeros(seen.shape, dtype=self.q.dtype, device=self.q.device)
            bias = bias.masked_fill_(~seen, -math.inf)[:, None, None].expand(-1, -1, s, -1)
            return {"torch_cudnn": lambda: cudnn(*qkv, bias, None, None, s, s, False, 0.0, False, False)[0]}
        return {
            "torch_flash": lambda: flash(*rows, None, None, s, s, 0.0, causal, False)[0],
            "torch_cudnn": lambda: cudnn(*qkv, None, None, None, s, s, False, 0.0, causal, False)[0],
        }


def make_setting(
    kind: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype
) -> Setting:
    """Random tensors and lengths, the same for the same arguments."""
    generator = torch.Generator(device="cuda").manual_seed(seqlen + head_dim)
    share = torch.rand(batch, device="cuda", generator=generator) * (1 - LEAST_LENGTH) + LEAST_LENGTH
    lengths = (share * seqlen).to(torch.int32)
    shape: tuple[int, ...] = (batch, heads, seqlen, head_dim)
    if kind.startswith("packed"):
        shape = (int(lengths.sum()), heads, head_dim)
    q, k, v = (torch.randn(shape, dtype=dtype, device="cuda", generator=generator) for _ in range(3))
    return Setting(kind=kind, q=q, k=k, v=v, seqlen=seqlen, lengths=lengths)


def general_kernels(head_dim: int, dtype: DType) -> list[KernelInfo]:
    """Those that take everything that is asked for here, of this very head_dim."""
    return [
        row
        for row in sdpa_cutlass.kernels(Target.CUDA)
        if row.serves(Family.FMHA_FWD) and row.is_general and not row.has_dropout and not row.is_split
        and row.head_dim == head_dim and row.dtype is dtype and _WANTED in row.takes
    ]  # fmt: skip


def contestant(call: Callable[[], torch.Tensor]) -> Contestant:
    """The call, on its one input set."""
    return Contestant(lambda index: call(), torch.no_grad, 1)


def measure(setting: Setting, rows: Sequence[KernelInfo], repeats: int) -> dict[str, Any]:
    """Times by kernel or provider, the chosen kernel, failures, and the largest difference of an output."""
    calls = {row.name: setting.own(row.name) for row in rows} | setting.peers()
    failures: dict[str, str] = {}
    apart: dict[str, float] = {}
    first: torch.Tensor | None = None
    for row in rows:
        try:
            out = calls[row.name]().float()
        except sdpa_cutlass.SdpaError as error:
            failures[row.name] = str(error)
            continue
        first = out if first is None else first
        apart[row.name] = float((out - first).abs().max())
    timings = time_on_gpu(
        {name: contestant(call) for name, call in calls.items()},
        budget_s=BUDGET_S,
        max_replays=repeats,
        failed=lambda name, error: failures.update({name: str(error)}),
    )
    chosen = None
    if not setting.kind.startswith("packed"):
        explained = sdpa_cutlass.explain(setting.q, setting.k, setting.v, **setting.options)
        chosen = explained.choice.kernel.name
    return {
        "times_us": {name: timing.gpu_us for name, timing in timings.items()},
        "chosen": chosen, "apart": apart, "failures": failures,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of this file. Exit status 1 when kernels disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, action="append", choices=sorted(HEADS))
    parser.add_argument("--seqlen", type=int, action="append", help="default: 512, 2048 and 8192")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--dtype", choices=("f16", "bf16"), default="f16")
    parser.add_argument("--repeats", type=int, default=30, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds {', '.join(sorted(unknown))}: must be of {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    dtype = torch.float16 if given.dtype == "f16" else torch.bfloat16
    records, disagree = [], False
    for head_dim in given.head_dim or sorted(HEADS):
        rows = general_kernels(head_dim, DType(given.dtype))
        for seqlen in given.seqlen or (512, 2048, 8192):
            batch, heads = max(TOKENS // seqlen, 1), HEADS[head_dim]
            for kind in kinds:
                found = measure(
                    make_setting(kind, batch, heads, seqlen, head_dim, dtype), rows, given.repeats
                )
                problem = f"{kind} b{batch} h{heads} s{seqlen} d{head_dim} {given.dtype}"
                records.append({"problem": problem, **found})
                print(problem)
                for name, us in sorted(found["times_us"].items(), key=lambda item: item[1]):
                    off = found["apart"].get(name, 0.0)
                    wrong = not off <= _TOLERANCE
                    disagree |= wrong
                    print(f"  {us:10.2f} {'*' if name == found['chosen'] else ' '} {name}"
                          + (f"   DIFFERS by {off:.3g}" if wrong else ""), flush=True)  # fmt: skip
                for name, why in found["failures"].items():
                    print(f"      failed   {name}: {why[:150]}")
    if given.json:
        env = environment.record(torch.device("cuda", 0))
        write_atomically(
            given.json, json.dumps({"format": FORMAT, "env": env, "rows": records}, indent=1) + "\n"
        )
    return int(disagree)


if __name__ == "__main__":
    raise SystemExit(main())
