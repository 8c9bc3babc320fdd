"""Rows of results, made up: what the tests of tables, plots and files work on."""

from __future__ import annotations

from typing import Any

from sdpa_cutlass.cli.results import Results, Row

ENV = {
    "gpu": "NVIDIA H200",
    "sm": "9.0",
    "driver": "580.0",
    "cuda": "13.0",
    "torch": "2.13.0",
    "library": {"version": "0.1.0", "space": "release", "digest": "0123456789abcdef"},
    "date": "2026-11-21T03:00:00+00:00",
    "clocks": {"start": {"sm_mhz": "1980"}},
}


def row(provider: str = "fused", gpu_us: float | None = 10.0, **changes: Any) -> Row:
    """A row of the mission shape; its speed follows from its time."""
    values: dict[str, Any] = {
        "suite": "mission",
        "batch": 1,
        "num_heads_q": 8,
        "num_heads_kv": 8,
        "seqlen_q": 512,
        "seqlen_k": 512,
        "head_dim": 64,
        "dtype": "f16",
        "causal": False,
        "mask": "none",
        "p_dropout": 0.0,
        "visible": 1.0,
        "provider": provider,
        "gpu_us": gpu_us,
    }
    values |= changes
    if gpu_us is not None:
        flops = 4.0 * values["batch"] * values["num_heads_q"] * values["head_dim"]
        flops *= values["seqlen_q"] * values["seqlen_k"] * (0.5 if values["causal"] else 1.0)
        values.setdefault("tflops", round(flops / gpu_us / 1e6, 2))
    return Row(**values)


def mission() -> list[Row]:
    """One problem: everything ran except one backend."""
    kernel = "fmha_fwd_sm89_d64_m32n64_s2_w8_g4_f16"
    return [
        row("fused", 5.0, kernel=kernel, max_err_out=1.5e-4, max_err_lse=5e-7),
        row("piped", 20.0, kernel="unfused_sm89_d64_m128n128_s3_w4_f16", max_err_out=2e-4, max_err_lse=6e-7),
        row("torch_flash", 10.0),
        row("torch_cudnn", 9.0),
        row("torch_efficient", None, status="refused: too small"),
        row("naive", 15.0),
    ]


def long(head_dim: int, *, causal: bool = False) -> list[Row]:
    """Three lengths: fused and flash."""
    rows = []
    for seqlen in (512, 2048, 8192):
        shape = {"suite": "long", "batch": 16384 // seqlen, "head_dim": head_dim, "causal": causal}
        shape |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
        rows.append(row("fused", float(seqlen), **shape))
        rows.append(row("torch_flash", 1.2 * seqlen, **shape))
    return rows


def masked(seqlen: int = 2048, **changes: Any) -> list[Row]:
    """A problem of the suite of masks: fused needs 5 % more than plain, flash refuses, others are slower."""
    shape = {"suite": "masks", "batch": 8, "num_heads_q": 32, "num_heads_kv": 32, "mask": "padding"}
    shape |= {"seqlen_q": seqlen, "seqlen_k": seqlen, "visible": 0.85} | changes
    kernel = f"fmha_fwd_sm89_d{shape.get('head_dim', 64)}_m128n64_s2_w4_f16_general"
    return [
        row("fused", 105.0, kernel=kernel, max_err_out=1.5e-4, max_err_lse=5e-7, **shape),
        row("plain", 100.0, **shape),
        row("torch_flash", None, status="refused: no masks", **shape),
        row("torch_cudnn", 126.0, **shape),
        row("torch_efficient", 315.0, **shape),
    ]


def results(rows: list[Row] | None = None) -> Results:
    """Rows under ENV; by default mission()."""
    return Results(dict(ENV), mission() if rows is None else rows)
