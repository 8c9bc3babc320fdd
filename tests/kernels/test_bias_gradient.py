"""The gradient of a bias, against autograd in float64: every broadcast, types, masks, lengths, bits."""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any

import pytest
import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.problem import Causal
from tests.kernels.backward import (
    ALL,
    NONE,
    Case,
    check_bias,
    execute,
    operands,
    prepare,
    run,
    run_bias,
)
from tests.kernels.harness import HOST_THREADS, TestedKernel

BATCH, HEADS, HEADS_KV, ROWS, KEYS = 2, 4, 2, 67, 133
SHAPES = [
    (batch, heads, rows, keys)
    for batch in (1, BATCH)
    for heads in (1, HEADS)
    for rows in (1, ROWS)
    for keys in (1, KEYS)
]
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def bias(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case_for(kernel: TestedKernel, mask: torch.Tensor, **options: Any) -> Case:
    """A case that this kernel takes: its own head_dim, dropout where it has it."""
    given: dict[str, Any] = {
        "seqlen_q": ROWS, "seqlen_k": KEYS, "batch": BATCH, "heads": HEADS, "heads_kv": HEADS_KV,
        "head_dim": kernel.info.head_dim, "mask": mask,
    }  # fmt: skip
    if kernel.info.has_dropout:
        given["p_dropout"] = 0.17
    return Case(**(given | options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(masked_backward: TestedKernel, shape: tuple[int, ...]) -> None:
    """Summed over what it is broadcast over; where that are keys, softmax_lse has a gradient, or all is 0."""
    place = SHAPES.index(shape)
    mask = bias(*shape, dtype=TYPES[place % 3])
    causal = (None, *Causal)[place // 2 % 3]
    check_bias(masked_backward, case_for(masked_backward, mask, causal=causal, with_dlse=shape[3] == 1))


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 97), (97, 1), (64, 64), (65, 63), (130, 129)], ids=str)
def test_sizes(masked_backward: TestedKernel, sizes: tuple[int, int], causal: Causal | None) -> None:
    rows, keys = sizes
    options = {"seqlen_q": rows, "seqlen_k": keys, "heads": 2, "heads_kv": 2, "causal": causal}
    for mask in (bias(1, 2, rows, keys), bias(2, 1, 1, keys, dtype=torch.float16)):
        check_bias(masked_backward, case_for(masked_backward, mask, **options), few_keys=True)


LAYOUTS = {
    "transposed": lambda: bias(1, HEADS, KEYS, ROWS).mT,
    "heads_last": lambda: bias(1, ROWS, KEYS, HEADS, dtype=torch.float16).permute(0, 3, 1, 2),
    "every_other_key": lambda: bias(BATCH, 1, ROWS, 2 * KEYS, dtype=torch.bfloat16)[..., ::2],
    "expanded": lambda: bias(1, 1, ROWS, KEYS).expand(BATCH, HEADS, ROWS, KEYS),
    "expanded_rows": lambda: bias(1, HEADS, 1, KEYS).expand(1, HEADS, ROWS, KEYS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(masked_backward: TestedKernel, layout: str) -> None:
    """Expanded dimensions are the bias's own: the sum over them is autograd's."""
    check_bias(masked_backward, case_for(masked_backward, LAYOUTS[layout](), causal=Causal.BOTTOM_RIGHT))


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("batch", [1, BATCH])
def test_biases_that_are_read_by_pairs(masked_backward: TestedKernel, batch: int, dtype: torch.dtype) -> None:
    """The same bits where the same bias is read one by one, and where its gradient lies in odd rows."""
    mask = bias(batch, HEADS, 130, 136, dtype=dtype)
    options = {"seqlen_q": 130, "seqlen_k": 136}
    by_pairs = check_bias(masked_backward, case_for(masked_backward, mask, **options))
    one_by_one = case_for(masked_backward, mask.mT.contiguous().mT, **options)
    assert torch.equal(run_bias(masked_backward, one_by_one), by_pairs)
    launch = prepare(
        masked_backward, one_by_one, operands(one_by_one, masked_backward.dtype), needs_dbias=True
    )
    odd = torch.zeros(batch, HEADS, 130, 137, dtype=dtype, device=masked_backward.device)
    launch.params.dbias = odd.data_ptr()
    for i, stride in enumerate(odd.stride()):
        launch.params.dbias_stride[i] = stride if odd.shape[i] > 1 else 0
    execute(masked_backward, launch)
    assert torch.equal(odd[..., :136].cpu(), by_pairs.cpu())
    assert not odd[..., 136].any()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (40, 56), (56, 24)])
def test_smaller_head_dims(masked_backward: TestedKernel, head_dim: int, head_dim_v: int) -> None:
    if max(head_dim, head_dim_v) > masked_backward.info.head_dim:
        pytest.skip("a larger head_dim than this kernel's")
    case = case_for(masked_backward, bias(1, HEADS, ROWS, KEYS), head_dim=head_dim, head_dim_v=head_dim_v)
    check_bias(masked_backward, case)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scales(masked_backward: TestedKernel, scale: float) -> None:
    check_bias(masked_backward, case_for(masked_backward, bias(1, HEADS, ROWS, KEYS), scale=scale, bshd=True))


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize("window", [(20, 7), (-1, 3), (70, -1)])
def test_windows(masked_backward: TestedKernel, window: tuple[int, int], causal: Causal | None) -> None:
    for mask in (bias(1, HEADS, ROWS, KEYS), bias(1, HEADS, 1, KEYS)):
        check_bias(
            masked_backward, case_for(masked_backward, mask, window=window, causal=causal), few_keys=True
        )


def test_sinks_and_the_gradient_of_lse(masked_backward: TestedKernel) -> None:
    sinks = torch.tensor([0.5, -2.0, 0.0, 1.0])
    for with_dlse in (False, True):
        for mask in (bias(1, HEADS, ROWS, KEYS), bias(BATCH, 1, ROWS, 1)):
            case = case_for(masked_backward, mask, sinks=sinks, with_dlse=with_dlse, causal=Causal.TOP_LEFT)
            check_bias(masked_backward, case, few_keys=True)


def test_hidden_elements_have_none(masked_backward: TestedKernel) -> None:
    """Rows that see no key, keys that no row sees, -inf; NaN in bias, keys and values behind the diagonal."""
    mask = bias(1, HEADS, ROWS, KEYS)
    mask[..., 5:9] = -math.inf
    mask[:, :, 11] = -math.inf
    case = case_for(masked_backward, mask, causal=Causal.TOP_LEFT)
    expected = check_bias(masked_backward, case, few_keys=True)
    above = torch.ones(ROWS, KEYS, dtype=torch.bool).triu(1)
    assert not expected[..., above].any()
    assert not expected[..., 5:9].any()
    assert not expected[:, :, 11].any()
    launch = prepare(masked_backward, case, operands(case, masked_backward.dtype), NONE, needs_dbias=True)
    held = launch.kept[2].mask  # type: ignore[attr-defined]
    held[0].copy_(held[0].masked_fill(above.to(held.device), math.nan))
    for tensor in launch.inputs[1:3]:
        tensor[:, :, ROWS:] = math.nan
    execute(masked_backward, launch)
    assert launch.dbias is not None
    assert torch.equal(launch.dbias.tensor, expected)


@pytest.mark.parametrize("causal", [None, *Causal])
def test_lengths(masked_backward: TestedKernel, causal: Causal | None) -> None:
    """Elements beyond a length add nothing, whatever they are."""
    rows, keys = (70, 3, 0, 65), (5, 133, 70, 0)
    options = {"seqlen_q": 70, "batch": 4, "causal": causal, "seqlens_q": rows, "seqlens_k": keys}
    for shape in ((4, 1, 70, KEYS), (1, HEADS, 70, KEYS), (4, 1, 1, KEYS), (1, 1, 70, KEYS)):
        mask = bias(*shape)
        if shape[0] == 4 and shape[2] > 1:
            for b in range(4):
                mask[b, :, rows[b] :] = math.nan
                mask[b, :, :, keys[b] :] = math.nan
        case = case_for(masked_backward, mask, **options)
        clean = check_bias(masked_backward, case, few_keys=True)
        given = operands(case, masked_backward.dtype)
        launch = prepare(masked_backward, case, given, NONE, needs_dbias=True)
        q, k, v, dout, out = launch.inputs
        for b in range(4):
            for tensor, length in ((q, rows[b]), (dout, rows[b]), (out, rows[b]), (k, keys[b]), (v, keys[b])):
                tensor[b, :, length:] = math.nan
        execute(masked_backward, launch)
        assert launch.dbias is not None
        assert torch.equal(launch.dbias.tensor, clean)


@pytest.mark.parametrize("shape", [(1, HEADS, ROWS, KEYS), (1, 1, 1, KEYS), (1, 1, ROWS, 1)], ids=str)
def test_the_same_bits_in_every_schedule_and_next_to_others(
    masked_backward: TestedKernel, shape: tuple[int, ...]
) -> None:
    """Nor do the other gradients change, whether this one is asked for or not."""
    case = case_for(masked_backward, bias(*shape), causal=Causal.BOTTOM_RIGHT, with_dlse=True)
    given = operands(case, masked_backward.dtype)
    expected = run_bias(masked_backward, case, given)
    assert torch.equal(run_bias(masked_backward, case, given, ALL), expected)
    others = run(masked_backward, case, given)
    launch = prepare(masked_backward, case, given, needs_dbias=True)
    execute(masked_backward, launch)
    assert all(torch.equal(one, grad.tensor) for one, grad in zip(others, launch.grads, strict=True))
    is_host = masked_backward.device == "cpu"
    host = library(Target.HOST) if is_host else None
    try:
        for seed in (1, 2, 3) if is_host else range(200):
            if host is not None:
                host.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            again = run_bias(masked_backward, case, given)
            assert torch.equal(again, expected), f"schedule seed {seed}"
    finally:
        if host is not None:
            host.host_configure(num_threads=HOST_THREADS)


@pytest.mark.parametrize(("batch", "heads"), [(19, 8), (3, 100)])
def test_parts_of_the_batch(masked_backward: TestedKernel, batch: int, heads: int) -> None:
    """19 parts of a batch; two batches and, for the last CTAs, one."""
    options = {"seqlen_q": 20, "seqlen_k": 29, "batch": batch, "heads": heads, "heads_kv": heads // 2}
    seen = {"causal": Causal.BOTTOM_RIGHT, "seqlens_q": (20, 0, 7) * 6 + (20,), "seqlens_k": (29,) * batch}
    for shape, dtype in (((1, heads, 20, 29), torch.float16), ((1, heads, 1, 29), torch.float32)):
        check_bias(masked_backward, case_for(masked_backward, bias(*shape, dtype=dtype), **options))
    if batch == 19:
        case = case_for(masked_backward, bias(1, heads, 20, 1), **options, **seen, with_dlse=True)
        check_bias(masked_backward, case, few_keys=True)


@pytest.mark.parametrize(("batch", "heads", "of_a_part"), [(19, 8, 1), (3, 100, 2), (5, 100, 3)])
def test_the_order_of_the_batches(
    masked_backward: TestedKernel, batch: int, heads: int, of_a_part: int
) -> None:
    """Those of a part one after the other, then the parts, in float32: the bits say so."""
    if masked_backward.info.has_dropout:
        pytest.skip("sums of a part are scaled behind it")
    options = {"seqlen_q": 20, "seqlen_k": 29, "batch": batch, "heads": heads, "heads_kv": heads // 2}
    mask = bias(1, heads, 20, 29)
    given = operands(case_for(masked_backward, mask, **options), masked_backward.dtype)
    of_each = run_bias(
        masked_backward, case_for(masked_backward, mask.repeat(batch, 1, 1, 1), **options), given
    )

    def added(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        total = torch.zeros_like(tensors[0])
        for tensor in tensors:
            total += tensor
        return total

    expected = added(tuple(added(part.split(1)) for part in of_each.split(of_a_part)))
    found = run_bias(masked_backward, case_for(masked_backward, mask, **options), given)
    assert torch.equal(found, expected)


@pytest.mark.kernels(head_dim=64)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_workspace_of_parts_is_bounded(masked_backward: TestedKernel, rows: int) -> None:
    """4 MiB behind the row statistics, however many batches there are; nothing for a bias of each."""
    for heads, batch in product((2, 6, 24, 100), (2, 3, 64, 5000)):
        options = {"batch": 2, "heads": heads, "heads_kv": heads}
        case = case_for(masked_backward, bias(1, heads, rows, KEYS), **options)
        launch = prepare(masked_backward, case, operands(case, masked_backward.dtype), needs_dbias=True)
        launch.params.forward.batch = batch
        index, of_library = masked_backward.info.index, masked_backward.library
        statistics = 8 * 128 * heads * batch
        parts = of_library.backward_workspace_bytes(index, launch.params) - statistics
        assert (parts > 0) == (256 // (heads * -(-rows // 64) * -(-KEYS // 64)) > 1)
        assert parts <= 2**22
        assert parts % (4 * heads * rows * KEYS) == 0
        launch.params.dbias_stride[0] = heads * rows * KEYS
        assert of_library.backward_workspace_bytes(index, launch.params) == statistics


def test_alone_and_in_a_batch(masked_backward: TestedKernel) -> None:
    """What belongs to one example has the bits that it has alone. Dropout's mask counts examples."""
    mask = bias(BATCH, 1, ROWS, KEYS)
    given = operands(case_for(masked_backward, mask), masked_backward.dtype)
    both = run_bias(masked_backward, case_for(masked_backward, mask), given)
    first = type(given)(*(tensor[:1] for tensor in given))
    alone = run_bias(masked_backward, case_for(masked_backward, mask[:1], batch=1), first)
    assert torch.equal(both[:1], alone)


def test_the_gradients_of_a_row_add_up_to_nothing(masked_backward: TestedKernel) -> None:
    """With nothing else to compare with: what is added to all keys of a row changes nothing."""
    case = case_for(masked_backward, bias(BATCH, HEADS, ROWS, KEYS), causal=Causal.BOTTOM_RIGHT)
    dbias = run_bias(masked_backward, case).double()
    rows = dbias.sum(-1).abs().max()
    assert rows <= 16 * torch.finfo(masked_backward.dtype).eps * dbias.abs().sum(-1).max()


REFUSED = {
    "no mask": ({"mask": 0, "mask_type": 0}, {}, "dbias is given and mask_type is 0; a mask that is added"),
    "a boolean mask": ({"mask_type": 1}, {}, "dbias is given and mask_type is 1; a mask that is added has 2"),
    "its type": ({}, {"dbias_type": 1}, "dbias_type is 1; allowed are 0, and 2 to 4"),
    "no type": ({}, {"dbias_type": 0}, "dbias is 0x.* and dbias_type 0; allowed are null with 0"),
    "no dbias": ({}, {"dbias": 0}, "dbias is .* and dbias_type 4; allowed are null with 0, or neither"),
    "a sum over what differs": (
        {},
        {"dbias_stride": (0, 0, 0, 1)},
        "dbias: row stride is 0, and that of mask",
    ),
    "its address": ({}, {"dbias": 2}, "dbias is 0x2; it must be a multiple of 4"),
    "packed": ({"cu_seqlens_q": 64, "cu_seqlens_k": 64}, {}, "packed sequences have no gradient of a bias"),
    "reserved": ({}, {"reserved_end": 1}, "reserved is 0 and reserved_end 1; both must be 0"),
    "nothing asked for": ({}, {"dbias": 0, "dbias_type": 0}, "dq, dk, dv and dbias are null"),
}


@pytest.mark.kernels(head_dim=64)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(masked_backward: TestedKernel, what: str) -> None:
    of_forward, fields, message = REFUSED[what]
    case = case_for(masked_backward, bias(1, 1, ROWS, KEYS))
    launch = prepare(masked_backward, case, operands(case, masked_backward.dtype), NONE, needs_dbias=True)
    for name, value in of_forward.items():
        setattr(launch.params.forward, name, value)
    for name, value in fields.items():
        setattr(launch.params, name, value)
    refusal = masked_backward.library.backward_refusal(masked_backward.info.index, launch.params)
    assert refusal is not None
    assert re.search(message, refusal), refusal
