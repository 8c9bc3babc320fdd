"""Host library: no fused kernel meets a bank conflict, counted pass by pass.

Those of ldmatrix, stmatrix and cp.async in every build, those of plain loads and stores in observed ones,
which tests/mutation makes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels.general import Case, random_qkv, run_case
from tests.kernels.harness import TestedKernel, random_inputs, run_kernel

DESIGNED = 0  # extra passes, for every head_dim: see the swizzles in kernel_traits.cuh
_PASSES_PER_INSTRUCTION = 4  # of a warp: 32 lanes, 16 bytes each, 128 bytes a pass


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that launches append their counts to."""
    path = tmp_path / "statistics.jsonl"
    monkeypatch.setenv("SDPA_CUTLASS_HOST_STATISTICS", str(path))
    return path


def _check(kernel: TestedKernel, statistics: Path) -> None:
    assert statistics.exists(), f"{kernel.library.path} counts no bank conflicts: build it again"
    launches = [json.loads(line) for line in statistics.read_text().splitlines()]
    assert launches
    for launch in launches:
        assert launch["kernel"] == kernel.info.name
        # Hopper's kernels read by wgmma and load by TMA: what is left is stmatrix, in ldmatrix' count.
        for operation in ("ldmatrix",) if kernel.info.is_for_one_arch else ("ldmatrix", "cp_async"):
            assert launch[operation] > 0
            assert launch[operation] % _PASSES_PER_INSTRUCTION == 0
            passes, conflicts = launch[operation], launch[f"{operation}_conflicts"]
            assert conflicts == DESIGNED, (
                f"{kernel.info.name}: {conflicts} bank conflicts in {passes} passes of {operation}"
            )
        passes, conflicts = launch["plain"], launch["plain_conflicts"]
        assert conflicts == DESIGNED, (
            f"{kernel.info.name}: {conflicts} bank conflicts in {passes} passes of loads and stores"
        )


@pytest.mark.kernels(device="cpu")
def test_plain_kernels_have_no_bank_conflicts(fused_kernel: TestedKernel, statistics: Path) -> None:
    info = fused_kernel.info
    inputs = random_inputs(fused_kernel, info.block_m + 1, (2 * info.kv_groups + 1) * info.block_n + 5)
    run_kernel(fused_kernel, inputs, causal=fused_kernel.alignments[-1])
    _check(fused_kernel, statistics)


@pytest.mark.kernels(device="cpu")
def test_general_kernels_have_no_bank_conflicts(general_kernel: TestedKernel, statistics: Path) -> None:
    info = general_kernel.info
    keys = (2 * info.kv_groups + 1) * info.block_n + 5
    for head_dim in (info.head_dim, info.head_dim - 8):
        run_case(
            general_kernel, Case(**random_qkv(general_kernel, info.block_m + 1, keys, head_dim=head_dim))
        )
    _check(general_kernel, statistics)


@pytest.mark.kernels(device="cpu")
def test_dropout_kernels_have_no_bank_conflicts(dropout_kernel: TestedKernel, statistics: Path) -> None:
    info = dropout_kernel.info
    keys = (2 * info.kv_groups + 1) * info.block_n + 5
    run_case(dropout_kernel, Case(**random_qkv(dropout_kernel, info.block_m + 1, keys), p_dropout=0.5))
    _check(dropout_kernel, statistics)


@pytest.mark.kernels(device="cpu")
def test_split_kernels_have_no_bank_conflicts(split_kernel: TestedKernel, statistics: Path) -> None:
    keys = 5 * split_kernel.info.block_n + 5
    numbers = (1, 3) if split_kernel.info.packs_heads else (1,)  # Hopper's parts leave from registers
    for num_splits in numbers:
        inputs = random_qkv(split_kernel, 2, keys, heads=8, heads_kv=2)  # small parts: one launch
        run_case(split_kernel.with_splits(num_splits), Case(**inputs))
    _check(split_kernel, statistics)


@pytest.mark.kernels(device="cpu")
def test_quantized_kernels_have_no_bank_conflicts(quantized_kernel: TestedKernel, statistics: Path) -> None:
    """Of ldmatrix and cp.async; the pass before it uses little shared memory, which is not counted."""
    run_case(quantized_kernel, Case(**random_qkv(quantized_kernel, quantized_kernel.info.block_m + 1, 197)))
    launches = [json.loads(line) for line in statistics.read_text().splitlines()]
    # Hopper's kernels read by wgmma and load by TMA.
    reads_by_ldmatrix = not quantized_kernel.info.is_for_one_arch
    assert [launch["ldmatrix"] > 0 for launch in launches] == [False, reads_by_ldmatrix]
    for operation in ("ldmatrix", "cp_async"):
        passes, conflicts = launches[1][operation], launches[1][f"{operation}_conflicts"]
        assert conflicts == DESIGNED, (
            f"{quantized_kernel.info.name}: {conflicts} bank conflicts in {passes} passes of {operation}"
        )
