"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tests.mutation.model import Check, Mutant
from tests.mutation.suite import Result, Verdict

_STYLES = {
    Verdict.CAUGHT: "green",
    Verdict.OTHERWISE: "yellow",
    Verdict.SURVIVED: "bold red",
    Verdict.STALE: "bold yellow",
}


def list_table(mutants: Sequence[Mutant]) -> Table:
    """Names, places and defects."""
    table = Table(title=f"{len(mutants)} mutants")
    for column in ("mutant", "header", "kernels", "defect", "to be found by"):
        table.add_column(column, overflow="fold")
    for mutant in mutants:
        state = mutant.why_stale()
        defect = mutant.defect if state is None else f"{mutant.defect} [bold yellow](stale: {state})[/]"
        table.add_row(mutant.name, mutant.header, mutant.kernels.name, defect, mutant.by.value)
    return table


def results_table(results: Sequence[Result], *, every_check: bool) -> Table:
    """A row a mutant: the checks that found it, with their numbers of failed tests."""
    table = Table(title="Defects and the checks that find them (failed tests)")
    for column in ("mutant", "verdict", "found by", "for example"):
        table.add_column(column, overflow="fold")
    for result in results:
        found = [f"{check.value} ({len(failures)})" for check, failures in result.failures.items()]
        is_only = every_check and len(found) == 1
        shown = f"[bold]only[/] {found[0]}" if is_only else ", ".join(found)
        style = _STYLES[result.verdict]
        first = result.failures.get(result.mutant.by) or next(iter(result.failures.values()), None)
        example = first[0].test if first else result.note
        verdict = f"[{style}]{result.verdict.value}[/]"
        if result.verdict is Verdict.OTHERWISE:
            verdict += f": {result.note}"
        table.add_row(result.mutant.name, verdict, shown, example.replace("[", r"\["))
    return table


def checks_table(results: Sequence[Result]) -> Table:
    """A row a check: how many mutants it found, and which it alone found."""
    table = Table(title="Checks")
    for column in ("check", "mutants found", "found by nothing else"):
        table.add_column(column, overflow="fold")
    for check in Check:
        found = [result for result in results if check in result.failures]
        alone = [result.mutant.name for result in found if len(result.failures) == 1]
        table.add_row(check.value, str(len(found)), ", ".join(alone))
    return table
