"""What documents say of several files: the naive chain over the grid, runs against each other, pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.documents import agreement, naive_tables, short_tables
from sdpa_cutlass.cli import bench_plots, plots, tables
from sdpa_cutlass.cli.results import PEERS, Results, Row
from tests.cli import rows as made

GRID = [
    *made.mission(),
    *made.long(64),
    made.row("naive", 512.0 * 40, suite="long", batch=32, seqlen_q=512, seqlen_k=512),
    made.row("naive", None, suite="long", batch=2, seqlen_q=8192, seqlen_k=8192, status="out of memory"),
]


def in_dtype(rows: list[Row], dtype: str, factor: float = 1.0) -> list[Row]:
    return [
        dataclasses.replace(row, dtype=dtype, gpu_us=row.gpu_us * factor if row.gpu_us else None)
        if row.provider == "naive"
        else dataclasses.replace(row, dtype=dtype)
        for row in rows
    ]


def test_naive_sentence() -> None:
    files = {"f16": made.results(GRID), "bf16": made.results(in_dtype(GRID, "bf16", 1.5))}
    assert naive_tables.sentence(files) == (
        "Over the naive chain of matmul, mask, softmax and matmul, the highest ratio of 4 problems is "
        "**60.00x**: B32 H8 S512 D64, bf16, suite `long`, 30720 µs against 512 µs, on NVIDIA H200. "
        "Without a time of the chain: 2 out of memory."
    )
    twice = {"first": files["f16"], "second": files["f16"]}
    assert "of 2 problems is **40.00x**" in naive_tables.sentence(twice)
    assert naive_tables.sentence({"none": made.results(made.masked())}) == "The naive chain ran nowhere."


def test_naive_table() -> None:
    own = [
        made.row("fused", 1.0, suite="decode", dtype="bf16"),
        made.row("naive", 2.0, suite="decode", dtype="bf16"),
    ]
    wall = [made.row("torch_flash", None, suite="wall", wall_us=3.0)]
    files = {"a": made.results(GRID + own + wall), "b": made.results(in_dtype(made.mission(), "bf16", 2.0))}
    assert naive_tables.table(files) == [
        "| suite | problem | naive µs | fused µs | a | b |",
        "|---|---|---:|---:|---:|---:|",
        "| mission | B1 H8 S512 D64 | 15 | 5 | 3.00x | 6.00x |",
        "| long | B32 H8 S512 D64 | 20480 | 512 | 40.00x | - |",
        "| long | B2 H8 S8192 D64 | out of memory | 8192 | naive: out of memory | - |",
        "| decode | B1 H8 S512 D64 bf16 | 2 | 1 | 2.00x | - |",
    ]


@pytest.mark.parametrize("peer", PEERS)
def test_other_libraries_are_spoken_of(peer: str) -> None:
    found = made.results([*made.mission(), made.row(peer, 12.5)])
    assert f"- fused against {peer}: geometric mean 2.50x over 1 problems" in tables.to_markdown(found)
    assert f"- Against {short_tables.CLAIMED_PEERS[peer]}: faster on 1 of 1" in short_tables.to_markdown(
        found
    )
    assert peer in plots.COLOURS


def second(**env: Any) -> Results:
    """The grid once more: fused 10 % slower at one problem, all else the same."""
    rows = [
        dataclasses.replace(row, gpu_us=row.gpu_us * 1.1)
        if row.provider == "fused" and row.seqlen_k == 2048 and row.gpu_us
        else row
        for row in GRID
    ]
    return Results({**made.ENV, "date": "2026-11-22T03:00:00+00:00", **env}, rows)


def test_differences() -> None:
    fused, *others = agreement.differences(made.results(GRID), second())
    assert (fused.provider, fused.count, fused.median) == ("fused", 4, 0.0)
    assert (fused.worst, fused.worst_at) == (pytest.approx(0.1), "B8 H8 S2048 D64")
    assert [(one.provider, one.count, one.worst) for one in others] == [
        ("piped", 1, 0.0),
        ("torch_flash", 4, 0.0),
        ("torch_cudnn", 1, 0.0),
        ("naive", 2, 0.0),  # one ran out of memory
    ]
    assert agreement.differences(second(), made.results(GRID))[0] == fused


def test_only_files_of_the_same_problems_and_model_are_a_pair() -> None:
    files = {
        "a": made.results(GRID),
        "bf16": made.results(in_dtype(GRID, "bf16")),
        "b": second(),
        "l4": Results({**made.ENV, "gpu": "NVIDIA L4"}, GRID),
        "masks": made.results(made.masked()),
    }
    assert agreement.pairs(files) == [("a", "b")]
    lines = agreement.sections(files)
    assert lines[0].startswith(
        "**a** and **b**: GPU UUIDs not recorded; 2026-11-21 03:00 and 2026-11-22 03:00"
    )
    assert lines[2] == "| provider | problems | median difference | worst difference | worst at |"
    assert lines[4] == "| fused | 4 | 0.0 % | 10.0 % | B8 H8 S2048 D64 |"


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        ({"gpu_uuid": "GPU-1"}, {"gpu_uuid": "GPU-2"}, "two GPUs (by UUID); "),
        ({"gpu_uuid": "GPU-1"}, {"gpu_uuid": "GPU-1"}, "the same GPU; "),
        ({"gpu_uuid": "GPU-1"}, {}, "GPU UUIDs not recorded; "),
        ({}, {"library": {"digest": "fedcba9876543210"}}, "; libraries 0123456789ab and fedcba987654"),
        ({}, {}, "; the same library"),
    ],
)
def test_relations(first: dict[str, Any], other: dict[str, Any], text: str) -> None:
    assert text in agreement.relation({**made.ENV, **first}, {**made.ENV, **other})


def test_speedup_picture() -> None:
    drawing = bench_plots.speedup(made.results([*GRID, *made.masked()]))
    assert drawing is not None
    lines, bars = drawing.axes
    assert lines.get_title() == "long: head_dim 64"
    (flash, one) = lines.get_lines()
    assert list(flash.get_ydata()) == pytest.approx([1.2, 1.2, 1.2])
    assert list(one.get_ydata()) == [1.0, 1.0]
    assert bars.get_title() == "mission"
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([4.0, 2.0, 1.8])
    assert bench_plots.speedup(made.results(made.masked())) is not None  # nothing else to draw
    assert bench_plots.speedup(made.results([made.row("fused")])) is None


def test_roofline_picture(tmp_path: Path) -> None:
    found = made.results([*GRID, made.row("plan_run", None, suite="wall", wall_us=1.0)])
    with_copy = Results({**found.env, "copy_bandwidth_gbps": 4000.0}, found.rows)
    drawing = bench_plots.roofline(with_copy)
    assert drawing is not None
    (axes,) = drawing.axes
    roof, copy = axes.get_lines()
    assert list(roof.get_ydata())[1:] == pytest.approx([989.4, 989.4])
    assert copy.get_ydata()[1] / copy.get_xdata()[1] == pytest.approx(4.0)  # TFLOP/s per FLOP/byte
    points = {group.get_label(): group.get_offsets() for group in axes.collections}
    assert list(points) == [
        "fused, mission", "fastest of torch, mission", "fused, long", "fastest of torch, long",
    ]  # fmt: skip
    ((intensity, speed),) = points["fused, mission"]
    assert intensity == pytest.approx(4 * 8 * 512 * 512 * 64 / (4 * 8 * 512 * 64 * 2), rel=1e-3)
    assert speed == found.rows[0].tflops
    bench_plots.save(drawing, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_no_roof_is_no_picture() -> None:
    unknown = Results({**made.ENV, "gpu": "NVIDIA T4"}, GRID)
    assert bench_plots.roofline(unknown) is None
    assert bench_plots.roofline(made.results([made.row("fused", None, status="wrong: NaN")])) is None
