"""FlashAttention's public test grid: its cases, and the rule that it holds results and gradients to.

The cases are those of tests/test_flash_attn.py of FlashAttention 2 (Dao et al.), by its suites' names:
shapes, dropout, causal, windows, grouped heads, packings, head_dims. Left out is what `flash_api` refuses by
name, softcap, alibi_slopes and block_table, and the suites of the key cache. `deterministic` changes nothing.

A reference takes sequence by sequence, in float64 and, as the yardstick, in the dtype of the inputs:

    max|out - ref| <= 2 · max|plain - ref| + slack        max|grad - ref| <= 2 · max|plain - ref| + slack

for each of dq, dk and dv, where FlashAttention grants the gradients of some suites 3.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import torch

from sdpa_cutlass import dropout_mask, flash_api
from sdpa_cutlass.call import rng
from tests.kernels.numerics import matmul

_SEED = 42


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The values that a suite crosses with each other."""

    name: str
    head_dims: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]  # seqlen_q, seqlen_k
    batch: int
    heads: int
    heads_kv: tuple[int, ...]
    packings: tuple[str, ...] = ("q",)  # the tensor that holds q: "q", "q kv" or "qkv"
    causal: tuple[bool, ...] = (False, True)
    dropouts: tuple[float, ...] = (0.0,)
    is_varlen: bool = False
    slack: float = 1e-5
    magnitudes: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of q, k and v
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # drawn when None


class Case(NamedTuple):
    """One call and its gradients."""

    dtype: torch.dtype
    head_dim: int
    size: tuple[int, int]
    heads_kv: int
    packing: str
    is_causal: bool
    is_local: bool
    p_dropout: float


_SQUARES = (97, 128, 200, 384, 768, 1024, 1025, 2048)
_SQUARES_VARLEN = (97, 128, 200, 257, 384, 512, 768, 1025, 2048)
_RECTANGLES = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024),
    (1024, 1023), (2048, 2048),
)  # fmt: skip
_CAUSAL = (
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
    (1023, 1024),
)  # fmt: skip
_LONG = (
    (3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128), (256, 256),
)  # fmt: skip
RACES = (
    (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200), (256, 256),
    (257, 257), (384, 384), (512, 512), (768, 768), (1024, 1024),
)  # fmt: skip
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)


