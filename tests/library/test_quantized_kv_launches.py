"""What a call over a QuantizedKV launches: a split kernel where queries are few, and the C ABI beneath it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdpa_cutlass import AttentionPlan, Precision, QuantizedKV, attention, plan, quantize_kv
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.call.quantized_memory import Memory
from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.structs import Params
from sdpa_cutlass.problem import Problem
from tests.library.reference import rand
from tests.library.test_precision import relative_error
from tests.library.test_quantized_kv import inputs, precisions


@precisions
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 64), (4, 96), (3, 128)])
def test_decoding_splits_the_keys(
    device: str, precision: Precision, causal: str | None, heads: int, head_dim: int
) -> None:
    """One query of grouped heads takes a split kernel, whose results keep the contract; so does a plain call
    by its name, bit for bit.
    """
    sizes = ((heads, 2), (2, 1500), (2, 1500))
    q, k, v = (
        rand(2, head, rows, head_dim, device=device, dtype=torch.float16, seed=seed)
        for seed, (head, rows) in enumerate(((2 * heads, 2), sizes[1], sizes[2]))
    )
    kept = quantize_kv(k, v, precision=precision)
    chosen: list[tuple[str, int]] = []
    launch = QuantizedKV._launch

    def watch(self: QuantizedKV, kernel: Any, params: Params, *others: Any) -> None:
        chosen.append((kernel.name, params.num_splits))
        launch(self, kernel, params, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedKV, "_launch", watch)
        out, lse = attention(q, kept, causal=causal, return_lse=True)
    ((name, num_splits),) = chosen
    assert "_split" in name
    assert num_splits > 1
    options = {"causal": causal, "return_lse": True}
    again = attention(q, k, v, precision=precision, kernel=name, **options)
    assert all(map(torch.equal, (out, lse), again))
    assert relative_error(out, attention(q, k, v, causal=causal)) < 2e-2
    assert all(map(torch.equal, (out, lse), attention(q, kept, **options)))  # counters are zero again


@precisions
def test_the_memory_is_the_librarys_workspace(device: str, precision: Precision) -> None:
    q, k, v = inputs(device)
    kept = quantize_kv(k, v, precision=precision)
    sizes = {"batch": 2, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 70, "seqlen_k": 130}
    problem = Problem(dtype=kept._kernel.dtype, head_dim=64, **sizes)
    params = make_params(problem, 1.0, q, k, v, q, None)
    library, _ = kept._place
    for capacity in (192, 640):
        params.total_k = capacity
        memory = Memory(precision, 4, 64, capacity, k.device)
        assert library.workspace_bytes(kept._kernel.index, params) == memory.size
    params.total_k = 129
    refusal = library.refusal(kept._kernel.index, params)
    assert refusal is not None
    assert "total_k is 129; it must be 0, or at least seqlen_k, which is 130" in refusal


@pytest.mark.parametrize(
    ("precision", "missing", "total_k", "is_there", "word"),
    [
        ("int8", ("q", "out"), 0, False, "q is null"),
        ("int8", ("q",), 192, False, "q is null"),
        ("int8", ("q", "out", "k"), 192, False, "k is null"),
        ("int8", ("q", "out", "v"), 192, False, "v is null"),
        ("int8", ("k",), 192, False, "k is null"),
        ("int8", ("q", "k", "v", "out"), 192, True, "q is null"),
        ("int8", ("k", "v", "out"), 192, True, "out is null"),
        ("int8_qk", ("k", "v"), 192, True, "v is null"),
        ("int8", ("k", "v"), 0, True, "allowed is null, or a quantised kernel with total_k above 0"),
        ("exact", ("k",), 192, True, "allowed is null, or a quantised kernel with total_k above 0"),
        ("exact", ("q", "out"), 192, False, "q is null"),
    ],
)
def test_null_where_nothing_else_says_so(
    device: str, precision: str, missing: tuple[str, ...], total_k: int, is_there: bool, word: str
) -> None:
    """Through the C ABI: nothing is launched. `is_there`: what the first launch leaves is."""
    params, memory, library, made, _held = c_call(device, precision, total_k)
    if is_there:
        params.quantized, params.quantized_bytes = memory.address, memory.size
    for name in missing:
        setattr(params, name, None)
    assert library.launch_function(made.kernel.index, params, 0, None) == 1
    assert word in library.last_error()


@pytest.mark.parametrize(
    ("more", "word"), [(0, ""), (256, "quantized has"), (-256, "quantized has"), (None, "a multiple of 256")]
)
def test_memory_of_another_size_is_refused(device: str, more: int | None, word: str) -> None:
    """Such as that of keys for kernels of another head_dim. Through the C ABI."""
    params, memory, library, made, _held = c_call(device, "int8", 192)
    params.workspace, params.workspace_bytes = None, 0
    params.quantized, params.quantized_bytes = memory.address, memory.size + (more or 0)
    if more is None:
        params.quantized += 16
    memory._store.zero_()
    assert library.launch_function(made.kernel.index, params, 0, None) == (1 if word else 0)
    assert not word or word in library.last_error()


def c_call(device: str, precision: str, total_k: int) -> tuple[Params, Memory, Library, AttentionPlan, Any]:
    """Arguments of a launch of 70 rows over 130 keys in a workspace for 192; the last one holds them."""
    held = q, k, v, out = (*inputs(device), inputs(device)[0])
    kept = quantize_kv(k, v, precision="int8")
    named = None if precision == "exact" else quantize_kv(k, v, precision=precision)._kernel.name
    made = plan(q, k, v, precision=precision, kernel=named)
    params = make_params(made.problem, 1.0, q, k, v, out, None)
    params.num_splits = int(made.kernel.is_split)
    of_qk = precision == "int8_qk"
    memory = Memory(Precision.INT8_QK if of_qk else Precision.INT8, 4, 64, 192, k.device)
    params.workspace, params.workspace_bytes, params.total_k = memory.address, memory.size, total_k
    return params, memory, kept._place[0], made, held
