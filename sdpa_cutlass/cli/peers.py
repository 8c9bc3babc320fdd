"""Other libraries of attention, where they are installed: bound through their documented functions.

    flash_attn     FlashAttention 2: flash_attn.flash_attn_func, flash_attn_varlen_func
    flash_attn_3   FlashAttention 3: flash_attn_interface, as its `hopper` folder installs it
    flash_attn_4   FlashAttention 4: flash_attn.cute
    xformers       xformers.ops.memory_efficient_attention_forward
    flashinfer     the ragged prefill wrapper; for one query the paged decode wrapper
    sageattention  sageattention.sageattn, which quantises Q, K and V to 8 bits as part of the call

None of them is needed, and none is imported before it is asked for. What a library needs before its calls (a
layout, a plan, pages) is made when it is bound and not timed; views cost nothing and are taken as they are.
What it cannot do, it refuses: by its own exception, or here where it would compute something else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sdpa_cutlass.cli.environment import package_version
from sdpa_cutlass.cli.inputs import QKV
from sdpa_cutlass.cli.providers import Call, Operands, Provider, is_aligned_right
from sdpa_cutlass.cli.results import PEERS
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.problem import Causal

if TYPE_CHECKING:
    import torch

PAGE = 16  # keys of a page: divides every length of the suites that have one query
WORKSPACE_BYTES = 2**27  # what FlashInfer's documentation recommends


def _refuse_masks(case: Case, operands: Operands, *, packed: bool = False, dropout: bool = False) -> None:
    """Raises for what the library is not known to do."""
    if case.mask != "none" and not (packed and operands.packed is not None):
        raise NotImplementedError("takes no such mask or lengths" + (" but packed ones" if packed else ""))
    if case.p_dropout and not dropout:
        raise NotImplementedError("has no dropout in these functions")


def _refuse_alignment(case: Case, alignment: Causal) -> None:
    """Raises when the library's causal mask is aligned otherwise than the problem's."""
    if case.causal and case.seqlen_q != case.seqlen_k and case.alignment is not alignment:
        raise NotImplementedError(f"its causal masks are {alignment.value} only")


def _heads_last(qkv: QKV) -> tuple[torch.Tensor, ...]:
    """[B, H, S, D] → [B, S, H, D], as views."""
    return tuple(tensor.transpose(1, 2) for tensor in qkv)


def _first(result: Any) -> torch.Tensor:
    """The output, where a function also returns its log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result


def _bind_flash(module: str, case: Case, operands: Operands) -> Call:
    functions = importlib.import_module(module)
    has_dropout = module == "flash_attn"
    _refuse_masks(case, operands, packed=True, dropout=has_dropout)
    _refuse_alignment(case, Causal.BOTTOM_RIGHT)
    options: dict[str, Any] = {"causal": case.causal}
    if case.p_dropout:
        options["dropout_p"] = case.p_dropout
    if operands.packed is not None:
        starts = operands.conditions.cu_seqlens
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        packed, varlen = operands.packed, functions.flash_attn_varlen_func
        return lambda: _first(varlen(*packed, **options))
    views, function = _heads_last(operands.qkv), functions.flash_attn_func
    return lambda: _first(function(*views, **options)).transpose(1, 2)


def _bind_xformers(case: Case, operands: Operands) -> Call:
    ops: Any = importlib.import_module("xformers.ops")
    biases: Any = importlib.import_module("xformers.ops.fmha.attn_bias")
    _refuse_masks(case, operands, packed=True, dropout=True)
    function = ops.memory_efficient_attention_forward
    if operands.packed is not None:
        assert operands.conditions.cu_seqlens is not None
        bias = biases.BlockDiagonalMask.from_seqlens(operands.conditions.cu_seqlens.diff().tolist())
        bias = bias.make_causal() if case.causal else bias
        tensors = [tensor.unsqueeze(0) for tensor in operands.packed]
        return lambda: function(*tensors, attn_bias=bias, p=case.p_dropout).squeeze(0)
    bias = None
    if case.causal:
        right = is_aligned_right(case)
        bias = biases.LowerTriangularFromBottomRightMask() if right else biases.LowerTriangularMask()
    q, k, v = _heads_last(operands.qkv)
    if case.num_heads_kv == case.num_heads_q:
        return lambda: function(q, k, v, attn_bias=bias, p=case.p_dropout).transpose(1, 2)
    # Grouped heads are a dimension of their own: [B, S, groups, heads of a group, D].
    sizes = (case.num_heads_kv, case.num_heads_q // case.num_heads_kv)
    q = q.unflatten(2, sizes)
    k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, sizes[1], -1) for tensor in (k, v))
    return lambda: function(q, k, v, attn_bias=bias, p=case.p_dropout).flatten(2, 3).transpose(1, 2)


