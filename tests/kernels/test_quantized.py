"""The accuracy contract of docs/quantised.md on every quantised kernel, with every option that they take.

The worst head counts, and softmax_lse and 1 - cosine too: a high mean hides broken heads. Inputs lie in
guarded memory, the workspace is full of NaNs before each launch.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.quantised_data import FAMILIES, errors_of_heads
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks, refusal_of, run_case
from tests.kernels.general_numerics import expected
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.quantized_data import check_small_values, contract_violations, small_values
from tests.kernels.test_quantized_model import family_case

_DATA = Path(__file__).parents[2] / "sdpa_cutlass" / "data" / "minilm_qkv.safetensors"
_REAL = {Accuracy.INT8_QK: (7e-3, 1.2e-2), Accuracy.INT8: (1.1e-2, 1.6e-2)}  # all heads, the worst
_BF16 = 3e-3  # what rounding the result to bfloat16 adds to the errors, which are those of float16


def check_contract(
    kernel: TestedKernel, case: Case, *, is_normal: bool = False, few_keys: bool = False, bshd: bool = False
) -> None:
    """Runs the case and holds it to the contract."""
    out, lse = run_case(kernel, case, bshd=bshd)
    broken = contract_violations(kernel.info.accuracy, case, out, lse, is_normal=is_normal, few_keys=few_keys)
    assert not broken, f"{kernel}, {case}: {broken}"


@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_contract(quantized_kernel: TestedKernel, kind: str, causal: Causal | None) -> None:
    case = family_case(quantized_kernel, kind, 1, 2, 2, 130, 512, causal=causal)
    check_contract(quantized_kernel, case, is_normal=kind == "normal" and causal is None)


@pytest.mark.parametrize("seqlen", [511, 512, 513, 1025])
def test_normal_inputs_of_any_length(quantized_kernel: TestedKernel, seqlen: int) -> None:
    """The error does not grow with S."""
    check_contract(
        quantized_kernel, family_case(quantized_kernel, "normal", 1, 1, 1, 65, seqlen), is_normal=True
    )


@pytest.mark.kernels(head_dim=64)  # the data's own is 32
def test_real_data(quantized_kernel: TestedKernel) -> None:
    """q, k, v that a pretrained encoder computed for real text: all heads, and the worst."""
    tensors = load_file(_DATA)
    q, k, v = (tensors[name].to(quantized_kernel.device, quantized_kernel.dtype) for name in ("q", "k", "v"))
    case = Case(q=q, k=k, v=v)
    out, _ = run_case(quantized_kernel, case)
    ref = expected(case).out
    errors, _ = errors_of_heads(out, ref)
    everywhere = ((out.double() - ref).norm() / ref.norm()).item()
    all_heads, worst = _REAL[quantized_kernel.info.accuracy]
    slack = _BF16 if quantized_kernel.dtype is torch.bfloat16 else 0
    assert everywhere <= all_heads + slack, f"(a) max error {everywhere:.2e} of all heads"
    assert errors.max().item() <= worst + slack, f"(a) max error {errors.max().item():.2e} of a head"


@pytest.mark.parametrize("causal", [None, *Causal], ids=str)
def test_grouped_heads_and_layouts(quantized_kernel: TestedKernel, causal: Causal | None) -> None:
    for bshd in (False, True):
        inputs = random_qkv(quantized_kernel, 150, 200, batch=2, heads=6, heads_kv=2, bshd=bshd)
        check_contract(quantized_kernel, Case(**inputs, causal=causal), bshd=bshd)


@pytest.mark.parametrize("causal", [None, *Causal], ids=str)
def test_padded_lengths(quantized_kernel: TestedKernel, causal: Causal | None) -> None:
    case = Case(
        **random_qkv(quantized_kernel, 140, 200, batch=4, heads=2, heads_kv=1),
        causal=causal,
        lengths_q=Lengths(seqlens=(140, 1, 100, 0)),
        lengths_k=Lengths(seqlens=(131, 200, 0, 64)),
    )
    check_contract(quantized_kernel, case, few_keys=True)


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_rows_beyond_are_zeros_where_the_others_are_nan(quantized_kernel: TestedKernel, tensor: str) -> None:
    case = Case(
        **random_qkv(quantized_kernel, 140, 200, batch=2, heads=2, heads_kv=1),
        lengths_q=Lengths(seqlens=(140, 3)),
    )
    getattr(case, tensor)[1, :, 2] = math.nan
    out, lse = run_case(quantized_kernel, case)
    assert out[0].isfinite().all()
    assert out[1, :, :3].isnan().all()
    assert (out[1, :, 3:] == 0).all()
    assert lse is not None
    assert (lse[1, :, 3:] == -math.inf).all()


@pytest.mark.parametrize("causal", [None, *Causal], ids=str)
def test_packed_lengths(quantized_kernel: TestedKernel, causal: Causal | None) -> None:
    cu_seqlens = (0, 130, 130, 131, 260)
    case = Case(
        **random_qkv(quantized_kernel, 260, 260, batch=1, heads=2, heads_kv=1),
        causal=causal,
        lengths_q=Lengths(cu_seqlens=cu_seqlens),
        lengths_k=Lengths(cu_seqlens=cu_seqlens),
    )
    check_contract(quantized_kernel, case, few_keys=True)


def test_a_packed_sequence_equals_it_alone(quantized_kernel: TestedKernel) -> None:
    """Bit for bit: groups, blocks and the mean count from its own first key."""
    cu_seqlens = (0, 33, 133, 200)
    inputs = random_qkv(quantized_kernel, 200, 200, batch=1, heads=2, heads_kv=1)
    lengths = Lengths(cu_seqlens=cu_seqlens)
    packed, packed_lse = run_case(quantized_kernel, Case(**inputs, lengths_q=lengths, lengths_k=lengths))
    for begin, end in itertools.pairwise(cu_seqlens):
        alone = {name: tensor[:, :, begin:end].contiguous() for name, tensor in inputs.items()}
        out, lse = run_case(quantized_kernel, Case(**alone))
        assert torch.equal(out, packed[:, :, begin:end]), f"rows {begin} to {end}"
        assert torch.equal(lse, packed_lse[:, :, begin:end]), f"softmax_lse of rows {begin} to {end}"


@pytest.mark.parametrize("window", [(0, 0), (70, 0), (-1, 20), (100, 33)], ids=str)
def test_windows(quantized_kernel: TestedKernel, window: tuple[int, int]) -> None:
    for causal in (None, Causal.TOP_LEFT):
        case = Case(**random_qkv(quantized_kernel, 200, 260, batch=1), causal=causal, window=window)
        check_contract(quantized_kernel, case, few_keys=True)


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_sinks(quantized_kernel: TestedKernel, spread: float) -> None:
    """A sink meets logits to which q·c was given back."""
    sinks = random_sinks(quantized_kernel, 4, torch.float32, spread)
    tensors = family_case(quantized_kernel, "kbias", 1, 4, 2, 40, 150)
    case = Case(q=tensors.q, k=tensors.k, v=tensors.v, sinks=sinks, causal=Causal.BOTTOM_RIGHT)
    check_contract(quantized_kernel, case)


def test_a_constant_added_to_every_key_changes_little(quantized_kernel: TestedKernel) -> None:
    """It is subtracted again with the mean: of numbers that lose nothing by it, little else changes."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, 60, 200)
    k = (case.k * 16).round() / 16
    for tensor in (case.q, case.v):
        tensor.copy_((tensor * 64).round() / 64)
    out, lse = run_case(quantized_kernel, Case(q=case.q, k=k, v=case.v))
    moved, moved_lse = run_case(quantized_kernel, Case(q=case.q, k=k + 2, v=case.v))
    change = (out.double() - moved.double()).norm() / out.double().norm()
    assert change < 1e-3, f"(a) max error {change:.1e} by a constant"
    shift = case.q.double().sum(-1) * 2 * case.softmax_scale
    assert (moved_lse.double() - lse.double() - shift).abs().max() < 5e-3, (
        "(c) softmax_lse lacks the constant"
    )


