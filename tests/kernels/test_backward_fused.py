"""What only the fused backward kernels have: many tiles of keys that add to one dQ, and what they refuse."""

from __future__ import annotations

import re

import pytest
import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.problem import Causal
from tests.kernels.backward import check, execute, operands, prepare, run
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.test_backward import case_for

OPTIONS: dict[str, dict[str, object]] = {
    "full": {},
    "top_left": {"causal": Causal.TOP_LEFT},
    "bottom_right": {"causal": Causal.BOTTOM_RIGHT},
    "window": {"window": (90, 40)},
    "lengths": {"batch": 3, "seqlens_q": (200, 131, 1), "seqlens_k": (517, 300, 129)},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_many_tiles_of_keys(fused_backward: TestedKernel, kind: str) -> None:
    """Within the rule, and the same bits in other orders of warps and with one CTA at a time."""
    case = case_for(fused_backward, 200, 517, heads=2, heads_kv=1, **OPTIONS[kind])
    expected = check(fused_backward, case)
    if fused_backward.device == "cuda":
        assert all(map(torch.equal, expected, run(fused_backward, case)))
        return
    host = library(Target.HOST)
    try:
        for seed, threads in ((3, 1), (4, HOST_THREADS), (5, 2)):
            host.host_configure(schedule_seed=seed, num_threads=threads)
            assert all(map(torch.equal, expected, run(fused_backward, case))), (seed, threads)
    finally:
        host.host_configure(num_threads=HOST_THREADS)


def test_a_workspace_serves_launch_after_launch(fused_backward: TestedKernel) -> None:
    """Turns and tickets begin anew in each."""
    case = case_for(fused_backward, 97, 300, causal=Causal.BOTTOM_RIGHT)
    launch = prepare(fused_backward, case, operands(case, fused_backward.dtype))
    execute(fused_backward, launch)
    expected = [grad.tensor.clone() for grad in launch.grads]
    for grad in launch.grads:
        grad.tensor.fill_(torch.nan)
    execute(fused_backward, launch)
    assert all(torch.equal(one, grad.tensor) for one, grad in zip(expected, launch.grads, strict=True))


ROWS_OF_8_GIB = (8 << 30) // (4 * 128 + 8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"seqlen_q": 2 * ROWS_OF_8_GIB}, "workspace has [0-9]+ bytes; .* at most 8589934592"),
        ({"mask_type": 1}, "mask"),
        ({"p_dropout": 0.5}, "dropout"),  # or none, where the kernel drops
    ],
    ids=["workspace", "mask", "dropout"],
)
def test_what_is_refused(fused_backward: TestedKernel, sizes: dict[str, float], message: str) -> None:
    case = case_for(fused_backward, 64, 64)
    launch = prepare(fused_backward, case, operands(case, fused_backward.dtype))
    forward = launch.params.forward
    for name, value in sizes.items():
        setattr(forward, name, value)
    if "p_dropout" in sizes:
        forward.p_dropout = 0.0 if fused_backward.info.has_dropout else 0.5
    if "mask_type" in sizes:
        forward.mask = forward.q
    refusal = fused_backward.library.backward_refusal(fused_backward.info.index, launch.params)
    assert refusal is not None
    assert re.search(message, refusal), refusal
