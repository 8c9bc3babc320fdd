"""Mutants behind switches: what is put there. test_mutants.py runs some."""

from __future__ import annotations

import pytest

from tests.mutation.catalogue import MUTANTS
from tests.mutation.model import Kernels, Mutant
from tests.mutation.switches import Edit, edit_between, edit_of, switched, together, tokens


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("f(a, b + 1, c);", "f(a, b + 2, c);", "f(a, (sdpa_mutant == 7 ? (b + 2\n) : (b + 1\n)), c);"),
        ("x = y < 3 ? y : 0;", "x = 0;", "x = (sdpa_mutant == 7 ? (0\n) : (y < 3 ? y : 0\n));"),
        (
            "float s = {1.f}[i];",
            "float s = {2.f}[i];",
            "float s = {(sdpa_mutant == 7 ? (2.f\n) : (1.f\n))}[i];",
        ),
        ("wait<2>();", "wait<3>();", "(sdpa_mutant == 7 ? (wait<3>()\n) : (wait<2>()\n));"),
        ("a(); sync(); b();", "a(); b();", "a(); if (sdpa_mutant == 7) {\n\n} else {\nsync();\n}\n b();"),
        ("a(); b();", "a(); if (c) b();", "a(); if (sdpa_mutant == 7) {\nif (c) b();\n} else {\nb();\n}\n"),
        ("constexpr int n = 1;", "constexpr int n = 2;", None),
        ("a(); const int n = 1; b(n);", "a(); const int n[2] = {1, 2}; b(n);", None),
        ("if (c) { a(); } b();", "if (c) { a(); b(); }", None),
    ],
)
def test_the_smallest_expression_or_statement_is_behind_the_switch(
    old: str, new: str, expected: str | None
) -> None:
    before, after = "void f() { ", " }"
    edit = edit_between(before + old + after, before + new + after)
    if expected is None:
        assert edit is None
    else:
        assert edit is not None
        assert switched(before + old + after, [(7, edit)]) == before + expected + after


def test_edits_within_others_are_choices_of_the_outer_one() -> None:
    text = "x = a + b;"
    edits = [(1, Edit(8, 9, "c", is_statement=False)), (2, Edit(4, 9, "0", is_statement=False))]
    assert (
        switched(text, edits) == "x = (sdpa_mutant == 2 ? (0\n) : sdpa_mutant == 1 ? (a + c\n) : (a + b\n));"
    )


def _kinds() -> list[list[Mutant]]:
    kinds: dict[tuple[Kernels, bool], list[Mutant]] = {}
    for mutant in MUTANTS:
        kinds.setdefault((mutant.kernels, mutant.observed), []).append(mutant)
    return list(kinds.values())


def test_each_mutant_is_behind_one_switch_or_alone() -> None:
    """And few are alone: each of them costs a build."""
    num_alone = 0
    for mutants in _kinds():
        fit, alone = together(mutants)
        assert sorted(m.name for m in (*fit, *alone)) == sorted(m.name for m in mutants)
        num_alone += len(alone)
        for mutant in fit:
            edit = edit_of(mutant)
            text = mutant.path.read_text(encoding="utf-8")
            assert edit is not None
            changed = tokens(text[: edit.start] + edit.new + text[edit.end :])
            expected = tokens(text.replace(mutant.old, mutant.new))
            assert [token.text for token in changed] == [token.text for token in expected]
    assert num_alone <= len(MUTANTS) // 8