def _both_ways(sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return (*sizes, *((keys, rows) for rows, keys in sizes))


SUITES = (
    Suite(
        name="qkvpacked", head_dims=HEAD_DIMS, sizes=tuple((size, size) for size in _SQUARES), batch=4,
        heads=9, heads_kv=(9,), packings=("qkv",), dropouts=(0.0, 0.17),
    ),
    Suite(
        name="varlen_qkvpacked", head_dims=(32, 59, 64, 80, 96, 128, 160, 192, 224, 256),
        sizes=tuple((size, size) for size in _SQUARES_VARLEN), batch=5, heads=6, heads_kv=(6,),
        packings=("qkv",), dropouts=(0.0, 0.17), is_varlen=True,
    ),
    Suite(
        name="output", head_dims=(32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256), sizes=_RECTANGLES,
        batch=4, heads=6, heads_kv=(6, 1, 2), packings=("q", "q kv"), dropouts=(0.0, 0.17),
    ),
    Suite(
        name="varlen_output", head_dims=(32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
        sizes=((1, 147), *_RECTANGLES), batch=4, heads=6, heads_kv=(6, 1, 2), packings=("q", "q kv"),
        dropouts=(0.0, 0.17), is_varlen=True,
    ),
    Suite(
        name="causal", head_dims=HEAD_DIMS, sizes=_both_ways(_CAUSAL), batch=8, heads=9, heads_kv=(9,),
        causal=(True,),
    ),
    Suite(
        name="varlen_causal", head_dims=HEAD_DIMS, sizes=_both_ways(_CAUSAL), batch=8, heads=9,
        heads_kv=(9,), causal=(True,), is_varlen=True,
    ),
    Suite(
        name="splitkv", head_dims=HEAD_DIMS, sizes=_both_ways(_LONG), batch=1, heads=12, heads_kv=(12,),
        slack=2e-4,
    ),
)  # fmt: skip


def cases(suite: Suite) -> Iterator[Case]:
    """All of a suite."""
    yield from map(
        Case._make,
        product(
            (torch.float16, torch.bfloat16), suite.head_dims, suite.sizes, suite.heads_kv, suite.packings,
            suite.causal, (False, True), suite.dropouts,
        ),
    )  # fmt: skip


def sample(suite: Suite, most_pairs: int) -> list[Case]:
    """Cases of at most so many pairs of row and key, in which any two values of a suite meet in one case.

    Excepted are two of head_dim and size, of which there are too many.
    """
    left = [case for case in cases(suite) if math.prod(case.size) <= most_pairs]
    random.Random(0).shuffle(left)
    fields = [pair for pair in combinations(Case._fields, 2) if pair != ("head_dim", "size")]
    met: set[tuple[object, ...]] = set()
    found = []

    def new(case: Case) -> set[tuple[object, ...]]:
        return {(a, b, getattr(case, a), getattr(case, b)) for a, b in fields} - met

    while left and (best := max(left[:500], key=lambda case: len(new(case)))) and new(best):
        found.append(best)
        met |= new(best)
        left = [case for case in left if new(case)]
    return found


class Operands(NamedTuple):
    """Leaves as the function takes them, and where each sequence lies."""

    leaves: tuple[torch.Tensor, ...]
    rows: list[slice] | None  # of packed sequences
    keys: list[slice] | None

    def unpacked(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """q, k and v, or their gradients, of tensors like the leaves."""
        if len(tensors) == 1:
            return tensors[0].unbind(-3)
        return tensors if len(tensors) == 3 else (tensors[0], *tensors[1].unbind(-3))

    def sequences(self, tensors: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        """q, k, v and what else has rows, of each sequence: [S, H, D]."""
        if self.rows is None or self.keys is None:
            return list(zip(*tensors, strict=True))
        q, k, v, *like_q = tensors
        return [
            (q[row], k[key], v[key], *(tensor[row] for tensor in like_q))
            for row, key in zip(self.rows, self.keys, strict=True)
        ]


def operands(suite: Suite, case: Case, device: str, batch: int, heads: int) -> Operands:
    """Seeded normal values; of packed sequences, lengths of up to 20 less than the longest."""
    draw = torch.Generator().manual_seed(_SEED)
    counts: list[list[int]] = []
    for size in case.size:
        shortest = max(1, size - 20) if suite.is_varlen else size
        counts.append(torch.randint(shortest, size + 1, (batch,), generator=draw).tolist())
    if suite.lengths is not None:
        counts = [list(lengths) for lengths in suite.lengths]
    if case.packing == "qkv":
        counts[1] = counts[0]
    heads_kv = max(heads * case.heads_kv // suite.heads, 1)

    def leaf(lengths: list[int], *shape: int) -> torch.Tensor:
        leading = (sum(lengths),) if suite.is_varlen else (batch, lengths[0])
        values = torch.randn((*leading, *shape, case.head_dim), generator=draw)
        return values.to(device, case.dtype).requires_grad_()

    if case.packing == "qkv":
        leaves: tuple[torch.Tensor, ...] = (leaf(counts[0], 3, heads),)
    elif case.packing == "q kv":
        leaves = (leaf(counts[0], heads), leaf(counts[1], 2, heads_kv))
    else:
        leaves = (leaf(counts[0], heads), leaf(counts[1], heads_kv), leaf(counts[1], heads_kv))
        with torch.no_grad():
            for tensor, magnitude in zip(leaves, suite.magnitudes, strict=True):
                tensor.mul_(magnitude)
    if not suite.is_varlen:
        return Operands(leaves, None, None)
    return Operands(leaves, *(_slices(lengths) for lengths in counts))


def _slices(lengths: list[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def window(case: Case) -> tuple[int, int]:
    """Seeded, of any size up to the keys."""
    if not case.is_local:
        return -1, -1
    draw = random.Random(f"{case.size}{case.head_dim}{case.is_causal}")
    return draw.randrange(case.size[1]), draw.randrange(case.size[1])


def call(given: Operands, case: Case, **options: object) -> torch.Tensor:
    """out of the function that takes these leaves."""
    names = {"qkv": "qkvpacked_func", "q kv": "kvpacked_func", "q": "func"}
    function = f"flash_attn_{'' if given.rows is None else 'varlen_'}{names[case.packing]}"
    arguments: list[object] = list(given.leaves)
    if given.rows is not None and given.keys is not None:
        sides = (given.rows,) if case.packing == "qkv" else (given.rows, given.keys)
        device = given.leaves[0].device
        arguments += [
            torch.tensor([0, *(part.stop for part in side)], dtype=torch.int32, device=device)
            for side in sides
        ]
        arguments += [max(part.stop - part.start for part in side) for side in sides]
    torch.manual_seed(_SEED)
    return getattr(flash_api, function)(  # type: ignore[no-any-return]
        *arguments, case.p_dropout, causal=case.is_causal, window_size=window(case), **options
    )


def keep_mask(given: Operands, case: Case) -> torch.Tensor | None:
    """What dropout keeps in `call`, [B, H, Sq, Sk]."""
    if not case.p_dropout:
        return None
    torch.manual_seed(_SEED)
    q, k, _ = given.unpacked(given.leaves)
    philox = rng.draw(q.device)
    if given.rows is None or given.keys is None:
        batch, longest = q.shape[0], (q.shape[1], k.shape[1])
    else:
        batch = len(given.rows)
        longest = tuple(max(part.stop - part.start for part in side) for side in (given.rows, given.keys))  # type: ignore[assignment]
    mask = dropout_mask(batch, q.shape[-2], *longest, case.p_dropout, philox, device=q.device)
    return torch.as_tensor(mask)


def seen(rows: int, keys: int, case: Case, device: torch.device) -> torch.Tensor:
    """[rows, keys]: which key a row sees; the last row belongs to the last key."""
    left, right = window(case)
    row = torch.arange(rows, device=device)[:, None] + keys - rows
    key = torch.arange(keys, device=device)
    right = 0 if case.is_causal else right
    found = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left >= 0:
        found &= key >= row - left
    if right >= 0:
        found &= key <= row + right
    return found


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, keep: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one sequence, [S, H, D], every step in the dtype of q; 0 where a row sees no key."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[0] // tensor.shape[0], 0) for tensor in (k, v))
    visible = seen(q.shape[1], k.shape[1], case, q.device)
    scores = matmul(q, (k * case.head_dim**-0.5).mT).masked_fill(~visible, -math.inf)
    scores = scores.masked_fill(~visible.any(-1, keepdim=True), 0)
    weights = scores.softmax(-1).masked_fill(~visible, 0)
    if keep is not None:
        weights = weights.masked_fill(~keep[:, : q.shape[1], : k.shape[1]], 0)
        v = v / (1 - case.p_dropout)
    return matmul(weights, v).transpose(0, 1)


def reference(
    given: Operands,
    case: Case,
    dout: torch.Tensor,
    keep: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[tuple[torch.Tensor, ...]]:
    """out, dq, dk and dv of each sequence, in float64."""
    tensors = [leaf.detach() for leaf in given.unpacked(given.leaves)]
    found = []
    for b, (q, k, v, of_out) in enumerate(given.sequences((*tensors, dout))):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = plain(*inputs, case, None if keep is None else keep[b])
        grads = torch.autograd.grad(out, inputs, of_out.to(dtype))
        found.append(tuple(tensor.detach().double() for tensor in (out, *grads)))
    return found


def broken(
    suite: Suite,
    case: Case,
    device: str,
    *,
    batch: int,
    heads: int,
    strided: Callable[[torch.Tensor], torch.Tensor] = lambda dout: dout,
) -> str:
    """What of the rule does not hold, in words; empty when nothing does.

    `strided` lays out the gradient of out.
    """
    given = operands(suite, case, device, batch, heads)
    out = call(given, case)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)
    grads = torch.autograd.grad(out, given.leaves, strided(dout))
    results = (*given.unpacked(grads), out)
    found = [(of_out.detach(), *of_inputs) for *of_inputs, of_out in given.sequences(results)]
    keep = keep_mask(given, case)
    exact = reference(given, case, dout, keep, torch.float64)
    yardstick = reference(given, case, dout, keep, case.dtype)
    lines = []
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        error, other = (
            max((one[i].double() - ref[i]).abs().max().item() for one, ref in zip(those, exact, strict=True))
            for those in (found, yardstick)
        )
        bound = 2 * other + suite.slack
        if not error <= bound:
            lines.append(f"{name}: {error:.3g} is more than {bound:.3g}")
    return "; ".join(lines)
