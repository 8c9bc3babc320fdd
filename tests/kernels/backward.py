"""One problem for a backward kernel, running it on guarded tensors, and the rule for its gradients.

The reference is autograd through the plain formula in float64, with the very dropout mask. What the kernel
gets as `out` and `softmax_lse` is the reference's own, rounded, so that no forward kernel is needed. The rule
(per gradient g, t being autograd through the same formula in the kernel's dtype):

    max|g - ref| <= 2 · max|t - ref| + 1e-5        ‖g - ref‖ <= 1.5 · ‖t - ref‖ + 1e-6 · ‖ref‖
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sdpa_cutlass import dropout_mask
from sdpa_cutlass.call.backward import make_bwd_params
from sdpa_cutlass.call.extras import Extras
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.structs import BwdParams
from sdpa_cutlass.problem import Causal, DType, MaskType, Problem
from sdpa_cutlass.public.api import library_for
from tests.kernels.harness import INPUT_POISON, OUTPUT_POISON, SPARE_ROWS, Guarded, TestedKernel
from tests.kernels.numerics import Latest, matmul

PHILOX = PhiloxState(0x1234_5678_9ABC, 77)
_ALIGNMENT = 256
_ROOM = 1024  # poisoned bytes around a workspace
_MASK_TYPES = {
    torch.bool: MaskType.BOOL, torch.float16: MaskType.F16, torch.bfloat16: MaskType.BF16,
    torch.float32: MaskType.F32,
}  # fmt: skip
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Needs = tuple[bool, bool, bool]
ALL: Needs = (True, True, True)
NONE: Needs = (False, False, False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem by its sizes and options. `mask` broadcasts to [B, Hq, Sq, Sk]."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int = 0  # head_dim when 0
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    causal: Causal | None = None
    window: tuple[int, int] | None = None
    scale: float | None = None
    p_dropout: float = 0.0
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    with_dlse: bool = False
    bshd: bool = False
    seed: int = 0

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def bias(self) -> torch.Tensor | None:
        """The mask, if it is added."""
        return None if self.mask is None or self.mask.dtype is torch.bool else self.mask

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def seen(self) -> torch.Tensor:
        """[B, Hq, Sq, Sk]: which key is seen by which row."""
        shape = (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        seen = torch.ones(shape, dtype=torch.bool)
        row, key = torch.arange(self.seqlen_q)[:, None], torch.arange(self.seqlen_k)
        for b in range(self.batch):
            rows = self.seqlen_q if self.seqlens_q is None else self.seqlens_q[b]
            keys = self.seqlen_k if self.seqlens_k is None else self.seqlens_k[b]
            is_bottom_right = self.causal is Causal.BOTTOM_RIGHT or (
                self.causal is None and self.window is not None
            )
            own = row + (keys - rows if is_bottom_right else 0)
            counts = (row < rows) & (key < keys)
            if self.causal is not None:
                counts &= key <= own
            if self.window is not None:
                left, right = self.window
                if left >= 0:
                    counts &= key >= own - left
                if right >= 0:
                    counts &= key <= own + right
            seen[b] &= counts
        if self.mask is not None and self.mask.dtype is torch.bool:
            seen &= self.mask
        return seen


class Operands(NamedTuple):
    """What the kernel reads, on the CPU: [B, H, S, D] of the kernel's dtype; dlse is float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


def operands(case: Case, dtype: torch.dtype) -> Operands:
    """Seeded normal values."""
    draw = torch.Generator().manual_seed(case.seed + 1009 * case.seqlen_q + case.seqlen_k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    q = normal(case.batch, case.heads, case.seqlen_q, case.head_dim)
    k = normal(case.batch, case.heads_kv, case.seqlen_k, case.head_dim)
    v = normal(case.batch, case.heads_kv, case.seqlen_k, case.width_v)
    dout = normal(case.batch, case.heads, case.seqlen_q, case.width_v)
    dlse = normal(case.batch, case.heads, case.seqlen_q)
    return Operands(q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype), dlse)


