"""Quantised kernels do what docs/quantised.md says: the bytes and scales of the pre-pass bit for bit, out and
softmax_lse to 1e-3 of the same arithmetic in NumPy.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.quantised_data import FAMILIES, family
from sdpa_cutlass.library.registry import Accuracy, Family
from sdpa_cutlass.problem import Causal
from tests.kernels import quantized_model as model
from tests.kernels.general import Case, Lengths, launch, make_case_params, random_qkv, run_case
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import MASK_DTYPES, random_mask
from tests.kernels.numerics import visible

_ALIGNMENT = 256
_LSE_TOLERANCE = 2e-3  # exp2 and log2 of the machine, and float32 sums in another order
_OUT_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # a unit in the last place, of P too


def floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def is_int8(kernel: TestedKernel) -> bool:
    return kernel.info.accuracy is Accuracy.INT8


def family_case(
    kernel: TestedKernel, kind: str, *sizes: int, causal: Causal | None = None, seed: int = 0
) -> Case:
    """sizes: batch, heads, heads_kv, seqlen_q, seqlen_k; head_dim is the kernel's."""
    tensors = family(kind, *sizes, kernel.info.head_dim, seed=seed)
    q, k, v = (tensor.to(kernel.device, kernel.dtype) for tensor in tensors)
    return Case(q=q, k=k, v=v, causal=causal)


def check_model(kernel: TestedKernel, case: Case) -> int:
    """Runs a case and compares it with the model. Returns the largest byte of P."""
    return compare_with_model(kernel, case, *run_case(kernel, case))


