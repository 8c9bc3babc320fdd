"""How wrong an output is: the float32-or-better reference, the errors against it and their bounds.

    ref = softmax(Q Kᵀ / sqrt(D)) V [pairs, Sq, D],  lse = log Σ exp(Q Kᵀ / sqrt(D)) [pairs, Sq]

The reference is computed in blocks of (batch, head) pairs and query rows, so that its scores never fill the
memory. Problems with more scores than FULL_CHECK_SCORES are checked on some pairs only, drawn with the
run's seed.

The bounds, all of which must hold, are
  whole tensor     max|out - ref| <= 2 max|chain - ref| + 1e-5, chain = naive_attention in the input type
  every element    |out - ref| <= 1e-3 max(1, |ref|) + half a unit in the last place of the output at ref
  log-sum-exp      |lse - ref| <= 1e-4
A bfloat16 element is allowed 2^-8 Σ p |v| more, the most that rounding P to the type of the product can cost.
The piped baseline keeps its logits in float16, as any such pipeline does, so the second does not apply to it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from sdpa_cutlass.cli.inputs import QKV

if TYPE_CHECKING:
    import torch

FULL_CHECK_SCORES = 2**33
FLOAT64_SCORES = 2**29
BLOCK_SCORES = {"cuda": 2**28, "cpu": 2**22}
LSE_BOUND = 1e-4
MANTISSA_AND_MIN_EXPONENT = {"float16": (10, -14), "bfloat16": (7, -126)}


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of one output, and why they are too large (None: they are not)."""

    max_err_out: float
    max_err_lse: float | None
    violation: str | None


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right answer for some (batch, head) pairs of a problem, and how far the plain chain is from it."""

    pairs: torch.Tensor  # int64 [P], index into batch * num_heads_q
    out: torch.Tensor  # [P, Sq, D]
    lse: torch.Tensor  # [P, Sq]
    allowed: torch.Tensor  # [P, Sq, D], largest error of each element of the output
    chain_error: float

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, *, every_element: bool = True) -> Errors:
        """Errors of `out` [B, H, Sq, D] and `lse` [B, H, Sq] (None: not checked).

        `every_element` says whether the second bound applies.
        """
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
            max_err_lse = float((found - self.lse).abs().masked_fill(found == self.lse, 0).max())
            if not max_err_lse <= LSE_BOUND:
                violations.append(f"max error of LSE {max_err_lse:.3g} > {LSE_BOUND:g}")
        return Errors(max_err_out, max_err_lse, "; ".join(violations) or None)


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between the neighbours of `value` in `dtype` (float16 or bfloat16)."""
    import torch

    mantissa, min_exponent = MANTISSA_AND_MIN_EXPONENT[str(dtype).removeprefix("torch.")]
    exponent = torch.frexp(value.abs().clamp(min=2.0**min_exponent))[1] - 1
    return torch.exp2(exponent.to(value.dtype) - (mantissa + 1))


def naive_attention(qkv: QKV, *, causal: bool) -> torch.Tensor:
    """matmul, mask built and applied, softmax, matmul, all in the inputs' own type. [B, Hq, Sq, D]."""
    import torch

    q, k, v = qkv
    if k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def make_reference(qkv: QKV, *, causal: bool, seed: int) -> Reference:
    """The reference of one problem (causal: top_left alignment), on the tensors' own device."""
    import torch

    q, k, _ = qkv
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    pairs = _choose_pairs(q.shape[0] * q.shape[1], seqlen_q * seqlen_k, seed).to(q.device)
    dtype = torch.float64 if pairs.numel() * seqlen_q * seqlen_k <= FLOAT64_SCORES else torch.float32
    outs, lses, allowed, chain_errors = [], [], [], []
    block = BLOCK_SCORES[q.device.type]
    for some in pairs.split(max(1, block // (seqlen_q * seqlen_k))):
        chunk = _select(qkv, some)
        exact = QKV(*(tensor.to(dtype) for tensor in chunk))
        rows = max(1, block // (seqlen_k * some.numel()))
        out, lse = _exact_attention(exact, causal=causal, rows=rows)
        allowed.append(1e-3 * out.abs().clamp(min=1.0) + half_ulp(out, q.dtype))
        if q.dtype is torch.bfloat16:
            spread, _ = _exact_attention(exact._replace(v=exact.v.abs()), causal=causal, rows=rows)
            allowed[-1] += 2.0**-8 * spread
        chain = naive_attention(QKV(*(tensor.unsqueeze(0) for tensor in chunk)), causal=causal)[0]
        chain_errors.append(float((chain.to(dtype) - out).abs().max()))
        outs.append(out)
        lses.append(lse)
    return Reference(pairs, torch.cat(outs), torch.cat(lses), torch.cat(allowed), max(chain_errors))


def _choose_pairs(num_pairs: int, scores_per_pair: int, seed: int) -> torch.Tensor:
    import torch

    count = max(1, min(num_pairs, FULL_CHECK_SCORES // scores_per_pair))
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


def _exact_attention(qkv: QKV, *, causal: bool, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out [P, Sq, D] and lse [P, Sq] in the type of its inputs, `rows` query rows at a time."""
    import torch

    q, k, v = qkv
    columns = torch.arange(k.shape[1], device=q.device)
    outs, lses = [], []
    for start in range(0, q.shape[1], rows):
        scores = torch.matmul(q[:, start : start + rows], k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
        if causal:
            row = torch.arange(start, start + scores.shape[1], device=q.device)
            scores.masked_fill_(columns > row[:, None], -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(torch.matmul(scores.sub_(lse[..., None]).exp_(), v))
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)
