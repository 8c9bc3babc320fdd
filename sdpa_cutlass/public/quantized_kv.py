"""quantize_kv: keys and values become bytes once, for any number of calls of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..call import extras
from ..call.quantized import QuantizedKV
from ..call.quantized_checks import checked_pair, out_of_graphs, precision_of
from ..library.registry import Precision

if TYPE_CHECKING:
    import torch

__all__ = ["QuantizedKV", "quantize_kv"]


@out_of_graphs
def quantize_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    precision: Precision | str = "int8",
    seqlens_k: torch.Tensor | None = None,
) -> QuantizedKV:
    """Quantises keys and values once; `attention(query, quantized)` then does not do it in every call.

    key [batch, num_heads_kv, seqlen_k, head_dim], value [batch, num_heads_kv, seqlen_k, head_dim_v], float16
    or bfloat16, any strides; head_dims up to 128. Nothing is kept of them but 16-bit copies of the last
    seqlen_k % 64 keys and values, for `QuantizedKV.append`, and under "int8_qk" the values, which that
    precision does not round. seqlen_k may be 0.

    precision: "int8", or "int8_qk": bytes of the keys alone. `attention` then needs no precision.
    seqlens_k: int32 [batch] on key's device: how many keys each sequence really has. Copied, and used by
        every call in place of its own seqlens_k. No keys can be appended then.

    The bytes are those that `attention(query, key, value, precision=...)` makes, in the same pass over the
    same keys, so the same kernel gives the same bits; but for causal="top_left" and shards with fewer rows
    than keys, where such a call makes bytes of the keys that some row sees alone. The kernel is the one of
    the smallest head_dim: a plain call may choose a larger one under "int8_qk", where there are few tiles.
    docs/quantised.md has the scheme, its errors and what it takes from SageAttention (Zhang et al., 2024).

    Queued on torch's current stream of key's device. Raises TypeError, ValueError or NotImplementedError
    naming the argument: tensors that require grad, and calls while torch traces, are refused.
    LibraryNotFoundError and its kin when the native library cannot be used; LaunchError when CUDA refuses.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    kept = sdpa_cutlass.quantize_kv(k, v)
    kept.append(k[:, :, :1], v[:, :, :1])
    out = sdpa_cutlass.attention(q, kept)
    ```
    """
    asked = precision_of(precision)
    key, value = checked_pair(key, value)
    lengths = None
    if seqlens_k is not None:
        lengths = extras.lengths("seqlens_k", seqlens_k, key.shape[0], key).clone()
    return QuantizedKV(key, value, asked, lengths)
