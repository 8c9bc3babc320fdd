"""sdpa_params as `make_params` fills it: every field says what was asked."""

from __future__ import annotations

from typing import Any

import torch

from sdpa_cutlass.call.extras import Extras
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.registry import dtype_code, mask_code
from sdpa_cutlass.library.structs import Params
from sdpa_cutlass.problem import Causal, DType, MaskType, Problem

SIZES: dict[str, int] = {
    "batch": 2,
    "num_heads_q": 6,
    "num_heads_kv": 3,
    "seqlen_q": 5,
    "seqlen_k": 7,
    "head_dim": 16,
    "head_dim_v": 24,
}


def fields(params: Params) -> dict[str, Any]:
    """The fields by name: arrays as tuples, null as 0."""
    found = {name: getattr(params, name) for name, *_ in Params._fields_}
    return {name: tuple(value) if hasattr(value, "__len__") else value or 0 for name, value in found.items()}


def tensors(device: str) -> tuple[torch.Tensor, ...]:
    """q, k, v and out, whose strides are those of no other."""
    batch, heads_q, heads_kv, rows, keys, head_dim, head_dim_v = SIZES.values()
    shapes = [
        (batch, rows, heads_q, head_dim),
        (batch, keys, heads_kv, head_dim),
        (batch, keys, heads_kv, head_dim_v),
        (batch, rows, heads_q, head_dim_v),
    ]
    return tuple(
        torch.empty(*shape[:3], shape[3] + 8 * i, dtype=torch.bfloat16, device=device)[
            ..., : shape[3]
        ].transpose(1, 2)
        for i, shape in enumerate(shapes)
    )


def test_every_field_says_what_was_asked(device: str) -> None:
    q, k, v, out = tensors(device)
    lse = torch.empty(2, 6, 5, device=device)
    mask = torch.empty(2, 6, 5, 11, device=device)[..., :7]
    lengths = [torch.empty(2, dtype=torch.int32, device=device) for _ in range(2)]
    problem = Problem(
        dtype=DType.BF16,
        causal=Causal.BOTTOM_RIGHT,
        mask=MaskType.F32,
        has_dropout=True,
        has_lengths=True,
        window=(4, 0),
        has_sinks=True,
        **SIZES,
    )
    sinks = torch.empty(6, dtype=torch.bfloat16, device=device)
    extras = Extras(mask, 0.25, PhiloxState(2**64 - 1, 2**63), *lengths, sinks=sinks)
    assert fields(make_params(problem, 0.5, q, k, v, out, lse, extras)) == SIZES | {
        "struct_size": len(bytes(Params())),
        "dtype": dtype_code(DType.BF16),
        "is_causal": 1,
        "causal_offset": 2,
        "softmax_scale": 0.5,
        "q": q.data_ptr(),
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "out": out.data_ptr(),
        "softmax_lse": lse.data_ptr(),
        "workspace": 0,
        "workspace_bytes": 0,
        "split_arrivals": 0,
        "q_stride": q.stride()[:3],
        "k_stride": k.stride()[:3],
        "v_stride": v.stride()[:3],
        "out_stride": out.stride()[:3],
        "lse_stride": (30, 5),
        "mask": mask.data_ptr(),
        "mask_stride": mask.stride(),
        "mask_type": mask_code(MaskType.F32),
        "p_dropout": 0.25,
        "philox_seed": 2**64 - 1,
        "philox_offset": 2**63,
        "philox_state": 0,
        "seqlens_q": lengths[0].data_ptr(),
        "seqlens_k": lengths[1].data_ptr(),
        "cu_seqlens_q": 0,
        "cu_seqlens_k": 0,
        "total_q": 0,
        "total_k": 0,
        "causal_bottom_right": 1,
        "num_splits": 0,
        "has_window": 1,
        "window_left": 4,
        "window_right": 0,
        "sinks_type": mask_code(MaskType.BF16),
        "sinks": sinks.data_ptr(),
        "quantized": 0,
        "quantized_bytes": 0,
    }


def test_packed_sequences_are_one_batch_with_totals(device: str) -> None:
    q, k, v, out = (tensor[:1] for tensor in tensors(device))
    state = torch.empty(2, dtype=torch.int64, device=device)
    starts = [torch.empty(4, dtype=torch.int32, device=device) for _ in range(2)]
    sizes = SIZES | {"batch": 3, "seqlen_q": 2, "seqlen_k": 3}
    problem = Problem(dtype=DType.BF16, has_dropout=True, has_lengths=True, **sizes)
    extras = Extras(None, 0.5, state, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    found = fields(make_params(problem, 1.0, q, k, v, out, None, extras))
    expected = sizes | {
        "is_causal": 0,
        "causal_bottom_right": 0,
        "softmax_lse": 0,
        "lse_stride": (30, 5),
        "mask": 0,
        "mask_stride": (0, 0, 0, 0),
        "mask_type": 0,
        "philox_state": state.data_ptr(),
        "seqlens_q": 0,
        "cu_seqlens_q": starts[0].data_ptr(),
        "cu_seqlens_k": starts[1].data_ptr(),
        "total_q": 5,
        "total_k": 7,
        "has_window": 0,
        "window_left": -1,
        "window_right": -1,
        "sinks_type": 0,
        "sinks": 0,
    }
    assert found | expected == found


def test_a_window_without_a_causal_mask_counts_from_the_last_key(device: str) -> None:
    q, k, v, out = tensors(device)
    problem = Problem(dtype=DType.BF16, window=(3, 1), **SIZES)
    found = fields(make_params(problem, 1.0, q, k, v, out, None))
    expected = {
        "is_causal": 0,
        "causal_offset": 2,
        "causal_bottom_right": 0,
        "has_window": 1,
        "window_left": 3,
        "window_right": 1,
    }
    assert found | expected == found
    problem = Problem(dtype=DType.BF16, window=(3, 1), has_lengths=True, **SIZES)
    assert make_params(problem, 1.0, q, k, v, out, None).causal_bottom_right == 1
