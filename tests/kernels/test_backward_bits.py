"""Gradients to the bit: 1000 repeats, and one example alone, in a batch, padded and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sdpa_cutlass.integrations.backward_ops  # noqa: F401  registers the operators
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.problem import Causal
from tests.kernels.backward import Case, execute, operands, prepare
from tests.kernels.harness import HOST_THREADS, TestedKernel

ROWS, KEYS, HEADS, HEADS_KV = 45, 70, 4, 2
REPEATS = 1000
P_DROPOUT = 0.17


@pytest.mark.kernels(head_dim=64)
def test_a_thousand_repeats_are_equal(backward_kernel: TestedKernel) -> None:
    """On the host, each in another order of warps and lanes."""
    is_host = backward_kernel.device == "cpu"
    case = Case(
        seqlen_q=21 if is_host else 500, seqlen_k=37 if is_host else 700, batch=1 if is_host else 4,
        heads=2 if is_host else 16, heads_kv=1 if is_host else 8, head_dim=64, causal=Causal.BOTTOM_RIGHT,
        p_dropout=P_DROPOUT if backward_kernel.info.has_dropout else 0.0, with_dlse=True,
    )  # fmt: skip
    launch = prepare(backward_kernel, case, operands(case, backward_kernel.dtype))
    execute(backward_kernel, launch)
    expected = [grad.tensor.clone() for grad in launch.grads]
    assert all(grad.isfinite().all() for grad in expected)
    host = library(Target.HOST) if is_host else None
    try:
        for repeat in range(1, REPEATS):
            for grad in launch.grads:
                grad.tensor.fill_(torch.nan)
            if host is not None:
                host.host_configure(schedule_seed=repeat, num_threads=HOST_THREADS)
            execute(backward_kernel, launch)
            for one, grad in zip(expected, launch.grads, strict=True):
                assert torch.equal(one, grad.tensor), repeat
    finally:
        if host is not None:
            host.host_configure(num_threads=HOST_THREADS)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": "bottom_right"}, {"causal": "top_left"}, {"window": [20, 7]}],
    ids=["full", "bottom_right", "top_left", "window"],
)
def test_alone_in_a_batch_padded_and_packed(backward_kernel: TestedKernel, options: dict[str, Any]) -> None:
    """The same bits in each. Dropout's mask counts examples: with it, the example is the first one."""
    has_dropout = backward_kernel.info.has_dropout
    place = 0 if has_dropout else 3
    head_dim, dtype, device = backward_kernel.info.head_dim, backward_kernel.dtype, backward_kernel.device
    options = options | {"kernel_name": backward_kernel.info.name}
    philox = None
    if has_dropout:
        options["p_dropout"] = P_DROPOUT
        philox = torch.tensor([5, 6], device=device)
    ops = torch.ops.sdpa_cutlass
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def example(rows: int, keys: int) -> list[torch.Tensor]:
        """dout, q, k, v, out and lse, [S, H, D] and [H, S]. No forward: any out and lse have gradients."""
        heads = (HEADS, HEADS, HEADS_KV, HEADS_KV, HEADS)
        lengths = (rows, rows, keys, keys, rows)
        tensors = [
            normal(length, count, head_dim).to(device, dtype)
            for length, count in zip(lengths, heads, strict=True)
        ]
        return [*tensors, (normal(HEADS, rows) + 5).to(device)]

    others = [example(rows, keys) for rows, keys in ((9, 70), (64, 1), (45, 71), (1, 64), (30, 30), (2, 3))]
    examples = [*others[:place], example(ROWS, KEYS), *others[place:]]

    def padded(which: list[list[torch.Tensor]], rows: int, keys: int) -> tuple[torch.Tensor, ...]:
        """Batches, with NaN behind the lengths."""
        sizes = (rows, rows, keys, keys, rows)
        found = []
        for i, size in enumerate(sizes):
            of_all = [one[i] for one in which]
            batch = of_all[0].new_full((len(which), size, *of_all[0].shape[1:]), torch.nan)
            for b, tensor in enumerate(of_all):
                batch[b, : tensor.shape[0]] = tensor
            found.append(batch)
        lse = which[0][5].new_full((len(which), HEADS, rows), torch.nan)
        for b, one in enumerate(which):
            lse[b, :, : one[5].shape[1]] = one[5]
        return (*found, lse)

    mine = examples[place]
    options_of_padded = options | {"layout": "bshd", "needs": [True] * 3 + [False]}
    alone = ops.attention_backward(
        *padded([mine], ROWS, KEYS), None, None, None, None, philox, **options_of_padded
    )
    expected = [grad[0] for grad in alone[:3]]
    assert all(grad.isfinite().all() and grad.any() for grad in expected)

    same = [example(ROWS, KEYS) for _ in range(6)]
    batch = padded([*same[:place], mine, *same[place:]], ROWS, KEYS)
    in_batch = ops.attention_backward(*batch, None, None, None, None, philox, **options_of_padded)

    rows, keys = (
        torch.tensor([one[i].shape[0] for one in examples], dtype=torch.int32, device=device) for i in (1, 2)
    )
    with_lengths = ops.attention_backward(
        *padded(examples, 130, 129), None, None, rows, keys, philox, **options_of_padded
    )

    packed = [torch.cat([one[i] for one in examples]) for i in range(5)]
    lse = torch.cat([one[5] for one in examples], 1)
    cu_rows, cu_keys = (torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int() for lengths in (rows, keys))
    of_packed = ops.attention_varlen_backward(
        *packed, lse, cu_rows, cu_keys, 130, 129, None, philox, needs=[True] * 3, **options
    )
    for i, grad in enumerate(expected):
        assert torch.equal(grad, in_batch[i][place]), "in a batch"
        size, first = grad.shape[0], int((cu_rows, cu_keys, cu_keys)[i][place])
        assert torch.equal(grad, with_lengths[i][place, :size]), "padded"
        assert torch.equal(grad, of_packed[i][first : first + size]), "packed"