def compare_with_model(kernel: TestedKernel, case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> int:
    """Compares every head of a case that is not packed and has all rows. Returns the largest byte of P.

    Raises AssertionError.
    """
    assert lse is not None
    repeat = case.q.shape[1] // case.k.shape[1]
    mask = case.full_mask
    largest = 0
    for b, sequence in enumerate(case.lengths_k.sequences(*case.k.shape[::2])):
        causal = visible(case.seqlen_q, sequence.length, case.causal, "cpu").numpy()
        count = int(causal.any(0).sum())  # keys behind all rows are left out: the mean is that of the others
        for h in range(case.q.shape[1]):
            seen, bias = causal[:, :count], None
            if mask is not None and mask.dtype is torch.bool:
                seen = seen & mask[b, h, :, :count].cpu().numpy()
            elif mask is not None:
                bias = floats(mask[b, h, :, :count])
            q, k, v = (
                floats(case.q[b, h]),
                floats(case.k[b, h // repeat, :count]),
                floats(case.v[b, h // repeat, :count]),
            )
            want, want_lse, most = model.attend(
                q,
                k,
                v,
                case.softmax_scale,
                seen,
                columns=kernel.info.head_dim,
                has_byte_values=is_int8(kernel),
                starts_at_magic=kernel.info.family is Family.FMHA_FWD_Q8,
                to_element=np.float16 if kernel.dtype is torch.float16 else None,
                bias=bias,
            )
            largest = max(largest, most)
            rounded = torch.from_numpy(want).to(kernel.dtype).double()
            found = out[b, h].double().cpu()
            error = (found - rounded).norm().item() / max(rounded.norm().item(), 1e-30)
            assert error <= _OUT_TOLERANCE[kernel.dtype], (
                f"(a) max error {error:.2e} to the model, {kernel}, {case}"
            )
            same = floats(lse[b, h]) == want_lse  # infinities
            off = np.abs(np.where(same, 0, floats(lse[b, h])) - np.where(same, 0, want_lse))
            bound = _LSE_TOLERANCE * max(1.0, np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0))
            assert off.max() <= bound, (
                f"(c) softmax_lse is {off.max():.2e} from the model's, {kernel}, {case}"
            )
    return largest


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(quantized_kernel: TestedKernel, kind: str) -> None:
    """Both causal alignments in turn; the largest byte of P is 252, up to the rounding that kCap allows."""
    for causal in (None, Causal.BOTTOM_RIGHT):
        largest = check_model(
            quantized_kernel, family_case(quantized_kernel, kind, 1, 2, 1, 70, 150, causal=causal)
        )
        assert largest <= 254


@pytest.mark.parametrize("seqlen_k", [1, 15, 63, 64, 65, 127, 129, 513])
@pytest.mark.parametrize("seqlen_q", [1, 127, 129])
def test_sizes(quantized_kernel: TestedKernel, seqlen_q: int, seqlen_k: int) -> None:
    causal = (None, Causal.TOP_LEFT, Causal.BOTTOM_RIGHT)[(seqlen_q + seqlen_k) % 3]
    check_model(
        quantized_kernel, Case(**random_qkv(quantized_kernel, seqlen_q, seqlen_k, batch=1), causal=causal)
    )


@pytest.mark.parametrize("causal", [None, *Causal], ids=str)
def test_lengths(quantized_kernel: TestedKernel, causal: Causal | None) -> None:
    """Of the keys within a sequence's length those count that some row sees."""
    inputs = random_qkv(quantized_kernel, 40, 200, batch=3)
    check_model(quantized_kernel, Case(**inputs, causal=causal, lengths_k=Lengths(seqlens=(200, 97, 64))))


@pytest.mark.parametrize("head_dim", [8, 40, 80])
def test_smaller_head_dims(quantized_kernel: TestedKernel, head_dim: int) -> None:
    """Columns beyond head_dim are zeros, and neither enter the sums nor the outputs."""
    if head_dim > quantized_kernel.info.head_dim:
        pytest.skip("larger than the kernel's")
    for head_dim_v in (head_dim, 16):
        inputs = random_qkv(quantized_kernel, 40, 100, batch=1, head_dim=head_dim, head_dim_v=head_dim_v)
        check_model(quantized_kernel, Case(**inputs))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 40.0])
def test_scales(quantized_kernel: TestedKernel, scale: float) -> None:
    check_model(quantized_kernel, Case(**random_qkv(quantized_kernel, 20, 130, batch=1), scale=scale))


@pytest.mark.kernels(masks=True)
@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "kbias", "vout"])
def test_masks(quantized_kernel: TestedKernel, kind: str, dtype: torch.dtype) -> None:
    """With blocks whose tokens share scales, and others; rows that see nothing of some blocks."""
    for seed, causal in enumerate((None, *Causal)):
        case = family_case(quantized_kernel, kind, 1, 2, 1, 70, 150, causal=causal, seed=seed)
        mask = random_mask(dtype, (1, 2, 70, 150), quantized_kernel.device, seed=seed)
        mask[:, 0, :20, 64:128] = False if dtype is torch.bool else -math.inf
        assert check_model(quantized_kernel, dataclasses.replace(case, mask=mask)) <= 254


def run_with_room(
    kernel: TestedKernel, case: Case, *, heads: int, blocks: int, batch_heads: int
) -> tuple[model.Room, torch.Tensor]:
    """(what the first launch left in a workspace that was full of NaNs, out), on the CPU."""
    out = torch.empty(case.out_shape, dtype=kernel.dtype, device=kernel.device)
    params, held = make_case_params(case, out, None)
    params.num_splits = min(kernel.num_splits, 1)
    of_first = kernel.library.workspace_bytes(kernel.info.index, params)
    params.num_splits = kernel.num_splits
    size = kernel.library.workspace_bytes(kernel.info.index, params)
    memory = torch.full((size + _ALIGNMENT,), 0xFF, dtype=torch.uint8, device=kernel.device)
    offset = -memory.data_ptr() % _ALIGNMENT
    params.workspace, params.workspace_bytes = memory.data_ptr() + offset, size
    launch(kernel, params, held)
    on_cpu = memory[offset : offset + of_first].cpu().clone()
    copy = (ctypes.c_uint8 * of_first).from_buffer_copy(on_cpu.numpy().tobytes())
    room = model.Room.over(
        ctypes.addressof(copy),
        of_first,
        heads=heads,
        blocks=blocks,
        batch_heads=batch_heads,
        columns=kernel.info.head_dim,
        int8=is_int8(kernel),
    )
    room.__dict__["memory"] = copy  # the arrays are views of it
    return room, out


