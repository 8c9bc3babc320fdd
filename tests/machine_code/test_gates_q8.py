"""What is derived for the quantised kernels of mma.sync, and what breaks a gate."""

from __future__ import annotations

from typing import Any

import pytest

from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo
from sdpa_cutlass.machine_code import gates_q8
from sdpa_cutlass.machine_code.kernels import KernelCode, LoopCode
from sdpa_cutlass.machine_code.mix import Mix
from tests.kernel_rows import GENERAL, SPLIT, kernel_row

TILE = "fmha_fwd_q8_sm89_d64_m64n64_s2_w4_f16"


def row(accuracy: Accuracy = Accuracy.INT8) -> KernelInfo:
    name = f"{TILE}_{'int8' if accuracy is Accuracy.INT8 else 'int8qk'}"
    return kernel_row(name, GENERAL, family=Family.FMHA_FWD_Q8, accuracy=accuracy, stages=2)


# 16 rows a warp: Q Kᵀ in 2 steps of 32 columns, P V in 2 of 32 keys, for the two kinds of scales.
LOOP = {"IMMA.16832.S8.S8": 16, "IMMA.16832.U8.S8": 32}
LOOP_QK = {"IMMA.16832.S8.S8": 16, "HMMA.16816.F32": 32, "LDSM.16.MT88.4": 16}
SCORES = 32  # of a thread


def code(kernel: KernelInfo, of_loop: dict[str, int], whole: int, **given: Any) -> KernelCode:
    """Two loops: one that masks, with twice as many instructions a pass as the other, which has `whole`."""
    loops = tuple(
        LoopCode(address=at, always=1, mix=Mix(of_loop), whole=Mix({"FFMA": slots}))
        for at, slots in ((0x100, 2 * whole), (0x200, whole))
    )
    usual = {
        "name": kernel.name, "arch": 89, "compiler": "13.0.88", "registers": 168, "stack_bytes": 0,
        "static_smem_bytes": 0, "code_bytes": 1, "mix": Mix(of_loop), "loops": loops,
    }  # fmt: skip
    return KernelCode(**{**usual, **given})


def test_good_code_has_no_problems() -> None:
    assert gates_q8.problems(code(row(), LOOP, 10 * SCORES), row()) == []
    qk = row(Accuracy.INT8_QK)
    assert gates_q8.problems(code(qk, LOOP_QK, 8 * SCORES), qk) == []


@pytest.mark.parametrize(
    ("accuracy", "mix", "most"),
    [(Accuracy.INT8, LOOP, 10.3), (Accuracy.INT8_QK, LOOP_QK, 8.2)],
    ids=["int8", "int8_qk"],
)
def test_a_score_takes_few_instructions(accuracy: Accuracy, mix: dict[str, int], most: float) -> None:
    kernel = row(accuracy)
    fitting = int(most * SCORES)
    assert gates_q8.problems(code(kernel, mix, fitting), kernel) == []
    (found,) = gates_q8.problems(code(kernel, mix, fitting + 1), kernel)
    said = f"{(fitting + 1) / SCORES:.2f} instructions a score where nothing is masked; at most {most}"
    assert found == f"{kernel.name}: {said}"
    masked = code(kernel, mix, fitting + 1, name=f"{kernel.name}_bool")
    assert gates_q8.problems(masked, kernel) == []


def test_split_kernels_are_bound_by_memory() -> None:
    kernel = kernel_row(
        "fmha_fwd_q8_sm89_d64_m16n64_s1_w4_g4_f16_int8_split", SPLIT, family=Family.FMHA_FWD_Q8,
        accuracy=Accuracy.INT8, block_m=16, kv_groups=4,
    )  # fmt: skip
    assert gates_q8.scores_of_a_thread(kernel) == SCORES
    (loop, _) = code(kernel, {"IMMA.16832.S8.S8": 16, "IMMA.16832.U8.S8": 16}, 20 * SCORES).loops
    found = code(kernel, dict(loop.mix.opcodes), 20 * SCORES, loops=(loop,))
    assert gates_q8.problems(found, kernel) == []


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"stack_bytes": 8}, "stack is 8 bytes; it must be 0"),
        ({"mix": Mix({**LOOP, "LDL": 1})}, "1 loads and stores of local memory; there must be none"),
        ({"loops": ()}, "0 main loops; there must be 2"),
    ],
)
def test_what_breaks_a_gate(given: dict[str, Any], complaint: str) -> None:
    found = code(row(), LOOP, 10 * SCORES, **given)
    assert gates_q8.problems(found, row()) == [f"{row().name}: {complaint}"]


def test_a_missing_product_is_found() -> None:
    found = gates_q8.problems(code(row(), {**LOOP, "IMMA.16832.U8.S8": 31}, 10 * SCORES), row())
    assert len(found) == 2  # one for each loop
    assert all("47 IMMA" in line for line in found)