def test_small_values_in_many_blocks(quantized_kernel: TestedKernel) -> None:
    """What makes integer sums floats leaves O before it hides them."""
    check_small_values(quantized_kernel, small_values(quantized_kernel, 96))


@pytest.mark.parametrize("exponent", [-6, 3])
def test_values_scale_by_powers_of_two(quantized_kernel: TestedKernel, exponent: int) -> None:
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 30, 100)
    out, _ = run_case(quantized_kernel, case)
    scaled, _ = run_case(quantized_kernel, Case(q=case.q, k=case.k, v=case.v * 2.0**exponent))
    torch.testing.assert_close(scaled.double() / 2.0**exponent, out.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.kernels(device="cpu")
def test_schedules_do_not_change_a_bit(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 150, 200, batch=1), causal=Causal.BOTTOM_RIGHT)
    first = run_case(quantized_kernel, case)
    host = library(Target.HOST)
    try:
        for seed in (1, 2, 3):
            host.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            again = run_case(quantized_kernel, case)
            assert all(map(torch.equal, first, again)), f"schedule seed {seed}"
    finally:
        host.host_configure(num_threads=HOST_THREADS)


def test_dropout_is_refused(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 4, 9, batch=1), p_dropout=0.5)
    assert "p_dropout is 0.5; this kernel takes 0 only" in (refusal_of(quantized_kernel, case) or "")


def test_larger_head_dims_are_refused(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 4, 9, batch=1, head_dim=quantized_kernel.info.head_dim + 8))
    assert "this kernel takes multiples of 8 up to" in (refusal_of(quantized_kernel, case) or "")
