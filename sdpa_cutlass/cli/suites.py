"""The problems that are compared and benchmarked, grouped in named suites. Shapes only: no tensors, no torch.

mission     one sequence of 512, eight heads of 64: so small that latency decides
small       batch 8, 16, 32 x sequence 128, 256, 512 at eight heads of 64
long        sequence 512, 2048 and 8192 for every head dimension, 16384 tokens and about 2048 channels in all
hopper      what Hopper's kernels are for: 512 to 16384 keys of head dimensions 64 to 256, 16384 tokens in
            all; then few heads, and 64 query heads to 8 of keys
decode      1, 4 and 16 queries against 4096 to 32768 keys, grouped heads among them
masks       every kind of mask, lengths, dropout and grouped heads, at the lengths of `long`
real        q, k, v captured from a pretrained encoder (a committed file), and with --input the user's own
host        real but small shapes of every head dimension, for the library that runs without a GPU
host_masks  the kinds of `masks`, as small

Every problem of the other suites appears without and with a causal mask (top_left alignment, as in PyTorch)
unless the suite says otherwise: in `decode` several queries are the last ones of their sequence
(bottom_right) and one query needs no mask. conditions.py says what the kinds of masks are.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from sdpa_cutlass.problem import MASK_ALIGNMENT, Causal, DType, MaskType, Problem

LONG_HEADS = {32: 64, 64: 32, 80: 24, 96: 20, 128: 16}
LONG_SEQLENS = (512, 2048, 8192)
LONG_TOKENS = 16384
HOPPER_HEADS = {64: 32, 80: 24, 96: 20, 128: 16, 256: 8}
HOPPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
MASK_HEAD_DIMS = (64, 80, 96, 128)
MASKS = ("lengths", "lengths_full", "padding", "dense", "document", "bias_f16", "bias_f32", "packed")
WITH_LENGTHS = ("lengths", "lengths_full", "packed")
P_DROPOUT = 0.1
GQA_RATIO = 4
# batch, num_heads_q, num_heads_kv, seqlen_k, head_dim
DECODE_SHAPES = (
    (1, 32, 8, 8192, 128),
    (8, 32, 8, 8192, 128),
    (32, 32, 8, 4096, 128),
    (1, 16, 16, 8192, 64),
    (8, 16, 16, 8192, 64),
    (32, 16, 16, 4096, 64),
    (1, 32, 8, 32768, 128),
    (1, 32, 1, 32768, 128),
    (8, 32, 1, 8192, 128),
)
DECODE_QUERIES = (4, 16)
# Of DECODE_SHAPES: also with several queries, and once in bfloat16.
SEVERAL_QUERIES = (0, 1, 3, 4, 6, 7)
IN_BFLOAT16 = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem: shape, options and where its tensors come from (`source` None: random)."""

    suite: str
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    mask: str = "none"
    p_dropout: float = 0.0
    source: Path | None = None
    alignment: Causal = Causal.TOP_LEFT  # of the causal mask, where there is one
    dtype: str | None = None  # `f16` or `bf16`; None: as the whole run

    @property
    def name(self) -> str:
        """A short name that tells all problems of a suite apart, such as `long/b8_h32_s2048_d64_causal`."""
        heads = f"h{self.num_heads_q}"
        if self.num_heads_kv != self.num_heads_q:
            heads += f"x{self.num_heads_kv}"
        seqlen = f"s{self.seqlen_q}"
        if self.seqlen_k != self.seqlen_q:
            seqlen = f"q{self.seqlen_q}_k{self.seqlen_k}"
        parts = [f"b{self.batch}", heads, seqlen, f"d{self.head_dim}"]
        if self.causal:
            parts.append("causal" if self.alignment is Causal.TOP_LEFT else "causal_bottom_right")
        if self.mask != "none":
            parts.append(self.mask)
        if self.p_dropout:
            parts.append("dropout")
        if self.dtype:
            parts.append(self.dtype)
        return f"{self.suite}/{'_'.join(parts)}"

    @property
    def is_plain(self) -> bool:
        """True without a mask, lengths and dropout."""
        return self.mask == "none" and not self.p_dropout

    def problem(self, dtype: DType = DType.F16) -> Problem:
        """The same problem as the library sees it; FLOPs and bytes are defined there."""
        return Problem(
            dtype=dtype,
            batch=self.batch,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            causal=self.alignment if self.causal else None,
        )

    @property
    def is_cold(self) -> bool:
        """True when the inputs shall come from DRAM, as a KV cache does that is read once per token."""
        return self.suite in COLD_SUITES

    @property
    def seen(self) -> float:
        """Share of the scores that the causal mask lets through, counted one by one."""
        if not self.causal:
            return 1.0
        offset = self.problem().causal_offset
        seen = sum(min(self.seqlen_k, max(0, row + offset + 1)) for row in range(self.seqlen_q))
        return seen / (self.seqlen_q * self.seqlen_k)

    @property
    def flops(self) -> float:
        """Problem.flops, by convention half when causal; for bottom_right, what the mask lets through."""
        if self.causal and self.alignment is Causal.BOTTOM_RIGHT:
            return dataclasses.replace(self, causal=False).problem().flops * self.seen
        return float(self.problem().flops)


