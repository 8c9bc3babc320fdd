"""What is predicted for Ada from machine code: units, clocks, and the pass that makes bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks import quantised_on_ada
from benchmarks.quantised_on_ada import Predicted, predict, rows_of, table
from sdpa_cutlass.choice.cost.model import OVERLAP_LOSS
from sdpa_cutlass.cli.predictions import L4, RTX_4090
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo
from sdpa_cutlass.machine_code.kernels import KernelCode, LoopCode
from sdpa_cutlass.machine_code.mix import Mix
from tests.kernel_rows import GENERAL, kernel_row

EXACT = kernel_row("fmha_fwd_sm89_d64_m64n64_s2_w4_f16")
SLOW = kernel_row("fmha_fwd_sm89_d64_m64n64_s1_w4_f16")
INT8 = kernel_row(
    "fmha_fwd_q8_sm89_d64_m64n64_s2_w4_f16_int8", GENERAL, family=Family.FMHA_FWD_Q8, accuracy=Accuracy.INT8
)
SCORES = 32  # of a thread, in a pass
WHOLE = {
    EXACT: {"HMMA.16816.F32": 64, "LDSM.16.M88.4": 32, "MUFU.EX2": 32, "FFMA": 192},
    SLOW: {"HMMA.16816.F32": 64, "LDSM.16.M88.4": 32, "MUFU.EX2": 32, "FFMA": 400},
    INT8: {"IMMA.16832.S8.S8": 32, "LDSM.16.M88.4": 16, "MUFU.EX2": 32, "FFMA": 240},
}


def code(kernel: KernelInfo, **more: int) -> KernelCode:
    whole = Mix(WHOLE[kernel] | more)
    masking = dataclasses.replace(whole, opcodes={**whole.opcodes, "FSEL": 64})
    loops = tuple(LoopCode(address=16, always=1, mix=mix, whole=mix) for mix in (masking, whole))
    return KernelCode(
        name=kernel.name, arch=89, compiler="13.0.88", registers=168, stack_bytes=0, static_smem_bytes=0,
        code_bytes=1, mix=whole, loops=loops,
    )  # fmt: skip


def test_units_of_the_loop_that_masks_nothing() -> None:
    found = predict(code(INT8), INT8, RTX_4090)
    assert found.instructions == (32 + 16 + 32 + 240) / SCORES
    assert found.units == {
        "tensor": 32 * 8192 / 512 / SCORES,
        "softmax": (32 * 8 + 240) / SCORES,
        "shared": 16 * 4 * 4 / SCORES,
    }
    assert found.clocks == 16 + OVERLAP_LOSS * (15.5 + 8)
    exact = predict(code(EXACT), EXACT, RTX_4090)
    assert exact.units["tensor"] == 64
    assert predict(code(EXACT), EXACT, L4).units["tensor"] == 32


def test_speed_without_what_is_hidden_is_the_peak() -> None:
    peak = Predicted(kernel="x", head_dim=64, accuracy=Accuracy.EXACT, instructions=1, units={"tensor": 64.0})
    assert peak.tflops(RTX_4090) == pytest.approx(RTX_4090.peak_tflops, rel=0.01)
    alone = peak.microseconds(RTX_4090, 8192, 1)
    flops = 4 * quantised_on_ada.TOKENS * 8192 * quantised_on_ada.HEADS * 64
    assert alone == pytest.approx(flops / peak.tflops(RTX_4090) / 1e6, rel=0.01)


def test_the_pass_counts_and_grouped_heads_share_it() -> None:
    codes = {kernel.name: code(kernel) for kernel in (EXACT, SLOW, INT8)}
    card, other = rows_of(codes, [EXACT, SLOW, INT8])
    assert (card["card"], other["card"]) == ("RTX 4090", "L4")
    assert card["exact"]["kernel"] == EXACT.name  # the faster one
    over = card["over_exact"]
    without = card["exact"]["clocks"] / card["quantised"]["clocks"]
    own = [over[f"{n}, 1:1"] for n in quantised_on_ada.SEQLENS]
    grouped = [over[f"{n}, 4:1"] for n in quantised_on_ada.SEQLENS]
    assert own == sorted(own)
    assert all(one < four < without for one, four in zip(own, grouped, strict=True))
    assert own[0] < 0.7 * without
    assert len(table([card, other])) == 4


def test_other_kernels_are_left_out() -> None:
    wide = kernel_row("fmha_fwd_sm89_d128_m64n64_s2_w4_f16", head_dim=128)
    codes = {INT8.name: code(INT8), wide.name: dataclasses.replace(code(EXACT), name=wide.name)}
    assert rows_of(codes, [INT8, wide]) == []  # no exact kernel of its head_dim


def test_the_record_says_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Native:
        path = tmp_path

    monkeypatch.setattr(quantised_on_ada, "library", lambda target: Native)
    monkeypatch.setattr(quantised_on_ada, "read_kernels", lambda native: [EXACT, INT8])
    monkeypatch.setattr(quantised_on_ada.kernels, "read", lambda path, arch: [code(EXACT), code(INT8)])
    quantised_on_ada.main(["--json", str(tmp_path / "found.json")])
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["is_prediction"] is True
    assert record["compilers"] == ["13.0.88"]
    assert [row["quantised"]["accuracy"] for row in record["rows"]] == ["INT8", "INT8"]
