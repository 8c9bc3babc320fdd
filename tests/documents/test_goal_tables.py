"""The goals beside results: each is met and missed by times made up for it; what nobody measured is empty."""

from __future__ import annotations

import pytest

from benchmarks.documents import goal_tables
from sdpa_cutlass.cli.results import Results, Row
from tests.cli.rows import ENV, row

COPY = {**ENV, "copy_bandwidth_gbps": 4000.0}


def rows(provider: str, time: float, *, suite: str, **problem: object) -> list[Row]:
    """Fused in 1 ms beside `provider`; a kernel without masks in 1 ms, too."""
    return [
        row("fused", 1000.0, suite=suite, **problem),
        row(provider, time, suite=suite, **problem),
    ]


def column(found: list[Row]) -> dict[str, str]:
    """{what and goal: cell}"""
    lines = goal_tables.table({"a": Results(COPY, found)})[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {f"{what} {goal}".strip(): cell for what, goal, cell in cells}


LONG = {"suite": "long", "seqlen_q": 2048, "seqlen_k": 2048}
MASKED = {"suite": "masks", "seqlen_q": 2048, "seqlen_k": 2048}
SMALL = {"suite": "small", "seqlen_q": 256, "seqlen_k": 256}
DECODE = {"suite": "decode", "seqlen_q": 1, "seqlen_k": 8192}


@pytest.mark.parametrize(
    ("goal", "met", "missed"),
    [
        ("B1 H8 S512 D64, GPU time in a graph < 5 µs", [row("fused", 4.99)], [row("fused", 5.0)]),
        ("the same, causal < 5 µs", [row("fused", 4.99, causal=True)], [row("fused", 5.0, causal=True)]),
        (
            "the same, `scaled_dot_product_attention` ≤ 8 µs",
            [row("sdpa", None, suite="wall", wall_us=8.0)],
            [row("sdpa", None, suite="wall", wall_us=8.1)],
        ),
        (
            "small problems over torch flash every one ≥ 1.2x",
            rows("torch_flash", 1200.0, **SMALL),
            rows("torch_flash", 1199.0, **SMALL),
        ),
        ("mean ≥ 1.4x", rows("torch_flash", 1400.0, **SMALL), rows("torch_flash", 1390.0, **SMALL)),
        (
            "S ≤ 256 over every torch backend every one > 1x",
            rows("torch_cudnn", 1001.0, **SMALL),
            rows("torch_cudnn", 1000.0, **SMALL),
        ),
        (
            "S ≥ 1024 over torch flash every one ≥ 1x",
            rows("torch_flash", 1000.0, **LONG),
            rows("torch_flash", 999.0, **LONG),
        ),
        (
            "head_dim 80, S ≥ 1024, over torch flash ≥ 1.3x",
            rows("torch_flash", 1300.0, head_dim=80, **LONG),
            rows("torch_flash", 1290.0, head_dim=80, **LONG),
        ),
        (
            "over piped every one > 1x",
            rows("piped", 1001.0, **SMALL) + rows("piped", 6000.0, **LONG),
            rows("piped", 999.0, **SMALL) + rows("piped", 6000.0, **LONG),
        ),
        (
            "S ≥ 1024, head_dim 64, over piped ≥ 6x",
            rows("piped", 6000.0, **LONG),
            rows("piped", 5990.0, **LONG),
        ),
        (
            "over the naive chain, anywhere ≥ 60x",
            rows("naive", 60000.0, **SMALL) + rows("naive", 1.0, **LONG),
            rows("naive", 59000.0, **SMALL),
        ),
        (
            "padding masks over none, S ≥ 2048 ≤ +10 %",
            rows("plain", 910.0, mask="padding", **MASKED),
            rows("plain", 900.0, mask="padding", **MASKED),
        ),
        (
            "masks and biases over mem-efficient ≥ 2.5x",
            rows("torch_efficient", 2500.0, mask="dense", **MASKED),
            rows("torch_efficient", 2490.0, mask="dense", **MASKED),
        ),
        (
            "the same at head_dim 64 over cuDNN > 1x",
            rows("torch_cudnn", 1001.0, mask="bias_f16", **MASKED),
            rows("torch_cudnn", 999.0, mask="bias_f16", **MASKED),
        ),
        (
            "dropout over torch flash with dropout ≥ 1.1x",
            rows("torch_flash", 1100.0, p_dropout=0.1, **MASKED),
            rows("torch_flash", 1090.0, p_dropout=0.1, **MASKED),
        ),
        (
            "decoding, K ≥ 4096, of the copy bandwidth ≥ 80 %",
            [row("fused", 5.2, **DECODE)],  # 16.8 MB
            [row("fused", 5.3, **DECODE)],
        ),
        (
            "decoding over cuDNN > 1x",
            rows("torch_cudnn", 1001.0, **DECODE),
            rows("torch_cudnn", 999.0, **DECODE),
        ),
    ],
)
def test_goals_are_met_and_missed(goal: str, met: list[Row], missed: list[Row]) -> None:
    assert column(met)[goal].endswith(": met")
    assert column(missed)[goal].endswith(": **not met**")
    assert column([row("torch_flash")])[goal] == "-"


def test_the_worst_problem_is_shown() -> None:
    found = rows("torch_flash", 1500.0, batch=2, **LONG) + rows("torch_flash", 1100.0, batch=4, **LONG)
    assert column(found)["S ≥ 1024 over torch flash every one ≥ 1x"] == (
        "2 of 2, least 1.10x (B4 H8 S2048 D64): met"
    )


def test_files_stand_beside_each_other() -> None:
    found = {name: Results(ENV, [row("fused", time)]) for name, time in (("a", 4.0), ("b", 6.0))}
    lines = goal_tables.table(found)
    assert lines[0] == "| what | goal | a | b |"
    assert lines[2].endswith("| 4 µs: met | 6 µs: **not met** |")
