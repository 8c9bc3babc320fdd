"""Gradients of one call: what the forward was given and what it gave → dq, dk and dv.

    dV = (M ∘ P)ᵀ dO / p_keep      dS = P ∘ (M ∘ (dO Vᵀ) / p_keep - rowsum(dO ∘ O) + dLSE)
    dQ = scale · dS K              dK = scale · dSᵀ Q

Source of the method: Dao et al., "FlashAttention" (2022). Nothing here is differentiated by torch: see
integrations/torch_autograd.py. Gradients have the shapes of the inputs as the caller gave them, and their
strides where those are dense. Where an input was broadcast, its gradient is summed.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choice.backward import choose_backward, legal_kernels, why_none
from ..errors import UnsupportedError
from ..library.device import stream_getter
from ..library.locate import Target
from ..library.structs import BwdParams
from .binding import Bound
from .launch import library_for, make_params, make_workspace
from .operands import loadable

if TYPE_CHECKING:
    import torch

Tensors = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


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
    needs: tuple[bool, bool, bool],
    kernel: str | None = None,
) -> Gradients:
    """The gradients of query, key and value; None where `needs` does not ask for one.

    `bound` is the forward's call, `likes` are query, key and value as the caller gave them, and `philox` is
    what the forward used. `kernel` names one instead of the chosen one. Raises the package's errors.
    """
    grads = _empty_gradients(bound, needs)
    is_computed = not (bound.problem.is_empty or bound.drops_everything)
    if not is_computed or bound.given.cu_seqlens_q is not None:  # rows of no sequence
        for grad in grads:
            if grad is not None:
                grad.zero_()
    if is_computed:
        _launch(bound, results, philox, grads, kernel)
    return _as_given(bound, likes, grads)


def empty_gradients(bound: Bound, likes: Tensors, needs: tuple[bool, bool, bool]) -> Gradients:
    """What `gradients` returns, without values: tracing comes here."""
    return _as_given(bound, likes, _empty_gradients(bound, needs))


def _empty_gradients(bound: Bound, needs: tuple[bool, bool, bool]) -> Gradients:
    """Canonical, and as wide as kernels write them."""
    operands = bound.operands
    query, key, value = (
        _empty_like(tensor) if needed else None
        for tensor, needed in zip((operands.query, operands.key, operands.value), needs, strict=True)
    )
    return query, key, value


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

    query, key, value = (restored(*pair) for pair in zip(grads, likes, strict=True))
    return query, key, value


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
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if grad is not None:
            setattr(params, name, grad.data_ptr())
            setattr(params, f"{name}_stride", grad.stride()[:3])
    return params
