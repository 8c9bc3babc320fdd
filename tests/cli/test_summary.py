"""Ratios, overall figures and the grouping of failures."""

from __future__ import annotations

import pytest

from sdpa_cutlass.cli import summary
from tests.cli import rows as made


def test_speedups() -> None:
    (comparison,) = summary.compare(made.mission())
    assert comparison.label == "B1 H8 S512 D64"
    assert comparison.best_torch == "torch_cudnn"
    assert comparison.speedup("piped") == 4.0
    assert comparison.speedup("torch_cudnn") == pytest.approx(1.8)
    assert comparison.speedup("torch_efficient") is None
    assert comparison.speedup(None) is None


def test_wrong_rows_take_no_part() -> None:
    rows = [made.row("fused", 5.0, status="wrong: NaN"), made.row("torch_flash", 10.0)]
    (comparison,) = summary.compare(rows)
    assert comparison.speedup("torch_flash") is None
    assert summary.overall([comparison], "torch_flash") is None


def test_cpu_rows_compare_by_wall_time() -> None:
    rows = [made.row("fused", None, wall_us=30.0), made.row("naive", None, wall_us=60.0)]
    assert summary.compare(rows)[0].speedup("naive") == 2.0


def test_overall() -> None:
    rows = made.mission()
    rows += [made.row("fused", 8.0, causal=True), made.row("torch_flash", 4.0, causal=True)]
    found = summary.overall(summary.compare(rows), "best torch")
    assert found is not None
    assert (found.count, found.least, found.greatest) == (2, 0.5, 1.8)
    assert found.mean == pytest.approx((0.5 * 1.8) ** 0.5)
    assert (found.least_at, found.greatest_at) == ("B1 H8 S512 D64 causal", "B1 H8 S512 D64")


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("fmha_fwd_sm89_d64_m128n64_s2_w4_f16_causal", "m128n64_s2_w4"),
        ("fmha_fwd_sm89_d128_m32n64_s1_w8_g4_qreg_bf16", "m32n64_s1_w8_g4_qreg"),
        ("unfused_sm89_d32_m64n64_s4_w4_f16", "m64n64_s4_w4"),
        ("something_else", "something_else"),
        (None, "-"),
    ],
)
def test_tile(kernel: str | None, tile: str) -> None:
    assert summary.tile(kernel) == tile


def test_failures_are_grouped_and_only_ours_count() -> None:
    rows = [
        made.row("fused", None, status="refused: no kernel"),
        made.row("piped", None, status="error: LaunchError: a"),
        made.row("piped", None, status="error: LaunchError: b", causal=True),
        made.row("fused", 1.0, status="ok (events around calls)", causal=True),
        made.row("naive", None, status="out of memory"),
    ]
    found = summary.failures(summary.compare(rows))
    assert [(one.provider, one.kind, one.count) for one in found] == [
        ("fused", "refused", 1),
        ("piped", "error", 2),
        ("naive", "out of memory", 1),
        ("fused", "ok", 1),
    ]
    assert summary.unacceptable(rows) == [rows[1], rows[2]]
    wrong = made.row("fused", 1.0, status="wrong: max error")
    assert summary.unacceptable([wrong]) == [wrong]
