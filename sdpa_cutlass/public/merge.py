"""merge_states: attention over disjoint sets of keys becomes attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call import merging, torch_hooks, torch_inputs

if TYPE_CHECKING:
    import torch


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention of the same queries over disjoint sets of keys, in one kernel.

        lse = log(Σ_i exp(lses[i]) + exp(sink))      out = Σ_i exp(lses[i] - lse) · outs[i]

    outs: partial results [batch, heads, seqlen_q, head_dim] in a list or tuple, or one tensor
        [parts, batch, heads, seqlen_q, head_dim]; batch, or batch and heads, may be left out. float16,
        bfloat16 or float32; head_dim a multiple of 8 up to 256, contiguous; addresses and the other strides
        multiples of 16 bytes.
    lses: what `attention(..., return_lse=True)` returned with each: [batch, heads, seqlen_q] float32 in
        natural units, in a list, or [parts, batch, heads, seqlen_q]; any strides.
    sinks: a logit for each head, [heads], of any float type: it joins the sum once and has no value.
    out_dtype: torch.float16, bfloat16 or float32; that of outs by default.

    Returns out [batch, heads, seqlen_q, head_dim] in `out_dtype`, laid out as the first part is, and lse
    [batch, heads, seqlen_q] float32. Sums are in float32, go by the order of the parts and depend on nothing
    else, so that bits repeat. A part whose lse is -inf counts for nothing, not even NaN: where all are,
    out is 0, and lse -inf or the sink. NaN and +inf go on as the formulas say.

    Raises TypeError, ValueError or NotImplementedError naming the argument, before anything is launched: a
    tensor that requires grad is refused. LibraryNotFoundError and its kin when the native library cannot be
    used; LaunchError when CUDA refuses. The method is FlashDecoding's (Dao et al., 2023).

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    halves = zip(k.chunk(2, dim=2), v.chunk(2, dim=2))
    parts = [sdpa_cutlass.attention(q, *half, return_lse=True) for half in halves]
    out, lse = sdpa_cutlass.merge_states(*zip(*parts))
    ```
    """
    if torch_hooks.is_dynamo_compiling():
        from ..integrations import merge_ops

        return merge_ops.traced(outs, lses, sinks, out_dtype)
    parts = merging.read(outs, lses, sinks, out_dtype)
    if torch_hooks.is_watching() or torch_inputs.needs_dispatcher(parts.named(), is_operator=False):
        from ..integrations import merge_ops

        return merge_ops.traced(outs, lses, sinks, out_dtype)
    return merging.run(parts)