class Reference(NamedTuple):
    """softmax_lse is -inf in rows without keys."""

    out: torch.Tensor
    softmax_lse: torch.Tensor
    gradients: Gradients
    dbias: torch.Tensor | None  # like a mask that is added


def reference(case: Case, given: Operands, dtype: torch.dtype) -> Reference:
    """Autograd through the plain formula in `dtype`."""
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in given[:3])
    ratio = case.heads // case.heads_kv
    scores = matmul(q, k.repeat_interleave(ratio, 1).transpose(-1, -2)) * case.factor
    bias, seen = case.bias, case.seen()
    if bias is not None:
        seen = seen & (bias != -math.inf)
        bias = bias.detach().to(dtype, copy=True).requires_grad_()
        scores = scores + bias
    is_there = seen.any(-1, keepdim=True)
    scores = torch.where(is_there, scores.masked_fill(~seen, -math.inf), 0)
    if case.sinks is not None:
        column = case.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        lse = torch.logsumexp(torch.cat((scores, column), -1), -1)
    else:
        probabilities, lse = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    probabilities = torch.where(is_there, probabilities, 0)
    if case.p_dropout:
        keep = dropout_mask(*scores.shape, case.p_dropout, PHILOX)
        probabilities = probabilities * torch.as_tensor(keep).to(dtype) / (1 - case.p_dropout)
    out = matmul(probabilities, v.repeat_interleave(ratio, 1))
    total = (out * given.dout.to(dtype)).sum()
    if case.with_dlse:
        total = total + (torch.where(is_there[..., 0], lse, 0) * given.dlse.to(dtype)).sum()
    gradients = torch.autograd.grad(total, (q, k, v) if bias is None else (q, k, v, bias))
    empty = -math.inf
    if case.sinks is not None:
        empty = case.sinks.to(dtype)[None, :, None].expand(lse.shape)
    lse = torch.where(is_there[..., 0], lse.detach(), torch.as_tensor(empty, dtype=dtype))
    dbias = None if bias is None else gradients[3]
    return Reference(out.detach(), lse, (gradients[0], gradients[1], gradients[2]), dbias)


known_reference = Latest(lambda case, given: reference(case, given, torch.float64))


def violations(
    case: Case, given: Operands, gradients: Gradients, dtype: torch.dtype, *, few_keys: bool = False
) -> list[str]:
    """What of the rule does not hold, in words. `few_keys`: rows may see so few that dS is what is left of
    P (dP - delta), so that the rounding of delta's `out`, which torch's math does not have, counts too, and
    that of a single element of P and dS is not averaged out.
    """
    known = known_reference(case, given)
    exact, plain = known.gradients, reference(case, given, dtype).gradients
    eps = torch.finfo(dtype).eps
    # delta is that of a rounded out. Rows of one key have dS = 0, which torch finds without it.
    of_delta = (known.out * given.dout.double()).abs().sum(-1).max().item() * eps / 2 * abs(case.factor)
    of_delta *= max(given.q.abs().max().item(), given.k.abs().max().item())
    found = []
    for name, grad, ref, other in zip(("dq", "dk", "dv"), gradients, exact, plain, strict=True):
        grad = grad.cpu().double()
        error, bound = (grad - ref).abs().max().item(), 2 * (other - ref).abs().max().item() + 1e-5
        norm, limit = (grad - ref).norm().item(), 1.5 * (other - ref).norm().item() + 1e-6 * ref.norm().item()
        if few_keys or (case.p_dropout and case.causal is not None):  # the first rows see one key
            bound += of_delta
        if few_keys:
            bound += eps / 2 * ref.abs().max().item()
            limit += eps / 2 * ref.norm().item() + of_delta * math.sqrt(ref.numel())
        if torch.equal(other.double(), ref):  # where torch is exact, two units in the last place
            bound += 2 * eps * ref.abs().max().item() + of_delta
            limit = bound * math.sqrt(ref.numel())
        if not error <= bound:
            found.append(f"{name}: (a) max error {error:.3g} is more than {bound:.3g}")
        if not norm <= limit:
            found.append(f"{name}: (b) norm of the error {norm:.3g} is more than {limit:.3g}")
    return found


