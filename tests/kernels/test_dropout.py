"""Every kernel with dropout: which weights it drops, bit for bit, and what is left of the result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState, dropout_mask
from sdpa_cutlass.library.registry import Takes
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, make_case_params, random_qkv, random_sinks, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.masks import mask_dtypes, random_mask
from tests.kernels.numerics import visible

ALIGNMENTS = (None, *Causal)
STATE = PhiloxState(0xFEDCBA9876543210, 0x0123456789ABCDEF)
_BITS = {torch.float16: 8, torch.bfloat16: 5}  # that an output element holds exactly, with room for rounding


def kept_by(kernel: TestedKernel, case: Case, seen: torch.Tensor) -> torch.Tensor:
    """Which of the keys that a row sees the kernel keeps: boolean like `seen`, [B, Hq, Sq, Sk].

    With a scale of 0 every key seen has the same weight, 1 of n. V holds powers of two, one key a power and a
    column, so that an element of O, multiplied by n · p_keep, is an integer whose bits are the keys kept.
    """
    bits, columns = _BITS[kernel.dtype], case.v.shape[3]
    keys = torch.arange(case.k.shape[2], device=kernel.device)
    assert len(keys) <= bits * columns
    case.v.zero_()
    case.v[:, :, keys, keys % columns] = torch.exp2(keys // columns).to(kernel.dtype)
    out, _ = run_case(kernel, replace(case, scale=0.0))
    p_keep = 1 - float(torch.tensor(case.p_dropout, dtype=torch.float32))
    values = out.double() * seen.sum(-1, keepdim=True) * p_keep
    integers = values.round()
    assert (values - integers).abs().max() < 0.25
    found = (integers.long()[..., keys % columns] >> (keys // columns)) & 1
    return found.bool()


@pytest.mark.parametrize("p_dropout", [0.1, 0.5, 0.9, 1 / 512, 0.003])
def test_the_kernel_drops_what_dropout_mask_says(dropout_kernel: TestedKernel, p_dropout: float) -> None:
    """For every tile alike: so all kernels drop the same."""
    info = dropout_kernel.info
    keys = min((info.kv_groups + 1) * info.block_n + 13, _BITS[dropout_kernel.dtype] * info.head_dim)
    for i, causal in enumerate(ALIGNMENTS):
        rows = (info.block_m + 5, info.block_m - 9, 1)[i]
        case = Case(
            **random_qkv(dropout_kernel, rows, keys, batch=2, heads=3),
            causal=causal,
            p_dropout=p_dropout,
            philox=PhiloxState(STATE.seed + i, STATE.offset),
        )
        seen = visible(rows, keys, causal, dropout_kernel.device).expand(2, 3, rows, keys)
        expected = dropout_mask(2, 3, rows, keys, p_dropout, case.philox, device=dropout_kernel.device)
        assert torch.equal(kept_by(dropout_kernel, case, seen), expected & seen)


def test_a_mask_does_not_change_what_is_dropped(dropout_kernel: TestedKernel) -> None:
    """A mask may change the order in which a thread holds the keys, but not which of them are dropped."""
    rows, keys = 50, 151
    expected = dropout_mask(2, 2, rows, keys, 0.4, STATE, device=dropout_kernel.device)
    inputs = random_qkv(dropout_kernel, rows, keys, batch=2, heads=2)
    seen = random_mask(torch.bool, (2, 2, rows, keys), dropout_kernel.device)
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)
    taken = mask_dtypes(dropout_kernel.info)
    for mask in (seen, bias, bias.bfloat16(), bias.half()):
        if mask.dtype not in taken:
            continue
        case = Case(**inputs, mask=mask, p_dropout=0.4, philox=STATE)
        assert torch.equal(kept_by(dropout_kernel, case, seen), expected & seen)


def test_packed_sequences_drop_as_padded_ones(dropout_kernel: TestedKernel) -> None:
    """Rows and columns count within a sequence, and the batch index is the sequence's."""
    rows, keys = 40, 100
    inputs = random_qkv(dropout_kernel, 3 * rows, 3 * keys, batch=1, heads=2, bshd=True)
    packed = Case(
        **inputs,
        p_dropout=0.3,
        philox=STATE,
        lengths_q=Lengths(cu_seqlens=(0, rows, 2 * rows, 3 * rows)),
        lengths_k=Lengths(cu_seqlens=(0, keys, 2 * keys, 3 * keys)),
    )
    out, lse = check_case(dropout_kernel, packed)
    shaped = {name: tensor[0].unflatten(1, (3, -1)).transpose(0, 1) for name, tensor in inputs.items()}
    padded_out, padded_lse = run_case(dropout_kernel, Case(**shaped, p_dropout=0.3, philox=STATE))
    assert torch.equal(out[0].unflatten(1, (3, -1)).transpose(0, 1), padded_out)
    assert torch.equal(lse[0].unflatten(1, (3, -1)).transpose(0, 1), padded_lse)