def with_conditions(problem: Problem, mask: str, p_dropout: float) -> Problem:
    """`problem` with the mask, lengths and dropout of a case, as conditions.py makes them."""
    bias = MaskType.BF16 if problem.dtype is DType.BF16 else MaskType.F16
    types = {"bias_f16": bias, "bias_f32": MaskType.F32}
    mask_type = types.get(mask, None if mask in ("none", *WITH_LENGTHS) else MaskType.BOOL)
    alignment, rows = MASK_ALIGNMENT, 0  # of the mask's own
    if mask_type is not None:
        rows = problem.num_heads_q if mask in types else problem.batch
        rows *= 1 if mask == "padding" else problem.seqlen_q
        if rows > 1:
            alignment = math.gcd(alignment, problem.seqlen_k * mask_type.itemsize)
    return dataclasses.replace(
        problem,
        mask=mask_type,
        mask_alignment=alignment,
        mask_elements=rows * problem.seqlen_k,
        mask_has_one_row=mask == "padding" and problem.seqlen_q > 1,
        has_lengths=mask in WITH_LENGTHS,
        has_dropout=p_dropout > 0,
    )


def square(suite: str, batch: int, heads: int, seqlen: int, head_dim: int) -> tuple[Case, Case]:
    """The problem with seqlen_q == seqlen_k and without grouped heads: full, then causal."""
    full = Case(
        suite=suite,
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
    )
    return full, dataclasses.replace(full, causal=True)


def mission() -> list[Case]:
    """The one small problem that the project is measured by."""
    return list(square("mission", 1, 8, 512, 64))


def small() -> list[Case]:
    """Nine small problems, each full and causal."""
    return [
        case
        for seqlen in (128, 256, 512)
        for batch in (8, 16, 32)
        for case in square("small", batch, 8, seqlen, 64)
    ]


def long() -> list[Case]:
    """Three lengths of every head dimension, each full and causal."""
    return [
        case
        for head_dim, heads in LONG_HEADS.items()
        for seqlen in LONG_SEQLENS
        for case in square("long", LONG_TOKENS // seqlen, heads, seqlen, head_dim)
    ]


def hopper() -> list[Case]:
    """Six lengths of five head dimensions, two of few heads, two of grouped ones; each full and causal."""
    cases = [
        case
        for head_dim, heads in HOPPER_HEADS.items()
        for seqlen in HOPPER_SEQLENS
        for case in square("hopper", LONG_TOKENS // seqlen, heads, seqlen, head_dim)
    ]
    for seqlen in (2048, 8192):
        cases += square("hopper", 1, 8, seqlen, 128)
        cases += (dataclasses.replace(case, num_heads_kv=8) for case in square("hopper", 1, 64, seqlen, 128))
    return cases


def masked(full: Case, causal: Case) -> list[Case]:
    """A problem under every kind of mask, with dropout, and with grouped heads."""
    return [
        *(dataclasses.replace(full, mask=mask) for mask in MASKS),
        *(dataclasses.replace(case, p_dropout=P_DROPOUT) for case in (full, causal)),
        dataclasses.replace(full, num_heads_kv=full.num_heads_q // GQA_RATIO),
    ]


def masks() -> list[Case]:
    """The mission's problem with a padding mask; then all kinds, by head dimension and length."""
    cases = [dataclasses.replace(square("masks", 1, 8, 512, 64)[0], mask="padding")]
    for head_dim in MASK_HEAD_DIMS:
        for seqlen in LONG_SEQLENS:
            cases += masked(*square("masks", LONG_TOKENS // seqlen, LONG_HEADS[head_dim], seqlen, head_dim))
    return cases


def decode() -> list[Case]:
    """One query against a long cache, then several; one problem once more in bfloat16."""
    single = [
        Case(
            suite="decode",
            batch=batch,
            num_heads_q=heads,
            num_heads_kv=heads_kv,
            seqlen_q=1,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
        )
        for batch, heads, heads_kv, seqlen_k, head_dim in DECODE_SHAPES
    ]
    several = [
        dataclasses.replace(single[number], seqlen_q=seqlen_q, causal=True, alignment=Causal.BOTTOM_RIGHT)
        for seqlen_q in DECODE_QUERIES
        for number in SEVERAL_QUERIES
    ]
    return [*single, *several, dataclasses.replace(single[IN_BFLOAT16], dtype="bf16")]


def host() -> list[Case]:
    """Small enough for an emulated GPU at under one GFLOP/s: a few MFLOP each, several tiles both ways."""
    cases: list[Case] = []
    for head_dim in LONG_HEADS:
        cases += square("host", 1, 2, 160, head_dim)
    cases.append(dataclasses.replace(square("host", 1, 4, 97, 64)[0], num_heads_kv=2, seqlen_k=193))
    return cases


def host_masks() -> list[Case]:
    """Every kind once, two or three tiles both ways."""
    return masked(*square("host_masks", 2, 4, 97, 64))


SUITES = {
    "mission": mission,
    "small": small,
    "long": long,
    "hopper": hopper,
    "decode": decode,
    "masks": masks,
    "host": host,
    "host_masks": host_masks,
}
SUITE_NAMES = (*SUITES, "real")
DEFAULT_SUITES = {"cuda": ("mission", "small", "long", "real"), "cpu": ("host", "real")}
MASK_SUITES = ("masks", "host_masks")
COLD_SUITES = ("decode",)
CPU_SUITES = ("host", "host_masks", "real")  # those that a CPU can be asked for
GPU_SUITES = ("mission", "small", "long", "real", "decode", "masks")  # what `all` means
HOPPER_SUITES = ("hopper",)  # on request


def cases_of(names: Iterable[str]) -> list[Case]:
    """The problems of the named suites, in order. `real` has none here: their shapes lie in files."""
    return [case for name in names if name != "real" for case in SUITES[name]()]


def matching(cases: Sequence[Case], globs: Sequence[str]) -> list[Case]:
    """The cases whose name matches any of `globs`; all of them when there are none."""
    if not globs:
        return list(cases)
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, glob) for glob in globs)]
