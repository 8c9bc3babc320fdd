"""Gradients of one call: what the forward was given and what it gave → dq, dk, dv and dbias.

    dV = (M ∘ P)ᵀ dO / p_keep      dS = P ∘ (M ∘ (dO Vᵀ) / p_keep - rowsum(dO ∘ O) + dLSE)
    dQ = scale · dS K              dK = scale · dSᵀ Q              dbias = dS, of a mask that is added

Source of the method: Dao et al., "FlashAttention" (2022). Nothing here is differentiated by torch: see
integrations/torch_autograd.py. Gradients have the shapes of the inputs as the caller gave them, and their
strides where those are dense. Where an input was broadcast, its gradient is summed. That of a bias is summed
by its kernel, in float32: it is as large as the bias, and contiguous.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choice.backward import choose_backward, legal_kernels, why_none
from ..errors import ArgumentError, UnsupportedError
from ..library.device import stream_getter
from ..library.locate import Target
from ..library.registry import mask_code
from ..library.structs import BwdParams
from .binding import Bound
from .extras import MASK_TYPES
from .launch import library_for, make_params, make_workspace
from .operands import dtype_name, loadable

if TYPE_CHECKING:
    import torch

Tensors = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None"]
Needs = tuple[bool, bool, bool, bool]
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class Results(NamedTuple):
    """What the forward gave, and the gradients of it; `dlse` is None where nobody used softmax_lse."""

    out: torch.Tensor
    softmax_lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


def check_served(bound: Bound) -> None:
    """Raises UnsupportedError where no kernel makes the gradients of this call. Launches nothing."""
    problem = bound.problem
    if problem.is_empty or bound.drops_everything:
        return
    library, device = library_for(bound.operands.query)
    if not legal_kernels(library, problem, device):
        raise UnsupportedError(
            f"an input requires grad, and no backward kernel can run {problem}: "
            f"{why_none(library, problem, device)}. Call it under torch.no_grad() or detach the inputs"
        )


def gradients(
    bound: Bound,
    likes: Tensors,
    results: Results,
    philox: Any,
    needs: Needs,
    kernel: str | None = None,
) -> Gradients:
    """The gradients of query, key, value and attn_mask; None where `needs` does not ask for one.

    `bound` is the forward's call, `likes` are these four as the caller gave them, and `philox` is what the
    forward used. `kernel` names one instead of the chosen one. Raises the package's errors.
    """
    grads = _empty_gradients(bound, likes, needs)
    is_computed = not (bound.problem.is_empty or bound.drops_everything)
    if not is_computed or bound.given.cu_seqlens_q is not None:  # rows of no sequence
        for grad in grads:
            if grad is not None:
                grad.zero_()
    if is_computed:
        _launch(bound, results, philox, grads, kernel)
    return _as_given(bound, likes, grads)


def empty_gradients(bound: Bound, likes: Tensors, needs: Needs) -> Gradients:
    """What `gradients` returns, without values: tracing comes here."""
    return _as_given(bound, likes, _empty_gradients(bound, likes, needs))


def _empty_gradients(bound: Bound, likes: Tensors, needs: Needs) -> Gradients:
    """Canonical, and as wide as kernels write them."""
    operands = bound.operands
    query, key, value = (
        _empty_like(tensor) if needed else None
        for tensor, needed in zip((operands.query, operands.key, operands.value), needs[:3], strict=True)
    )
    return query, key, value, _empty_dbias(bound, likes[3]) if needs[3] else None


def _empty_dbias(bound: Bound, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, Hq, Sq, Sk] with 1 for what `mask`, as the caller gave it, has one of or lacks.

    float32 where some of several batch dimensions are broadcast and others are not: kernels sum over all of
    the batch or nothing of it, and the rest is summed afterwards.
    """
    if mask is None:
        raise ArgumentError("needs asks for the gradient of attn_mask, and attn_mask is None")
    if not mask.is_floating_point():
        raise ArgumentError(f"needs asks for the gradient of attn_mask, whose dtype is {mask.dtype}")
    batch, own = _own_sizes(bound, mask)
    has_batch = any(size != 1 for size in batch)
    is_mixed = has_batch and math.prod(batch) != math.prod(bound.operands.batch_shape)
    torch = sys.modules["torch"]
    shape = (math.prod(bound.operands.batch_shape) if has_batch else 1, *own)
    return mask.new_empty(shape, dtype=torch.float32 if is_mixed else mask.dtype)


