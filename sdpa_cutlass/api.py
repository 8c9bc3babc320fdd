"""The public functions: arguments → plan → launch.

A call whose signature (sizes, strides, dtypes, devices, options) was seen before goes straight to its plan;
any other one is checked, brought to canonical form (see checks.py) and planned. Arrays of other libraries
are read as tensors first (see arrays.py). While torch traces, the call is an operator (see torch_ops.py).
Sources: Dao et al.,
"FlashAttention" (2022) and "FlashAttention-2" (2023) for the fused algorithm; torch's
F.scaled_dot_product_attention for the meaning.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import checks
from ._c_api import Library, library
from ._locate import Target
from .arrays import as_tensor, is_tensor
from .device import HOST, DeviceInfo, cuda_device
from .errors import ArgumentError, LibraryNotFoundError, UnsupportedError
from .plan import Plan, check_device, make_params
from .problem import Causal
from .registry import Family, KernelInfo, read_kernels
from .select import choose

if TYPE_CHECKING:
    import torch


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, forward only, in float16 and bfloat16.

    query [..., Hq, Sq, D], key and value [..., Hkv, Sk, D] → [..., Hq, Sq, D]. `is_causal` lets row i see
    keys 0..i (top_left). `scale` defaults to 1/sqrt(D). With `enable_gqa`, Hkv may be any divisor of Hq. A
    row that sees no key gives zeros.

    Raises NotImplementedError for attn_mask, dropout_p > 0, inputs that require grad and a head_dim without a
    kernel; TypeError or ValueError, naming the argument, for anything else that is not allowed.
    """
    if attn_mask is not None:
        raise UnsupportedError("attn_mask is not supported yet: masks and biases are planned for 0.2")
    if dropout_p:
        if not 0.0 <= dropout_p <= 1.0:
            raise ArgumentError(f"dropout_p={dropout_p!r}; allowed is a probability between 0 and 1")
        raise UnsupportedError(f"dropout_p={dropout_p!r} is not supported yet: dropout is planned for 0.2")
    causal = Causal.TOP_LEFT if is_causal else None
    return run(Family.FMHA_FWD, causal, scale, enable_gqa, None, False, query, key, value, None)[0]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: Causal | str | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q Kᵀ · scale + mask) V through one fused kernel.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], float16 or bfloat16, any strides → out [B, Hq, Sq,
    D], laid out as query is. Hkv divides Hq unless `enable_gqa` is False. Fewer or more leading dimensions
    work as in torch. Besides torch tensors, any array with __dlpack__, __cuda_array_interface__ or
    __array_interface__ is read in place, kinds may be mixed, and the results are torch tensors (`out` is
    returned as it was given). Under torch.autocast, float32 inputs are cast as torch would.

    causal: None, "top_left" (row i sees keys 0..i) or "bottom_right" (the last row sees every key). scale:
    any finite number; 1/sqrt(D) by default. return_lse: also return softmax_lse [B, Hq, Sq] float32,
    natural log; -inf for a row that sees no key, whose
        output is 0.
    out: write here; the last dimension contiguous, address and other strides multiples of 16 bytes, no
    memory shared
        with the inputs.
    kernel: the name of the kernel to run instead of the chosen one (see `kernels`).

    Raises TypeError, ValueError or NotImplementedError naming the argument, before anything is launched;
    LibraryNotFoundError and its kin when the native library cannot be used; LaunchError when CUDA refuses.
    """
    result = run(Family.FMHA_FWD, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)
    return result if return_lse else result[0]


def unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: Causal | str | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` through the piped baseline: CUTLASS GEMM → softmax → CUTLASS GEMM.

    Same arguments, results and errors. The logits [B, Hq, Sq, Sk] live in a
    workspace from torch's caching allocator.
    """
    result = run(Family.UNFUSED, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)
    return result if return_lse else result[0]


def kernels(target: Target | None = None) -> tuple[KernelInfo, ...]:
    """Every kernel of `target`'s library; by default of the CUDA library if it is there, else the host one.

    Raises LibraryNotFoundError when there is none, LibraryError when one is there and cannot be used.
    """
    if target is not None:
        return read_kernels(library(target))
    try:
        return read_kernels(library(Target.CUDA))
    except LibraryNotFoundError:
        return read_kernels(library(Target.HOST))


def library_for(tensor: torch.Tensor) -> tuple[Library, DeviceInfo]:
    """The library and the device that serve `tensor`. Raises LibraryError or DriverError when they cannot."""
    if tensor.device.type == "cpu":
        return library(Target.HOST), HOST
    found, device = library(Target.CUDA), cuda_device(tensor.device.index)
    check_device(found, device)
    return found, device


_MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Plan] = {}


def run(
    family: Family,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse or None): straight to the plan of a known signature, else through every check."""
    if _is_dynamo_compiling():
        from . import torch_ops

        return torch_ops.traced(family, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)
    signature: tuple[Any, ...] | None = None
    plan = None
    try:
        signature = (
            family, causal, scale, enable_gqa, kernel, return_lse,
            type(query), query.shape, query.stride(), query.dtype, query.device,
            type(key), key.shape, key.stride(), key.dtype, key.device,
            type(value), value.shape, value.stride(), value.dtype, value.device,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        )  # fmt: skip
        plan = _plans.get(signature)
        if plan is not None and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            plan = None
    except (AttributeError, TypeError, RuntimeError):
        signature = plan = None  # not tensors, or without data, or options that cannot be keys
    if plan is None:
        options = _Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _run_unplanned(options, query, key, value, out, signature)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        checks.check_no_grad({"query": query, "key": key, "value": value})
    if out is not None:
        checks.check_out(out, query, tuple(query.shape))
        checks.check_no_overlap(out, {"query": query, "key": key, "value": value})
    else:
        out = _empty_like(query)
    lse = empty_lse(query) if return_lse else None
    plan.launch(query, key, value, out, lse)
    return out, lse


class _Options(NamedTuple):
    """What a call asks for besides its tensors."""

    family: Family
    causal: Causal | str | None
    scale: float | None
    enable_gqa: bool
    kernel: str | None
    return_lse: bool


def _run_unplanned(
    options: _Options,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    signature: tuple[Any, ...] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks everything; tensors that are canonical already leave a plan for `signature` behind."""
    if not all(is_tensor(tensor) for tensor in (query, key, value)) or not (out is None or is_tensor(out)):
        q, k, v = as_tensor("query", query), as_tensor("key", key), as_tensor("value", value)
        written = None if out is None else as_tensor("out", out, writable=True)
        result, lse = run(*options, q, k, v, written)
        return result if out is None else out, lse
    if checks.is_virtual(query) or checks.is_virtual(key) or checks.is_virtual(value):
        from . import torch_ops

        return torch_ops.traced(*options, query, key, value, out)
    operands = checks.canonical_operands(
        *checks.autocast_inputs(query, key, value), enable_gqa=options.enable_gqa
    )
    problem = checks.problem_of(operands, checks.causal_alignment(options.causal))
    scale = checks.softmax_scale(options.scale, problem.head_dim)
    out4 = None
    if out is not None:
        checks.check_out(out, operands.query, operands.out_shape)
        checks.check_no_overlap(out, {"query": query, "key": key, "value": value})
        out4 = operands.canonical_out(out)
    lse = empty_lse(operands.query) if options.return_lse else None
    result = empty_out(operands.query) if out4 is None else out4
    if problem.is_empty:  # no keys, or no rows
        result.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    else:
        native, device = library_for(operands.query)
        q, k, v = (checks.aligned(tensor) for tensor in (operands.query, operands.key, operands.value))
        params = make_params(problem, scale, q, k, v, result, lse)
        choice = choose(native, problem, options.family, device, params, name=options.kernel)
        plan = Plan(native, choice.kernel, problem, params, device)
        if signature is not None and q is query and k is key and v is value:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[signature] = plan
        plan.launch(q, k, v, result, lse)
    result = operands.restore(result) if out is None else out
    return result, None if lse is None else operands.restore(lse)


def _empty_like(query: torch.Tensor) -> torch.Tensor:
    """An output laid out as torch would: query's order of dimensions, dense."""
    return sys.modules["torch"].empty_like(query)  # an import statement would cost 0.4 µs more per call


def empty_out(query: torch.Tensor) -> torch.Tensor:
    """An output for any canonical `query`: laid out as it is, but with contiguous rows."""
    out = _empty_like(query)
    if out.stride(-1) == 1:
        return out
    return sys.modules["torch"].empty(query.shape, dtype=query.dtype, device=query.device)


def empty_lse(query: torch.Tensor) -> torch.Tensor:
    """softmax_lse for a canonical `query`."""
    torch = sys.modules["torch"]
    return torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


def _find_is_dynamo_compiling() -> bool:
    """Stands in for torch's function where torch was imported after this package, until the first eager call.

    Not while tracing: compiled code depends on the global and would be compiled again.
    """
    global _is_dynamo_compiling
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    _is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    return False


_is_dynamo_compiling: Callable[[], bool] = _find_is_dynamo_compiling
if sys.modules.get("torch"):  # found now, so that code compiled before the first eager call stays valid
    _find_is_dynamo_compiling()
