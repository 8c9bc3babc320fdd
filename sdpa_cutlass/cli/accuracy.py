"""How wrong an output is: the float32-or-better reference, the errors against it and their bounds.

    S = Q Kᵀ / sqrt(D) + mask,  lse = log Σ exp(S) [pairs, Sq],  ref = dropout(exp(S - lse)) V [pairs, Sq, D]

The reference is computed in blocks of (batch, head) pairs and query rows, so that its scores never fill the
memory. Problems with more scores than FULL_CHECK_SCORES are checked on some pairs only, drawn with the
run's seed; problems with dropout on the first ones, so that fewer random numbers have to be made again. Only
our own dropout can be checked: the others' masks are their own.

The bounds, all of which must hold, are
  whole tensor     max|out - ref| <= 2 max|chain - ref| + 1e-5, chain = naive_attention in the input type
  every element    |out - ref| <= 1e-3 max(1, |ref|) + half a unit in the last place of the output at ref
  log-sum-exp      |lse - ref| <= 1e-4 + 2^-21 |ref|
The second part of the last one is what float32 cannot resolve: four units in the last place. With a bias of
-1900 a unit is 1.2e-4, and a score is rounded when the bias is added, when it turns to base 2, and back.
A bfloat16 element is allowed 2^-8 Σ p |v| more, the most that rounding P to the type of the product can cost.
The piped baseline keeps its logits in float16, as any such pipeline does, so the second does not apply to it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli.conditions import Conditions
from sdpa_cutlass.cli.inputs import QKV

if TYPE_CHECKING:
    import torch

FULL_CHECK_SCORES = 2**33
DROPOUT_CHECK_SCORES = 2**27
FLOAT64_SCORES = 2**29
BLOCK_SCORES = {"cuda": 2**28, "cpu": 2**22}
LSE_BOUND = 1e-4
_LSE_SLACK = 2.0**-21  # of the value: as in tests/kernels/numerics.py
MANTISSA_AND_MIN_EXPONENT = {"float16": (10, -14), "bfloat16": (7, -126)}


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of one output, and why they are too large (None: they are not)."""

    max_err_out: float
    max_err_lse: float | None
    violation: str | None
    bound_out: float | None = None  # what max_err_out may be


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right answer for some (batch, head) pairs of a problem, and how far the plain chain is from it."""

    pairs: torch.Tensor  # int64 [P], index into batch * num_heads_q
    out: torch.Tensor  # [P, Sq, D]
    lse: torch.Tensor  # [P, Sq]
    allowed: torch.Tensor  # [P, Sq, D], largest error of each element of the output
    chain_error: float
    conditions: Conditions

    @property
    def largest(self) -> float:
        """The largest magnitude of the output."""
        return float(self.out.abs().max())

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, *, every_element: bool = True) -> Errors:
        """Errors of `out` [B, H, Sq, D] and `lse` [B, H, Sq] (None: not checked), or of packed ones.

        `every_element` says whether the second bound applies.
        """
        if self.conditions.is_packed:
            out = self.conditions.unpack(out)
            lse = None if lse is None else self.conditions.unpack(lse.T)
        chosen = out.flatten(0, 1)[self.pairs]
        error = (chosen.to(self.out.dtype) - self.out).abs()
        max_err_out = float(error.max())
        bound = 2 * self.chain_error + 1e-5
        excess = float((error - self.allowed).max())
        violations = []
        if not max_err_out <= bound:  # written so that NaN fails
            violations.append(f"max error of O {max_err_out:.3g} > {bound:.3g}, twice the plain chain's")
        elif every_element and not excess <= 0:
            violations.append(f"an element of O is {excess:.3g} beyond its bound")
        max_err_lse = None
        if lse is not None:
            found = lse.flatten(0, 1)[self.pairs].to(self.lse.dtype)
            error = (found - self.lse).abs().masked_fill(found == self.lse, 0)
            max_err_lse = float(error.max())
            slack = _LSE_SLACK * self.lse.abs().nan_to_num(posinf=0)
            if not bool((error <= LSE_BOUND + slack).all()):
                violations.append(f"max error of LSE {max_err_lse:.3g} > {LSE_BOUND:g}, and float32's steps")
        return Errors(max_err_out, max_err_lse, "; ".join(violations) or None, bound)


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between the neighbours of `value` in `dtype` (float16 or bfloat16)."""
    import torch

    mantissa, min_exponent = MANTISSA_AND_MIN_EXPONENT[str(dtype).removeprefix("torch.")]
    exponent = torch.frexp(value.abs().clamp(min=2.0**min_exponent))[1] - 1
    return torch.exp2(exponent.to(value.dtype) - (mantissa + 1))


