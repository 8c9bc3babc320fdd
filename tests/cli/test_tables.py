"""The tables, letter by letter."""

from __future__ import annotations

import io

from rich.console import Console

from sdpa_cutlass.cli import tables
from sdpa_cutlass.cli.results import Results
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


def test_cpu_results_say_that_times_mean_nothing() -> None:
    cpu = Results(made.ENV | {"gpu": None, "cpu": "Some CPU"}, [made.row("fused", None, wall_us=3e4)])
    for text in (printed(cpu), tables.to_markdown(cpu)):
        assert "times and ratios on a CPU mean nothing" in " ".join(text.split())
        assert "CPU: Some CPU" in text
        assert "geometric" not in text


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
