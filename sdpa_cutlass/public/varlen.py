"""attention_varlen: sequences of different lengths, packed one behind the other without padding.

Here are the signature and its meaning only: calls.py has the way from arguments to a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..call import extras, torch_inputs
from ..call.arguments import chosen
from ..call.calls import run_packed
from ..call.precision import asked_of
from ..library.registry import Asked, Family, Precision
from ..problem import Causal

if TYPE_CHECKING:
    import torch

    from ..dropout import PhiloxState

_FUSED: Asked = Family.FMHA_FWD


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal | str | None = None,
    scale: float | None = None,
    p_dropout: float = 0.0,
    philox: PhiloxState | tuple[int, int] | torch.Tensor | None = None,
    return_lse: bool = False,
    return_philox: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    precision: Precision | str | None = None,
) -> torch.Tensor | tuple[Any, ...]:
    """`attention` of every sequence of a packed batch by itself, in one launch.

    query [total_q, Hq, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv] → out [total_q, Hq, Dv]. Sequence
    b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of query and out, and those of cu_seqlens_k of
    key and value. Sequences may be empty, and one without keys gives 0 and -inf. Rows of out outside every
    sequence are left as they are if `out` is given, and hold anything otherwise.

    cu_seqlens_q, cu_seqlens_k: int32 tensors [B + 1] on query's device, contiguous, ascending from 0. Never
        read on the host, so a CUDA graph or compiled code may run again with other lengths.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths; what lies beyond them is cut off. They size the
        launch, so bounds far too large cost time.
    softmax_lse [Hq, total_q] float32. In a dropout mask, rows and columns count within their sequence and
    `b` is its number. "bottom_right" means each sequence's own last row and key. The other arguments, the
    returned tuple and the errors are those of `attention`.

    ```python
    q, k, v = torch.randn(3, 512, 8, 64, device="cuda", dtype=torch.float16)
    starts = torch.tensor([0, 60, 60, 512], dtype=torch.int32, device="cuda")  # the second one is empty
    out = sdpa_cutlass.attention_varlen(q, k, v, starts, starts, 512, 512, causal="top_left")
    ```
    """
    return_philox = torch_inputs.flag("return_philox", return_philox)
    if window is not None:
        window = extras.checked_window(window)
    asked = _FUSED if precision is None else asked_of(precision)
    result = run_packed(
        asked, causal, scale, enable_gqa, kernel, return_lse, p_dropout, "bshd", window,
        query, key, value, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, philox, sinks,
    )  # fmt: skip
    return chosen(result, return_lse, return_philox)