@pytest.mark.parametrize("p_dropout", [0.1, 0.5, 0.9])
def test_numerics(dropout_kernel: TestedKernel, p_dropout: float) -> None:
    """The output and softmax_lse against float64 with the same mask, beside everything else."""
    info = dropout_kernel.info
    rows, keys = info.block_m + 3, (info.kv_groups + 1) * info.block_n + 13
    takes_masks = bool(info.mask_types)
    for i, causal in enumerate(ALIGNMENTS):
        plain = random_qkv(dropout_kernel, rows, keys, batch=1, seed=i)
        check_case(dropout_kernel, Case(**plain, causal=causal, p_dropout=p_dropout, philox=STATE))
        mask_dtype = (torch.bool, torch.float32, torch.bfloat16)[i]
        rich = Case(
            **random_qkv(dropout_kernel, rows, keys, head_dim=info.head_dim - 8, spare_columns=8, seed=i),
            causal=causal,
            mask=random_mask(mask_dtype, (2, 1, rows, keys), dropout_kernel.device) if takes_masks else None,
            lengths_q=Lengths(seqlens=(rows - 9, rows)),
            lengths_k=Lengths(seqlens=(keys, keys - 20)),
            p_dropout=p_dropout,
            philox=STATE,
        )
        check_case(dropout_kernel, rich, spare_columns=8)


@pytest.mark.parametrize("causal", ALIGNMENTS, ids=str)
def test_beside_a_mask_a_window_lengths_and_sinks(
    dropout_kernel: TestedKernel, causal: Causal | None
) -> None:
    if Takes.WINDOW not in dropout_kernel.info.takes:
        pytest.skip("takes no window")
    rows, keys = dropout_kernel.info.block_m - 9, 2 * dropout_kernel.info.block_n + 13
    for mask_dtype in mask_dtypes(dropout_kernel.info) or (None,):
        mask = mask_dtype and random_mask(mask_dtype, (2, 2, rows, keys), dropout_kernel.device)
        case = Case(
            **random_qkv(dropout_kernel, rows, keys),
            causal=causal,
            mask=mask,
            lengths_q=Lengths(seqlens=(rows - 9, rows)),
            lengths_k=Lengths(seqlens=(keys, keys - 20)),
            window=(keys // 2, 9),
            sinks=random_sinks(dropout_kernel, 2, torch.float32),
            p_dropout=0.4,
            philox=STATE,
        )
        check_case(dropout_kernel, case)


def test_softmax_lse_is_that_of_all_keys(dropout_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(dropout_kernel, 50, 200, batch=1), p_dropout=0.9, philox=STATE)
    _, lse = check_case(dropout_kernel, case)
    _, other = run_case(dropout_kernel, replace(case, p_dropout=1e-6, philox=PhiloxState(1, 2)))
    assert torch.equal(lse, other)


def test_a_row_may_lose_all_its_keys(dropout_kernel: TestedKernel) -> None:
    """Its output is 0, its softmax_lse that of the keys that were there."""
    case = Case(
        **random_qkv(dropout_kernel, 70, 3, batch=1), p_dropout=0.9, philox=STATE, causal=Causal.BOTTOM_RIGHT
    )
    out, lse = check_case(dropout_kernel, case)
    kept = dropout_mask(1, 2, 70, 3, 0.9, STATE, device=dropout_kernel.device)
    lost = ~(kept & visible(70, 3, case.causal, dropout_kernel.device)).any(-1)
    assert (out[lost] == 0).all()
    assert lse[:, :, 67:].isfinite().all()


def test_the_state_may_lie_on_the_device(dropout_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(dropout_kernel, 50, 70), p_dropout=0.3, philox=STATE)
    out, lse = run_case(dropout_kernel, case)
    other_out, other_lse = run_case(dropout_kernel, replace(case, philox_on_device=True))
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)


def test_other_states_give_other_masks(dropout_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(dropout_kernel, 50, 70, batch=1), p_dropout=0.3, philox=STATE)
    out, _ = run_case(dropout_kernel, case)
    for seed, offset in ((1, 0), (2**32, 0), (0, 1), (0, 2**32)):
        other = PhiloxState(STATE.seed ^ seed, STATE.offset ^ offset)
        other_out, _ = check_case(dropout_kernel, replace(case, philox=other))
        assert not torch.equal(out, other_out)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_query_heads_of_a_group_drop_differently(dropout_kernel: TestedKernel, heads_kv: int) -> None:
    inputs = random_qkv(dropout_kernel, 33, 70, batch=1, heads=4, heads_kv=heads_kv, bshd=True)
    check_case(dropout_kernel, Case(**inputs, p_dropout=0.3, philox=STATE), bshd=True)


@pytest.mark.kernels(device="cpu")
def test_schedules_do_not_change_a_bit(dropout_kernel: TestedKernel) -> None:
    info = dropout_kernel.info
    inputs = random_qkv(dropout_kernel, info.block_m + 1, (info.kv_groups + 1) * info.block_n + 5)
    case = Case(**inputs, causal=Causal.BOTTOM_RIGHT, p_dropout=0.3, philox=STATE)
    expected, expected_lse = run_case(dropout_kernel, case)
    library = dropout_kernel.library
    try:
        for seed in (1, 2):
            library.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            out, lse = run_case(dropout_kernel, case)
            assert torch.equal(out, expected), f"schedule seed {seed}"
            assert torch.equal(lse, expected_lse), f"schedule seed {seed}"
    finally:
        library.host_configure(num_threads=HOST_THREADS)


@pytest.mark.parametrize("p_dropout", [0.0, 1.0, -0.5, math.nan])
def test_refused(dropout_kernel: TestedKernel, p_dropout: float) -> None:
    """0 and 1 are the runtime's: plain kernels run the first, none the second."""
    case = Case(**random_qkv(dropout_kernel, 8, 8), p_dropout=0.5)
    params, _ = make_case_params(case, torch.empty_like(case.q), None)
    index = dropout_kernel.info.index
    assert dropout_kernel.library.refusal(index, params) is None
    params.p_dropout = p_dropout
    reason = dropout_kernel.library.refusal(index, params)
    assert reason is not None
    assert "p_dropout" in reason