def same_bits(found: np.ndarray, want: np.ndarray, what: str) -> None:
    different = found != want
    different &= ~(np.isnan(found.astype(np.float64)) & np.isnan(want.astype(np.float64)))
    assert not different.any(), (
        f"{what}: {int(different.sum())} of {different.size} differ, first {np.argwhere(different)[0]}"
    )


def check_head(
    kernel: TestedKernel,
    room: model.Room,
    head: int,
    first: int,
    mean: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
) -> None:
    """The blocks of `head` from row `first` on are those of keys k and values v."""
    columns = kernel.info.head_dim
    keys = model.quantize_keys(k, columns)
    rows = slice(first, first + len(keys.bytes))
    blocks = slice(first // 64, (first + len(keys.bytes)) // 64)
    same_bits(mean, keys.mean, "the mean of the keys")
    same_bits(room.k_hat[head, rows], keys.bytes, "bytes of K")
    same_bits(room.k_scale[head, blocks], keys.scales, "scales of K")
    if room.v_hat is None or room.v_inverse is None or room.v_log2 is None:
        return
    values = model.quantize_values(v, columns)
    same_bits(room.v_hat[head, rows], values.bytes, "bytes of V")
    same_bits(room.v_inverse[head, rows], values.inverse, "inverse scales of V")
    np.testing.assert_allclose(room.v_log2[head, rows], values.log2, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("kind", ["normal", "kbias", "vout"])
@pytest.mark.parametrize("seqlen_k", [1, 50, 64, 65, 200])
def test_bytes_and_scales(quantized_kernel: TestedKernel, kind: str, seqlen_k: int) -> None:
    """Bit for bit, in whole blocks: rows behind the last key are zeros."""
    case = family_case(quantized_kernel, kind, 2, 2, 2, 3, seqlen_k, seed=seqlen_k)
    blocks = -(-seqlen_k // 64)
    room, _ = run_with_room(quantized_kernel, case, heads=4, blocks=blocks, batch_heads=4)
    for head in range(4):
        k, v = floats(case.k[head // 2, head % 2]), floats(case.v[head // 2, head % 2])
        check_head(quantized_kernel, room, head, 0, room.k_mean[head], k, v)


def test_bytes_of_packed_sequences(quantized_kernel: TestedKernel) -> None:
    """Sequence b starts at row 64 (first / 64 + b) of a head, and so none overlaps another."""
    cu_seqlens = (0, 70, 70, 71, 199, 260)
    case = Case(
        **random_qkv(quantized_kernel, 10, 260, batch=1, heads=2, heads_kv=2),
        lengths_q=Lengths(cu_seqlens=(0, 2, 4, 6, 8, 10)),
        lengths_k=Lengths(cu_seqlens=cu_seqlens),
    )
    room, _ = run_with_room(quantized_kernel, case, heads=2, blocks=260 // 64 + 6, batch_heads=10)
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        for head in range(2):
            if end > begin:
                k, v = floats(case.k[0, head, begin:end]), floats(case.v[0, head, begin:end])
                mean = room.k_mean[2 * b + head]
                check_head(quantized_kernel, room, head, 64 * (begin // 64 + b), mean, k, v)


def test_sampled_keys_lie_within_the_length(quantized_kernel: TestedKernel) -> None:
    """Keys at and beyond seqlens_k neither enter the mean nor any scale, whatever they are."""
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 4, 150)
    case.k[:, :, 77:] = torch.nan
    case.v[:, :, 77:] = torch.inf
    short = Case(q=case.q, k=case.k, v=case.v, lengths_k=Lengths(seqlens=(77,)))
    room, out = run_with_room(quantized_kernel, short, heads=1, blocks=3, batch_heads=1)
    check_head(
        quantized_kernel, room, 0, 0, room.k_mean[0], floats(case.k[0, 0, :77]), floats(case.v[0, 0, :77])
    )
    assert out.isfinite().all()