def bias_violations(
    case: Case, given: Operands, dbias: torch.Tensor, dtype: torch.dtype, *, few_keys: bool = False
) -> list[str]:
    """`violations` of the gradient of case.bias, which is rounded to that one's dtype."""
    known = known_reference(case, given)
    ref, plain = known.dbias, reference(case, given, dtype).dbias
    assert ref is not None
    assert plain is not None
    assert (dbias.shape, dbias.dtype) == (ref.shape, case.bias.dtype)  # type: ignore[union-attr]
    grad, other = dbias.cpu().double(), plain.double()
    # Of a row, by the rounding of delta's `out`, whose sign differs among the rows that share an element.
    of_row = (known.out * given.dout.double()).abs().sum(-1).max().item() * torch.finfo(dtype).eps / 2
    of_delta = of_row * math.sqrt(case.batch * case.heads * case.seqlen_q / math.prod(ref.shape[:3]))
    rounding = torch.finfo(dbias.dtype).eps / 2
    bound = 2 * (other - ref).abs().max().item() + 1e-5 + rounding * ref.abs().max().item()
    limit = 1.5 * (other - ref).norm().item() + (1e-6 + rounding) * ref.norm().item()
    if few_keys or ref.shape[-1] == 1 or torch.equal(other, ref):
        bound += of_delta
        limit += of_delta * math.sqrt(ref.numel())
    error, norm = (grad - ref).abs().max().item(), (grad - ref).norm().item()
    found = []
    if not error <= bound:
        found.append(f"dbias: (a) max error {error:.3g} is more than {bound:.3g}")
    if not norm <= limit:
        found.append(f"dbias: (b) norm of the error {norm:.3g} is more than {limit:.3g}")
    return found


@dataclass
class Launch:
    """Guarded tensors of one launch, and the C struct."""

    params: BwdParams
    inputs: tuple[torch.Tensor, ...]  # q, k, v, dout and out
    grads: tuple[Guarded, Guarded, Guarded]
    dbias: Guarded | None
    workspace: torch.Tensor
    kept: list[object] = field(default_factory=list)  # what the struct points to


def prepare(
    kernel: TestedKernel, case: Case, given: Operands, needs: Needs = ALL, *, needs_dbias: bool = False
) -> Launch:
    """The struct with every tensor in guarded memory. case.bias has four dimensions for its gradient."""
    known = known_reference(case, given)
    dtype = kernel.dtype

    def guarded(tensor: torch.Tensor) -> torch.Tensor:
        found = Guarded(
            tuple(tensor.shape), dtype, kernel.device, poison=INPUT_POISON[dtype], spare_rows=SPARE_ROWS,
            bshd=case.bshd,
        )  # fmt: skip
        found.tensor.copy_(tensor)
        return found.tensor

    q, k, v, dout = (guarded(tensor) for tensor in given[:4])
    out = guarded(known.out.to(dtype))
    lse = known.softmax_lse.float().contiguous().to(kernel.device)
    grads = tuple(
        Guarded(
            tuple(like.shape), dtype, kernel.device, poison=OUTPUT_POISON[dtype], spare_rows=SPARE_ROWS,
            bshd=case.bshd,
        )
        for like in (q, k, v)
    )  # fmt: skip
    mask = None
    if case.mask is not None:
        shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        mask = case.mask.to(kernel.device).expand(shape)

    def lengths(values: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=kernel.device)

    extras = Extras(
        mask, case.p_dropout, PHILOX if case.p_dropout else None, lengths(case.seqlens_q),
        lengths(case.seqlens_k), sinks=None if case.sinks is None else case.sinks.to(kernel.device),
    )  # fmt: skip
    problem = Problem(
        dtype=DType.F16 if dtype is torch.float16 else DType.BF16, batch=case.batch, num_heads_q=case.heads,
        num_heads_kv=case.heads_kv, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, head_dim=case.head_dim,
        head_dim_v=case.width_v, causal=case.causal,
        mask=None if mask is None else _MASK_TYPES[mask.dtype], has_dropout=case.p_dropout > 0,
        has_lengths=extras.has_lengths, window=case.window, has_sinks=case.sinks is not None,
    )  # fmt: skip
    forward = make_params(problem, case.factor, q, k, v, out, lse, extras)
    dlse = given.dlse.to(kernel.device) if case.with_dlse else None
    asked = tuple(grad.tensor if needed else None for grad, needed in zip(grads, needs, strict=True))
    dbias = None
    if needs_dbias:
        assert case.bias is not None
        dbias = Guarded(
            tuple(case.bias.shape), case.bias.dtype, kernel.device, poison=OUTPUT_POISON[case.bias.dtype],
            spare_rows=SPARE_ROWS, spare_columns=3,
        )  # fmt: skip
    of_mask = None if dbias is None else dbias.tensor
    params = make_bwd_params(forward, dout, dlse, (*asked, of_mask))  # type: ignore[arg-type]
    size = kernel.library.backward_workspace_bytes(kernel.info.index, params)
    workspace = torch.full((size + _ALIGNMENT + 2 * _ROOM,), 0xFF, dtype=torch.uint8, device=kernel.device)
    first = workspace.data_ptr() + _ROOM
    params.forward.workspace = first + -first % _ALIGNMENT
    params.forward.workspace_bytes = size
    inputs = (q, k, v, dout, out)
    kept: list[object] = [lse, dlse, extras]
    return Launch(params, inputs, grads, dbias, workspace, kept)  # type: ignore[arg-type]


