"""FlashAttention 2's functions, by their names, keywords, layouts and meanings.

    from sdpa_cutlass.flash_api import flash_attn_func          # instead of: from flash_attn import ...

Tensors are [B, S, H, D] or packed [total, H, D], float16 or bfloat16. What the functions share:

dropout_p: the probability to drop a weight. Random bits come from torch's generator of the device and are not
    those that flash_attn draws.
softmax_scale: any finite number; 1/sqrt(D) by default.
causal: the last row sees every key (bottom_right): row i sees the keys 0 to i + Sk - Sq.
window_size: (left, right): row i sees the keys i + Sk - Sq - left to i + Sk - Sq + right, both included;
    -1 is no limit. With `causal`, right is 0.
softcap, alibi_slopes, block_table: refused unless they are what they are by default.
deterministic: concerns gradients alone, which are so always.
return_attn_probs: return (out, softmax_lse, None). softmax_lse is float32, natural log, [B, H, Sq] or, of
    packed sequences, [H, total_q]; -inf in a row that sees no key, whose output is 0. The third, flash_attn's
    matrix of probabilities, exists there under dropout alone: with dropout_p the request is refused.

k and v may have fewer heads than q, a divisor of them. Results are differentiable in q, k and v. Raises
UnsupportedError for what is not served; otherwise what `sdpa_cutlass.attention` raises, which calls q, k and
v query, key and value. Everything is raised before anything is launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from .call.extras import checked_window
from .errors import ArgumentError, ArgumentTypeError, UnsupportedError
from .problem import Causal
from .public import api, varlen

if TYPE_CHECKING:
    import torch

    Returned: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] → out [B, Sq, Hq, Dv].

    The other arguments, the returned tuple and the errors stand at the top of this file.
    """
    _check_tensors({"q": q, "k": k, "v": v}, "[batch, seqlen, heads, head_dim]", dims=4)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return _returned(api.attention(q, k, v, layout="bshd", **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_func` of q [B, Sq, Hq, D] and kv [B, Sk, 2, Hkv, D], which is read in place."""
    k, v = _unpacked("kv", kv, "[batch, seqlen, 2, heads, head_dim]", dims=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_func` of qkv [B, S, 3, H, D], which is read in place."""
    q, k, v = _unpacked("qkv", qkv, "[batch, seqlen, 3, heads, head_dim]", dims=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Returned:
    """q [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv] → out [total_q, Hq, Dv].

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q and those of cu_seqlens_k of k and
    v: int32 tensors [B + 1] on q's device. max_seqlen_q and max_seqlen_k are upper bounds of the lengths. The
    other arguments, the returned tuple and the errors stand at the top of this file.
    """
    _check_tensors({"q": q, "k": k, "v": v}, "[total, heads, head_dim]", dims=3)
    if block_table is not None:
        raise UnsupportedError("block_table is given; allowed is None: keys in pages are not served")
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    result = varlen.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return _returned(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_varlen_func` of q [total_q, Hq, D] and kv [total_k, 2, Hkv, D], which is read in place."""
    k, v = _unpacked("kv", kv, "[total, 2, heads, head_dim]", dims=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D], which is read in place."""
    q, k, v = _unpacked("qkv", qkv, "[total, 3, heads, head_dim]", dims=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _check_tensors(tensors: dict[str, Any], allowed: str, *, dims: int) -> None:
    """Raises for what is no tensor of `dims` dimensions, or expects a gradient."""
    import torch

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"{name} is a {type(tensor).__name__}; allowed is a torch.Tensor")
        if tensor.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed is {allowed}")


def _unpacked(name: str, packed: Any, allowed: str, *, dims: int) -> tuple[torch.Tensor, ...]:
    """The tensors of qkv or kv, of which the third last dimension counts."""
    _check_tensors({name: packed}, allowed, dims=dims)
    if packed.shape[-3] != len(name):
        raise ArgumentError(f"{name} has shape {tuple(packed.shape)}; allowed is {allowed}")
    return tuple(packed.unbind(-3))


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """The keywords of `attention` that say the same."""
    if softcap != 0:
        raise UnsupportedError(f"softcap={softcap!r}; allowed is 0.0: capped scores are not served")
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes is given; allowed is None: biases by distance are not served")
    if return_attn_probs and dropout_p != 0:
        raise UnsupportedError(
            f"return_attn_probs=True with dropout_p={dropout_p!r}: the matrix of probabilities is not kept; "
            "allowed with dropout_p=0.0"
        )
    options: dict[str, Any] = {
        "p_dropout": dropout_p,
        "scale": softmax_scale,
        "causal": Causal.BOTTOM_RIGHT if causal else None,
        "return_lse": bool(return_attn_probs),
    }
    left, right = checked_window(window_size, "window_size")
    if left >= 0 or (right >= 0 and not causal):
        options["window"] = left, right
    return options


def _returned(result: Any, return_attn_probs: bool) -> Returned:
    return (*result, None) if return_attn_probs else result