def _bind_flashinfer(case: Case, operands: Operands) -> Call:
    module = importlib.import_module("flashinfer")
    _refuse_masks(case, operands, packed=True)
    _refuse_alignment(case, Causal.BOTTOM_RIGHT)
    if case.seqlen_q == 1 and case.seqlen_k % PAGE == 0 and operands.packed is None:
        return _bind_flashinfer_decode(module, case, operands)
    import torch

    q = operands.qkv.q
    heads = (case.num_heads_q, case.num_heads_kv, case.head_dim)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q), "NHD")
    options: dict[str, Any] = {"causal": case.causal, "q_data_type": q.dtype}
    if operands.packed is not None:
        starts, packed = operands.conditions.cu_seqlens, operands.packed
        wrapper.plan(starts, starts, *heads, **options)
        return lambda: wrapper.run(*packed)
    numbers = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(numbers * case.seqlen_q, numbers * case.seqlen_k, *heads, **options)
    rows = [view.flatten(0, 1) for view in _heads_last(operands.qkv)]  # [B, H, S, D] → [B·S, H, D]
    return lambda: wrapper.run(*rows).unflatten(0, (case.batch, case.seqlen_q)).transpose(1, 2)


def _bind_flashinfer_decode(module: Any, case: Case, operands: Operands) -> Call:
    import torch

    qkv = operands.qkv
    device, pages = qkv.q.device, case.seqlen_k // PAGE
    first = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * pages
    indices = torch.arange(case.batch * pages, dtype=torch.int32, device=device)
    last = torch.full((case.batch,), PAGE, dtype=torch.int32, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(qkv.q), "NHD", use_tensor_cores=case.num_heads_q > case.num_heads_kv
    )
    heads = (case.num_heads_q, case.num_heads_kv, case.head_dim)
    wrapper.plan(first, indices, last, *heads, PAGE, q_data_type=qkv.q.dtype, kv_data_type=qkv.q.dtype)
    shape = (case.batch * pages, PAGE, case.num_heads_kv, case.head_dim)
    cache = tuple(tensor.transpose(1, 2).reshape(shape) for tensor in (qkv.k, qkv.v))
    q = qkv.q.squeeze(2)  # [B, H, D]
    return lambda: wrapper.run(q, cache).unsqueeze(2)


def _workspace(q: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _bind_sage(case: Case, operands: Operands) -> Call:
    function = importlib.import_module("sageattention").sageattn
    _refuse_masks(case, operands)
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise NotImplementedError("its documentation does not say how causal masks are aligned")
    q, k, v = operands.qkv
    return lambda: function(q, k, v, tensor_layout="HND", is_causal=case.causal)


class _Known(NamedTuple):
    """Module and function that make a peer, the distribution that has its version, and how it is bound."""

    module: str
    function: str
    distribution: str
    bind: Callable[[Case, Operands], Call]


def _flash(module: str, distribution: str) -> _Known:
    return _Known(module, "flash_attn_func", distribution, functools.partial(_bind_flash, module))


_KNOWN: Mapping[str, _Known] = {
    "flash_attn": _flash("flash_attn", "flash-attn"),
    "flash_attn_3": _flash("flash_attn_interface", "flash-attn-3"),
    "flash_attn_4": _flash("flash_attn.cute", "flash-attn-4"),
    "xformers": _Known("xformers.ops", "memory_efficient_attention_forward", "xformers", _bind_xformers),
    "flashinfer": _Known(
        "flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", "flashinfer-python", _bind_flashinfer
    ),
    "sageattention": _Known("sageattention", "sageattn", "sageattention", _bind_sage),
}
assert tuple(_KNOWN) == PEERS


def find() -> tuple[dict[str, Provider], dict[str, str]]:
    """The peers that can be imported, and what is known of each: its version, or why it takes no part."""
    found: dict[str, Provider] = {}
    about: dict[str, str] = {}
    for name, known in _KNOWN.items():
        try:
            imported = importlib.import_module(known.module)
            getattr(imported, known.function)
        except ModuleNotFoundError as error:
            missing = error.name or known.module
            own = missing.partition(".")[0] == known.module.partition(".")[0]
            about[name] = "not installed" if own else f"cannot be imported: needs {missing}"
        except Exception as error:  # a package built for another torch or GPU says so in its own ways
            reason = next(iter(str(error).strip().splitlines()), "")
            about[name] = f"cannot be imported: {type(error).__name__}: {reason}"[:200]
        else:
            version = package_version(known.distribution) or getattr(imported, "__version__", None)
            about[name] = str(version or "version unknown")
            found[name] = Provider(name=name, bind=known.bind, is_quantised=name == "sageattention")
    return found, about
