"""The tables, letter by letter."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sdpa_cutlass.cli import cpu_tables, tables
from sdpa_cutlass.cli.predictions import CARDS, predict
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels
from tests.cli import rows as made

MARKDOWN = """\
NVIDIA H200, driver 580.0, torch 2.13.0, CUDA 13.0, library 0.1.0 (release, 0123456789ab), 2026-11-21

**mission**, f16

| problem | fused kernel | fused µs | TFLOP/s | piped µs | fused/piped | best torch µs | fused/torch \
| naive µs | fused/naive | err O | err LSE |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| B1 H8 S512 D64 | m32n64_s2_w8_g4 | 5 | 107 | 20 | 4.00x | cudnn 9 | 1.80x | 15 | 3.00x | 1.5e-04 | 5.0e-07 |

- torch_efficient: refused, 1 of 1 problems: too small

- fused against piped: geometric mean 4.00x over 1 problems, least 4.00x (B1 H8 S512 D64), greatest 4.00x \
(B1 H8 S512 D64)
- fused against flash: geometric mean 2.00x over 1 problems, least 2.00x (B1 H8 S512 D64), greatest 2.00x \
(B1 H8 S512 D64)
- fused against best torch: geometric mean 1.80x over 1 problems, least 1.80x (B1 H8 S512 D64), greatest \
1.80x (B1 H8 S512 D64)
- fused against naive: geometric mean 3.00x over 1 problems, least 3.00x (B1 H8 S512 D64), greatest 3.00x \
(B1 H8 S512 D64)
"""

TERMINAL = """\
NVIDIA H200, driver 580.0, torch 2.13.0, CUDA 13.0, library 0.1.0 (release, 0123456789ab), 2026-11-21

mission, f16

                                  fused           piped  fused/  best torch  fused/  naive  fused/
 problem         fused kernel        µs  TFLOP/s     µs   piped          µs   torch     µs   naive    err\
 O  err LSE
 ────────────────────────────────────────────────────────────────────────────────────────────────────────\
────────────
 B1 H8 S512 D64  m32n64_s2_w8_g4      5      107     20   4.00x     cudnn 9   1.80x     15   3.00x  1.5e-\
04  5.0e-07

  torch_efficient: refused, 1 of 1 problems: too small
"""


def printed(results: Results) -> str:
    stream = io.StringIO()
    tables.show(results, Console(file=stream, width=160, force_terminal=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def test_markdown() -> None:
    assert tables.to_markdown(made.results()) == MARKDOWN


def test_terminal() -> None:
    assert printed(made.results()).startswith(TERMINAL)


def test_the_last_sentence_can_be_repeated() -> None:
    """It counts what is behind, too, and stays away where no torch backend was measured."""
    slower = [made.row("fused", 9.0, seqlen_q=1024), made.row("torch_flash", 7.2, seqlen_q=1024)]
    said = " ".join(printed(Results(made.ENV, [*made.mission(), *slower])).split())
    assert said.endswith(
        "In one sentence: on an NVIDIA H200, attention by sdpa_cutlass is 1.20 times as fast as by the "
        "fastest of torch's backends (geometric mean), and ahead in 1 of 2 problems."
    )
    assert "In one sentence" not in printed(Results(made.ENV, [made.row("fused", 9.0)]))


CPU_TABLE = """\
| problem | fused kernel | err O | bound O | err LSE | bound LSE | verdict | piped err O | piped verdict | L4 µs, predicted | RTX 4090 µs, predicted | H200 µs, predicted |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| B1 H8 S512 D64 | m32n64_s1_w4 | 1.5e-04 | 3.0e-04 | 5.0e-07 | 1.0e-04 | right | - | refused | 3 | 2 | 1 |
| B1 H8 S512 D64 causal | m32n64_s1_w4 | 4.0e-03 | 3.0e-04 | - | - | wrong | 2.0e-04 | right | 3 | 2 | 1 |
"""  # noqa: E501


def test_without_a_gpu_the_table_has_errors_bounds_verdicts_and_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_tables, "predictions", lambda row: ["3", "2", "1"])
    kernel = "fmha_fwd_sm89_d64_m32n64_s1_w4_f16"
    ours = {"wall_us": 3e4, "kernel": kernel, "bound_out": 3e-4}
    rows = [
        made.row("fused", None, max_err_out=1.5e-4, max_err_lse=5e-7, **ours),
        made.row("piped", None, status="refused: no kernel"),
        made.row("torch_cudnn", None, status="refused: torch has no such kernel"),
        made.row("naive", None, wall_us=70.0),
        made.row("fused", None, causal=True, max_err_out=4e-3, status="wrong: max error of O", **ours),
        made.row("piped", None, causal=True, max_err_out=2e-4, wall_us=9e3),
        made.row("naive", None, causal=True, wall_us=70.0),
    ]
    cpu = Results(made.ENV | {"gpu": None, "cpu": "Some CPU"}, rows)
    assert CPU_TABLE in tables.to_markdown(cpu)
    for text in (printed(cpu), tables.to_markdown(cpu)):
        assert "times and ratios on a CPU mean nothing" in " ".join(text.split())
        assert "CPU: Some CPU" in text
        assert "are predictions of the cost models" in " ".join(text.split())
        assert "fused: right on 1 of 2 problems" in text
        assert "piped: right on 1 of 1 problems; refused 1" in text
        for word in ("geometric", "fused µs", "TFLOP", "torch_cudnn", "30000"):
            assert word not in text


def test_what_did_not_run_says_why() -> None:
    rows = [
        made.row("fused", None, status="refused: no [bold] kernel"),
        made.row("piped", 9.0, status="wrong: NaN"),
    ]
    text = printed(made.results(rows))
    assert "refused" in text
    assert "wrong" in text
    assert "no [bold] kernel" in text
    assert "9.00" not in text


def test_predictions_are_those_of_the_cost_models() -> None:
    """With the host library's kernels; on none of these cards was anything measured here."""
    rows = read_kernels(library(Target.HOST))
    row = made.row("fused", None)
    shown = cpu_tables.predictions(row)
    assert [float(one) for one in shown] == [
        pytest.approx(found.microseconds, rel=5e-3) for card in CARDS if (found := predict(rows, row, card))
    ]
    assert cpu_tables.predictions(made.row("fused", None, head_dim=512)) == ["-"] * 3  # no kernel