def naive_attention(
    qkv: QKV,
    *,
    causal: bool,
    offset: int = 0,
    mask: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    p_dropout: float = 0.0,
) -> torch.Tensor:
    """matmul, mask built and applied, softmax, dropout, matmul, in the inputs' own type. [B, Hq, Sq, D].

    With `causal`, row i sees the keys up to i + offset (Problem.causal_offset). `mask` (boolean or a bias)
    and `kept`, the weights that dropout keeps, broadcast to [B, Hq, Sq, Sk]; without `kept`, torch draws
    them.
    """
    import torch

    q, k, v = qkv
    if k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(offset)
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(q.dtype)
    weights = torch.softmax(scores, dim=-1)
    if kept is not None:
        weights = weights * kept / (1 - p_dropout)
    elif p_dropout:
        weights = torch.nn.functional.dropout(weights, p_dropout)
    return torch.matmul(weights, v)


def make_reference(
    qkv: QKV,
    *,
    causal: bool,
    seed: int,
    conditions: Conditions | None = None,
    max_scores: int | None = None,
    offset: int = 0,
) -> Reference:
    """The reference of one problem, on the tensors' own device; `causal` and `offset` as in naive_attention.

    q, k and v are padded ones, [B, H, S, D], also where the problem is packed. As many pairs are checked as
    have `max_scores` (by default FULL_CHECK_SCORES) scores.
    """
    import torch

    q, k, _ = qkv
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    conditions = conditions or Conditions(shape=(*q.shape[:3], seqlen_k))
    limit = FULL_CHECK_SCORES if max_scores is None else max_scores
    if conditions.p_dropout:
        limit = min(limit, DROPOUT_CHECK_SCORES)
    num_pairs = q.shape[0] * q.shape[1]
    count = max(1, min(num_pairs, limit // (seqlen_q * seqlen_k)))
    pairs = torch.arange(count) if conditions.p_dropout else _choose_pairs(num_pairs, count, seed)
    pairs = pairs.to(q.device)
    dtype = torch.float64 if pairs.numel() * seqlen_q * seqlen_k <= FLOAT64_SCORES else torch.float32
    outs, lses, allowed, chain_errors = [], [], [], []
    block = BLOCK_SCORES[q.device.type]
    elements = max(seqlen_q, q.shape[3]) * seqlen_k  # of a pair: scores or keys, whichever are more
    for some in pairs.split(max(1, block // elements)):
        chunk = _select(qkv, some)
        exact = QKV(*(tensor.to(dtype) for tensor in chunk))
        options: dict[str, Any] = {"causal": causal, "offset": offset, **conditions.masks_of(some)}
        rows = max(1, block // (seqlen_k * some.numel()))
        out, lse = _exact_attention(exact, rows=rows, **options)
        allowed.append(1e-3 * out.abs().clamp(min=1.0) + half_ulp(out, q.dtype))
        if q.dtype is torch.bfloat16:
            spread, _ = _exact_attention(exact._replace(v=exact.v.abs()), rows=rows, **options)
            allowed[-1] += 2.0**-8 * spread
        chain = naive_attention(QKV(*(tensor.unsqueeze(0) for tensor in chunk)), **options)[0]
        missing = conditions.missing_rows_of(some)
        if missing is not None:
            lse = lse.masked_fill(missing, 0)
            out, chain = (tensor.masked_fill(missing[..., None], 0) for tensor in (out, chain))
        chain_errors.append(float((chain.to(dtype) - out).abs().max()))
        outs.append(out)
        lses.append(lse)
    out, lse, limits = torch.cat(outs), torch.cat(lses), torch.cat(allowed)
    return Reference(pairs, out, lse, limits, max(chain_errors), conditions)


def _choose_pairs(num_pairs: int, count: int, seed: int) -> torch.Tensor:
    import torch

    if count == num_pairs:
        return torch.arange(num_pairs)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_pairs, generator=generator)[:count].sort().values


def _select(qkv: QKV, pairs: torch.Tensor) -> QKV:
    """q, k, v of the given (batch, head) pairs: [P, Sq, D], [P, Sk, D], [P, Sk, D]."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    batch, head = pairs // q.shape[1], pairs % q.shape[1]
    return QKV(q[batch, head], k[batch, head // group], v[batch, head // group])


def _exact_attention(
    qkv: QKV,
    *,
    causal: bool,
    offset: int,
    rows: int,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    p_dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [P, Sq, D] and lse [P, Sq] in the type of its inputs, `rows` query rows at a time."""
    import torch

    q, k, v = qkv
    columns = torch.arange(k.shape[1], device=q.device)
    outs, lses = [], []
    for start in range(0, q.shape[1], rows):
        some = slice(start, start + rows)
        scores = torch.matmul(q[:, some], k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
        if mask is not None and mask.dtype is torch.bool:
            scores.masked_fill_(~mask[:, some], -math.inf)
        elif mask is not None:
            scores.add_(mask[:, some])
        if causal:
            row = torch.arange(start, start + scores.shape[1], device=q.device)
            scores.masked_fill_(columns > row[:, None] + offset, -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(lse[..., None]).exp_()
        if kept is not None:
            weights.mul_(kept[:, some]).div_(1 - p_dropout)
        outs.append(torch.matmul(weights, v))
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)