def _own_sizes(bound: Bound, mask: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `mask` has of the batch dimensions, and of heads, rows and keys: 1 for those that it lacks."""
    count = len(bound.operands.batch_shape) + 3
    shape = (1,) * (count - mask.dim()) + tuple(mask.shape)
    return shape[:-3], shape[-3:]


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D up to a multiple of 8], laid out as `tensor` where that is dense and last in D."""
    head_dim = tensor.shape[3]
    if head_dim > 0 and head_dim % 8 == 0:
        like = sys.modules["torch"].empty_like(tensor)
        if like.stride(3) == 1:
            return like
    return tensor.new_empty((*tensor.shape[:3], max(-(-head_dim // 8) * 8, 8)))


def _as_given(bound: Bound, likes: Tensors, grads: Gradients) -> Gradients:
    """Canonical gradients in the shapes of the inputs."""
    operands = bound.operands

    def restored(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        if grad is None:
            return None
        grad = grad[..., : like.shape[-1]]
        if operands.rank > 4:
            grad = grad.reshape(*operands.batch_shape, *grad.shape[1:])
        grad = operands.layout.swapped(grad)
        if grad.dim() > like.dim():
            leading = tuple(range(grad.dim() - like.dim()))
            is_broadcast = any(size != 1 for size in grad.shape[: len(leading)])
            grad = grad.sum(leading) if is_broadcast else grad[(0,) * len(leading)]
        return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)

    query, key, value = (restored(*pair) for pair in zip(grads[:3], likes[:3], strict=True))
    return query, key, value, _dbias_as_given(bound, likes[3], grads[3])


def _dbias_as_given(
    bound: Bound, mask: torch.Tensor | None, dbias: torch.Tensor | None
) -> torch.Tensor | None:
    if mask is None or dbias is None:
        return None
    batch, own = _own_sizes(bound, mask)
    if dbias.shape[0] != math.prod(batch):
        dbias = dbias.reshape(*bound.operands.batch_shape, *own).sum_to_size((*batch, *own))
    return dbias.to(mask.dtype).reshape(mask.shape)


def _launch(bound: Bound, results: Results, philox: Any, grads: Gradients, name: str | None) -> None:
    operands, problem, scale, given, _ = bound
    torch = sys.modules["torch"]
    q, k, v = map(loadable, operands[:3])
    out, dout = (loadable(_canonical(bound, tensor)) for tensor in (results.out, results.dout))
    lse_shape = operands.query.shape[:3]
    lse = results.softmax_lse.reshape(lse_shape).contiguous()
    dlse = None if results.dlse is None else results.dlse.reshape(lse_shape).to(torch.float32).contiguous()
    if given.p_dropout:
        given = given._replace(philox=philox)
    forward = make_params(problem, scale, q, k, v, out, lse, given)
    params = make_bwd_params(forward, dout, dlse, grads)
    library, device = library_for(q)
    kernel = choose_backward(library, problem, device, params, name=name)
    size = library.backward_workspace_bytes(kernel.index, params)
    stream = stream_getter()(device.index) if device.target is Target.CUDA else None
    workspace, params.forward.workspace = make_workspace(size, q.device, stream or 0)
    params.forward.workspace_bytes = size
    library.launch_backward(kernel.index, params, device.index, stream)
    del workspace  # torch's allocator reuses it in stream order


def _canonical(bound: Bound, tensor: torch.Tensor) -> torch.Tensor:
    """out or its gradient as the caller sees it, [B, Hq, Sq, Dv]."""
    operands = bound.operands
    if operands.rank <= 4:
        return operands.canonical_out(tensor)
    merged = tensor.reshape(math.prod(operands.batch_shape), *tensor.shape[-3:])
    return operands.layout.swapped(merged)


def make_bwd_params(
    forward: object, dout: torch.Tensor, dlse: torch.Tensor | None, grads: Gradients
) -> BwdParams:
    """The C struct, without a workspace. `dlse` has the strides of the softmax_lse in `forward`."""
    params = BwdParams(
        struct_size=ctypes.sizeof(BwdParams),
        forward=forward,
        dout=dout.data_ptr(),
        dlse=None if dlse is None else dlse.data_ptr(),
        dout_stride=dout.stride()[:3],
    )
    for name, grad in zip(("dq", "dk", "dv"), grads[:3], strict=True):
        if grad is not None:
            setattr(params, name, grad.data_ptr())
            setattr(params, f"{name}_stride", grad.stride()[:3])
    dbias = grads[3]
    if dbias is not None:  # what it has one of is summed over
        pairs = zip(dbias.shape, dbias.stride(), strict=True)
        params.dbias, params.dbias_stride = (
            dbias.data_ptr(),
            tuple(stride * (size != 1) for size, stride in pairs),
        )
        params.dbias_type = mask_code(MASK_TYPES[dtype_name(dbias)])
    return params
