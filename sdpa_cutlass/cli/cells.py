"""Single cells of the result tables: times, speeds, ratios and errors as text. What is not there is "-"."""

from __future__ import annotations

from sdpa_cutlass.cli.summary import Comparison, kind

MISSING = "-"


def number(value: float | None) -> str:
    """Three digits, or the whole number where it has more."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time_us(comparison: Comparison, provider: str) -> str:
    """Microseconds of a provider, or in one word why there are none."""
    value = comparison.time_us(provider)
    if value is not None:
        return number(value)
    row = comparison.rows.get(provider)
    return MISSING if row is None else kind(row.status)


def ratio(value: float | None) -> str:
    """`1.50x`."""
    return MISSING if value is None else f"{value:.2f}x"


def overhead(slowdown: float | None) -> str:
    """What a time has more than another, as a percentage: `+7 %` for 1.07, `-20 %` for 0.8."""
    return MISSING if slowdown is None else f"{100 * (slowdown - 1):+.0f} %"


def error(value: float | None) -> str:
    """`1.5e-04`."""
    return MISSING if value is None else f"{value:.1e}"
