"""The public functions on batches of equally long or padded sequences; packed ones are in varlen.py.

Here are signatures and meanings only: calls.py has the way from arguments to a launch. Sources: Dao et al.,
"FlashAttention" (2022) and "FlashAttention-2" (2023) for the fused algorithm; torch's
F.scaled_dot_product_attention for the meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..call import array_calls, extras, shard, torch_inputs
from ..call.arguments import Inputs, Options, chosen
from ..call.calls import run, run_general
from ..call.launch import library_for
from ..call.operands import Layout
from ..call.precision import asked_of
from ..call.quantized import QuantizedKV, attend
from ..call.quantized_checks import precision_of
from ..errors import ArgumentError, ArgumentTypeError, LibraryNotFoundError
from ..library.abi import library
from ..library.locate import Target
from ..library.registry import Asked, Family, KernelInfo, Precision, read_kernels
from ..problem import Causal

if TYPE_CHECKING:
    import torch

    from ..dropout import PhiloxState

__all__ = ["attention", "kernels", "library_for", "scaled_dot_product_attention", "unfused_attention"]

_FUSED: Asked
_FUSED, _UNFUSED, _TOP_LEFT = Family.FMHA_FWD, Family.UNFUSED, Causal.TOP_LEFT
"""Members by themselves: before Python 3.12 each look-up in the enum takes 0.2 µs."""


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
    """torch.nn.functional.scaled_dot_product_attention in float16 and bfloat16.

    query [..., Hq, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv] → [..., Hq, Sq, Dv]. `attn_mask`
    broadcasts to [..., Hq, Sq, Sk]: boolean (True = attend), or float16, bfloat16 or float32 for any
    dtype of query, added to the scaled scores. `is_causal` lets row i see keys 0..i (top_left). `scale`
    defaults to 1/sqrt(D). With `enable_gqa`, Hkv may be any divisor of Hq. A row that sees no key gives
    zeros. Random bits come from torch's generator of the device.

    Differentiable in query, key, value and an attn_mask that is added; the gradient of that has its shape
    and dtype. Raises NotImplementedError for head dimensions beyond the kernels';
    TypeError or ValueError, naming the argument, for anything else that is not allowed, such as attn_mask
    together with is_causal.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    out = sdpa_cutlass.scaled_dot_product_attention(q, k, v, is_causal=True)
    ```
    """
    causal = _TOP_LEFT if is_causal else None
    try:
        is_plain = attn_mask is None and dropout_p == 0.0 and True  # asked here, not below
    except Exception:  # an array, which is refused below
        is_plain = False
    if is_plain:
        return run(_FUSED, causal, scale, enable_gqa, None, False, query, key, value, None)[0]
    if attn_mask is not None and is_causal:
        raise ArgumentError(
            "Explicit attn_mask should not be set when is_causal=True; attention(..., causal='top_left') "
            "takes both"
        )
    bias = extras.causal_bias(attn_mask, query, key)
    if bias is not None:
        attn_mask, causal = None, bias
    if type(dropout_p) is not float or not 0 <= dropout_p <= 1:
        extras.dropout_probability(dropout_p, "dropout_p")
    return run_general(
        _FUSED, causal, scale, enable_gqa, None, False, dropout_p, "bhsd", None,
        query, key, value, None, attn_mask, None, None, None, None,
    )[0]  # fmt: skip


def attention(
    query: torch.Tensor,
    key: torch.Tensor | QuantizedKV,
    value: torch.Tensor | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: Causal | str | None = None,
    scale: float | None = None,
    p_dropout: float = 0.0,
    philox: PhiloxState | tuple[int, int] | torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    layout: Layout | str = "bhsd",
    return_lse: bool = False,
    return_philox: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
    softmax_lse: Any = None,
    stream: Any = None,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    precision: Precision | str | None = None,
    row_offset: int | None = None,
    key_offset: int | None = None,
    accumulate: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[Any, ...]:
    """dropout(softmax(Q Kᵀ · scale + mask, sinks)) V through one fused kernel.

    query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], float16 or bfloat16, any strides → out
    [B, Hq, Sq, Dv], laid out as query is. Hkv divides Hq unless `enable_gqa` is False. Fewer or more leading
    dimensions work as in torch. D and Dv may be anything up to the largest kernel's head_dim; unless both
    are multiples of 8, the tensors concerned are copied and filled up with zeros. Not only torch tensors: any
    array with __dlpack__, __cuda_array_interface__ or __array_interface__ is read in place, kinds may be
    mixed, and the results are torch tensors (`out` is returned as it was given). Under torch.autocast,
    float32 inputs are cast as torch would, and a float mask along with them.

    attn_mask: any shape that broadcasts to [B, Hq, Sq, Sk], any strides; boolean (True = attend), or float16,
        bfloat16 or float32, added to the scaled scores. A boolean False or a bias of -inf hides a key.
    causal: None, "top_left" (row i sees keys 0..i) or "bottom_right" (the last row sees every key).
    scale: any finite number; 1/sqrt(D) by default.
    p_dropout: the probability to drop a weight, 0 to 1; the others are divided by 1 - p_dropout. At 1 the
        output is 0.
    philox: the seed and offset that decide which weights are dropped (see `dropout_mask`): two integers in
        [0, 2^64), or a tensor [2] of int64 or uint64 on query's device, which is read when the kernel runs.
        By default they come from torch's generator of the device.
    seqlens_q, seqlens_k: int32 tensors [B] on query's device, contiguous: how many rows of query and of key
        and value each sequence really has. Read when the kernel runs, and cut to [0, S]. Rows beyond give 0
        and -inf, keys beyond are not read. "bottom_right" then counts from each sequence's own last row and
        key.
    layout: "bhsd", or "bshd" for query, key, value and out as [B, S, H, D].
    return_lse: also return softmax_lse [B, Hq, Sq] float32, natural log, before dropout; -inf for a row that
        sees no key, whose output is 0.
    return_philox: also return the seed and offset as a PhiloxState; as a tensor [2] on the device if given
        so, or drawn there because a CUDA graph is captured or torch.compile traces the call.
    out: write here; the last dimension contiguous, address and other strides multiples of 16 bytes, no
        memory shared with the inputs.
    kernel: the name of the kernel to run instead of the chosen one (see `kernels`).
    softmax_lse: write softmax_lse into this float32 array, contiguous, whether or not it is returned.
    stream: the CUDA stream to use: its handle as an integer, or an object with __cuda_stream__, cuda_stream
        or ptr. By default torch's current one, else the one that `out` names in its
        __cuda_array_interface__, else the legacy default stream.
    window: (left, right): row i sees only the keys i + off - left to i + off + right, both included; -1 is
        no limit. off is 0 where `causal` is "top_left", else Sk - Sq, or that of each sequence's own
        lengths; a causal mask sets right to 0. Blocks of keys that no row of a tile sees are not read.
    sinks: tensor [Hq] of float16, bfloat16 or float32 on query's device, contiguous: one logit for each
        query head, in natural units and not scaled. It joins the denominator of its rows, and softmax_lse,
        like a key whose value is 0. The softmax_lse of a row that sees no key is then the sink.
    precision: None or "exact", or what may be rounded to 8 bits on the way: "int8_qk" query and key, "int8"
        value and the weights too. Errors are about 1 %; docs/quantised.md has the bounds, and when it pays.
        Takes no dropout, and head_dims up to 128. Nothing else ever quantises.
    row_offset, key_offset: where the rows and keys of a shard begin in a longer problem: row i is row
        row_offset + i there, key j is key key_offset + j, and a causal mask "top_left" and a window count in
        those numbers. One that is not given is 0. Not with "bottom_right" or dropout.
    accumulate: (out, softmax_lse) of the same queries over other keys, float32 or as query and float32. The
        call merges its result into them, as `merge_states` does, and returns them; to begin with, an
        softmax_lse of -inf. Address and strides of out are multiples of 16 bytes, its last dimension
        contiguous. No `out`, `softmax_lse` or `stream` then.
    out_dtype: with `accumulate` the dtype of its out; else that of query. Nothing else is computed.

    key may be a QuantizedKV, which has the values too: `attention(query, quantized)`, with the precision that
    it has. No dropout, seqlens_k, accumulate, softmax_lse or stream then, nor a query or attn_mask that
    requires grad, and torch cannot trace the call: compiled code leaves it out of its graphs.

    With softmax_lse or stream, and wherever torch is not installed, arrays and tensors are taken as they lie
    in memory, and nothing is allocated, copied or filled: `out` has to be given, and the inputs have to be
    what kernels read in place. torch cannot trace such calls. Keep them until the stream has done its work.

    Returns out, or a tuple of out and what was asked for, in the order softmax_lse, philox.

    Raises TypeError, ValueError or NotImplementedError naming the argument, before anything is launched;
    LibraryNotFoundError and its kin when the native library cannot be used; LaunchError when CUDA refuses.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    out, lse = sdpa_cutlass.attention(q, k, v, causal="bottom_right", window=(128, 0), return_lse=True)
    ```
    """
    if value is None:
        if type(key) is not QuantizedKV:
            raise ArgumentTypeError(
                "value is a NoneType; allowed is a tensor, or a key that is a QuantizedKV"
            )
        if row_offset is not None or key_offset is not None:
            causal = shard.word(causal, row_offset, key_offset)
        asked = _FUSED if precision is None else precision_of(precision)
        options = Options(asked, causal, scale, enable_gqa, kernel, return_lse, 0.0, layout, window)
        inputs = Inputs(query, None, None, out, attn_mask, seqlens_q=seqlens_q, sinks=sinks)
        refused = {
            "p_dropout": None if isinstance(p_dropout, (int, float)) and p_dropout == 0 else p_dropout,
            "philox": philox,
            "seqlens_k": seqlens_k,
            "softmax_lse": softmax_lse,
            "stream": stream,
            "accumulate": accumulate,
            "out_dtype": out_dtype,
        }
        return chosen(attend(key, options, inputs, refused), return_lse, return_philox)
    try:
        is_plain = (
            attn_mask is None
            and p_dropout == 0.0
            and seqlens_q is None
            and seqlens_k is None
            and philox is None
            and not return_philox
            and layout == "bhsd"
            and softmax_lse is None
            and stream is None
            and window is None
            and sinks is None
        )
    except Exception:  # an array, which is refused here or below
        is_plain, return_philox = False, torch_inputs.flag("return_philox", return_philox)
    if window is not None:
        window = extras.checked_window(window)
    asked = _FUSED if precision is None else asked_of(precision)
    if row_offset is not None or key_offset is not None:
        causal = shard.word(causal, row_offset, key_offset)
    if accumulate is not None or out_dtype is not None:
        from . import accumulate as accumulating

        if accumulate is not None:
            is_plain = False
            not_with = {"out": out, "softmax_lse": softmax_lse, "stream": stream}
            accumulate = accumulating.check(
                accumulate, query, key, value, sinks, layout, out_dtype=out_dtype, not_with=not_with
            )
        else:
            accumulating.refuse_dtype(out_dtype, query)
    if is_plain:
        out, lse, _ = run(asked, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)
        return (out, lse) if return_lse else out
    if softmax_lse is not None or stream is not None:
        options = Options(asked, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox=philox, sinks=sinks)
        return chosen(array_calls.run(options, inputs, softmax_lse, stream), return_lse, return_philox)
    result = run_general(
        asked, causal, scale, enable_gqa, kernel, return_lse or accumulate is not None, p_dropout, layout,
        window, query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks,
    )  # fmt: skip
    if accumulate is not None:
        accumulating.merge_into(accumulate, *result[:2], layout)
        result = (*accumulate, result[2])
    return chosen(result, return_lse, return_philox)


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
) -> torch.Tensor | tuple[Any, ...]:
    """`attention` through the piped baseline: CUTLASS GEMM → softmax → CUTLASS GEMM.

    Same arguments, results and errors, as far as it goes: no masks, dropout, lengths, window or sinks, and
    D = Dv must be a kernel's head_dim once rounded up to a multiple of 8. The logits [B, Hq, Sq, Sk] live in
    a workspace from torch's caching allocator.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    out = sdpa_cutlass.unfused_attention(q, k, v, causal="top_left")
    ```
    """
    out, lse, _ = run(_UNFUSED, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)
    return (out, lse) if return_lse else out


def kernels(target: Target | None = None) -> tuple[KernelInfo, ...]:
    """Every kernel of `target`'s library; by default of the CUDA library if it is there, else the host one.

    Raises LibraryNotFoundError when there is none, LibraryError when one is there and cannot be used.

    ```python
    names = [kernel.name for kernel in sdpa_cutlass.kernels() if kernel.head_dim == 64]
    ```
    """
    if target is not None:
        return read_kernels(library(target))
    try:
        return read_kernels(library(Target.CUDA))
    except LibraryNotFoundError:
        return read_kernels(library(Target.HOST))
