"""The lines that the command prints, one a row."""

from __future__ import annotations

from benchmarks.models.measure import Row
from benchmarks.models.providers import BACKENDS, OURS, TORCH
from benchmarks.models.quantised import QuantisedRow

_NAME = "{:37}{:42}{:6}"
HEAD = (
    _NAME.format("model", "task", "dtype")
    + f"{'mode':10}{'torch error':>12}{'error':>10}{'served':>10}"
    + f"{'torch ms':>10}{'ms':>9}{'best ms':>19}{'share':>7}"
)
QUANTISED_HEAD = (
    _NAME.format("model", "task", "dtype")
    + f"{'precision':10}"
    + f"{'quantised':>10}{'torch L2':>10}{'L2':>10}{'allowed':>10}{'1 - cos':>10}{'head L2':>10}"
    + f"{'torch ms':>10}{'ms':>9}"
)


def line(row: Row) -> str:
    """`served` is of all calls; `best`: torch's fastest single backend; `share`: attention's, by torch."""
    backends = {name: row.providers[name].ms for name in BACKENDS if name in row.providers}
    timed = {name: ms for name, ms in backends.items() if ms is not None}
    best = min(timed, key=lambda name: timed[name]) if timed else None
    compiled = row.providers[row.by].calls_in_graphs
    served = "in graph" if compiled else f"{row.served}/{row.calls or row.served}"
    if compiled:
        served = f"{compiled[OURS]}/{sum(compiled.values())}"
    share = row.providers[TORCH].attention_share
    return (
        _NAME.format(row.model, row.task, row.dtype)
        + f"{row.mode:10}{_error(row.torch_error):>12}{_error(row.error):>10}{served:>10}"
        + f"{_ms(row.torch_ms):>10}{_ms(row.ms):>9}"
        + f"{'–' if best is None else f'{best} {timed[best]:.2f}':>19}"
        + f"{'–' if share is None else f'{share:.0%}':>7}"
        + _verdict(row)
    )


def _verdict(row: Row) -> str:
    if row.agrees is None:
        return f"  {row.providers[TORCH].status}"
    return "" if row.agrees else f"  WRONG {_why(row)}"


def _why(row: Row) -> str:
    states = {name: entry.status for name, entry in row.providers.items() if entry.status != "ok"}
    return str(row.fallbacks or {name: states[name] for name in states if name not in BACKENDS} or "")


def quantised_line(row: QuantisedRow) -> str:
    """`allowed` is what noise of the contract's size does to the outputs; `head L2` of the worst head."""
    return (
        _NAME.format(row.model, row.task, row.dtype)
        + f"{row.precision:10}"
        + f"{f'{row.quantised}/{row.calls}':>10}{row.torch_l2:10.1e}{row.l2:10.1e}{row.allowed_l2:10.1e}"
        + f"{row.one_minus_cosine:10.1e}{row.head_l2:10.1e}{_ms(row.torch_ms):>10}{_ms(row.ms):>9}"
        + ("" if row.holds else "  TOO FAR")
        + ("" if row.heads_hold else "  A HEAD BREAKS THE CONTRACT")
    )


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.5f}"


def _ms(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.2f}"