def run(kernel: TestedKernel, case: Case, given: Operands | None = None) -> Gradients:
    """dq, dk and dv of this very kernel. Fails when it writes outside them or not all of them."""
    given = operands(case, kernel.dtype) if given is None else given
    launch = prepare(kernel, case, given)
    execute(kernel, launch)
    for name, grad in zip(("dq", "dk", "dv"), launch.grads, strict=True):
        grad.check_untouched(name)
        grad.check_written(name)
    _check_around_workspace(launch)
    dq, dk, dv = (grad.tensor for grad in launch.grads)
    return dq, dk, dv


def run_bias(
    kernel: TestedKernel, case: Case, given: Operands | None = None, needs: Needs = NONE
) -> torch.Tensor:
    """dbias of this very kernel, next to what `needs` says. Fails as `run` does."""
    given = operands(case, kernel.dtype) if given is None else given
    launch = prepare(kernel, case, given, needs, needs_dbias=True)
    execute(kernel, launch)
    assert launch.dbias is not None
    launch.dbias.check_untouched("dbias")
    launch.dbias.check_written("dbias")
    _check_around_workspace(launch)
    return launch.dbias.tensor


def _check_around_workspace(launch: Launch) -> None:
    first = launch.params.forward.workspace - launch.workspace.data_ptr()
    last = first + launch.params.forward.workspace_bytes
    around = torch.cat((launch.workspace[:first], launch.workspace[last:]))
    assert (around == 0xFF).all(), "bytes around the workspace were written"


def execute(kernel: TestedKernel, launch: Launch) -> None:
    """Launches and waits."""
    assert launch.params.struct_size == ctypes.sizeof(BwdParams)
    _, device = library_for(torch.empty(0, device=kernel.device))
    stream = torch.cuda.current_stream().cuda_stream if kernel.device == "cuda" else None
    kernel.library.launch_backward(kernel.info.index, launch.params, device.index, stream)
    if kernel.device == "cuda":
        torch.cuda.synchronize()


def check(kernel: TestedKernel, case: Case) -> Gradients:
    """Runs, and applies the rule."""
    given = operands(case, kernel.dtype)
    gradients = run(kernel, case, given)
    assert not (broken := violations(case, given, gradients, kernel.dtype)), broken
    return gradients


def check_bias(kernel: TestedKernel, case: Case, *, few_keys: bool = False) -> torch.Tensor:
    """Runs, and applies the rule to dbias."""
    given = operands(case, kernel.dtype)
    dbias = run_bias(kernel, case, given)
    broken = bias_violations(case, given, dbias, kernel.dtype, few_keys=few_keys)
    assert not broken, broken
    return dbias
