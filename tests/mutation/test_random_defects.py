"""Random mutants are what they claim: drawn by the seed alone, in code alone, one change each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import random_suite
from tests.mutation.equivalents import EQUIVALENTS
from tests.mutation.model import HEADERS, Kernels
from tests.mutation.random_defects import (
    RandomMutant,
    all_mutants,
    code_of,
    draw,
    drawn_headers,
    kernels_of,
)
from tests.mutation.random_suite import Fate

ALL = all_mutants()


def test_a_seed_gives_the_same_mutants() -> None:
    assert draw(40, seed=3) == draw(40, seed=3)
    assert draw(40, seed=3) != draw(40, seed=4)
    assert draw(40, seed=3)[:10] == draw(10, seed=3)


def test_known_equivalents_are_not_drawn() -> None:
    assert {mutant.key for mutant in draw(len(ALL), seed=0)}.isdisjoint(EQUIVALENTS)


@pytest.mark.parametrize("key", EQUIVALENTS, ids=lambda key: f"{key[0]}: {key[2]}")
def test_known_equivalents_are_mutants(key: tuple[str, str, str]) -> None:
    """One whose line has changed has to follow its header, or to go."""
    assert key in {mutant.key for mutant in ALL}


def test_names_of_random_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_every_header_of_the_kernels_has_mutants() -> None:
    """But those that declare and compute nothing."""
    without = set(drawn_headers()) - {mutant.header for mutant in ALL}
    assert {Path(header).name for header in without} <= {"constants.hpp", "params.hpp"}
    assert {"mask.cuh", "launch.cuh", "split.cuh"} <= {Path(header).name for header in drawn_headers()}


NO_CODE = {
    "comment": "a(b); // x < 1 + 1\n",
    "comment-of-lines": "a(b); /* x < 1\n + 1 */\n",
    "string": 'f("x < 1 + \\" 1");\n',
    "character": "f('1');\n",
    "include": '#include "sdpa/1 + 1.hpp"\n',
    "condition": "#if X < 1 && \\\n  1 + 1\nf();\n",
    "assertion": "static_assert(kOne == 1 &&\n  kTwo < 1 + 2);\n",
    "template-list": "template <class T, int kN = 1 + 1>\n",
}


@pytest.mark.parametrize("what", NO_CODE)
def test_what_is_no_code_is_blank(what: str) -> None:
    code = code_of(NO_CODE[what])
    assert len(code) == len(NO_CODE[what])
    assert code.count("\n") == NO_CODE[what].count("\n")
    assert not set(code) & set("0123456789<+&=")


def test_code_stays() -> None:
    assert code_of("if (a < 1) f(0.f); // no\n").startswith("if (a < 1) f(0.f); \0")


def test_every_place_is_code() -> None:
    """As another reader of lines sees it."""
    for mutant in ALL:
        before = mutant.source[: mutant.column]
        assert "//" not in before, mutant
        assert before.count('"') % 2 == 0, mutant
        assert not mutant.source.lstrip().startswith(("#", "template <", "static_assert")), mutant


def test_each_changes_one_place() -> None:
    for mutant in ALL:
        made = mutant.as_mutant()
        assert made.why_stale() is None, mutant
        text = (HEADERS / mutant.header).read_text(encoding="utf-8")
        changed = text.replace(made.old, made.new)
        end = mutant.start + len(mutant.old)
        assert changed == text[: mutant.start] + mutant.new + text[end:], mutant
        assert text[mutant.start : end] == mutant.old != mutant.new, mutant


def test_plain_kernels_are_tried_before_general_ones() -> None:
    mainloop = next(header for header in drawn_headers() if header.endswith("/mainloop.cuh"))
    assert kernels_of(mainloop)[:3] == (Kernels.RING, Kernels.GENERAL, Kernels.SPLIT)
    drawn = {kernels for kernels in Kernels if kernels.is_of_fmha_fwd}
    assert set(kernels_of(mainloop)) == drawn


def _mutant(header: str, line: str, old: str, new: str) -> RandomMutant:
    """The one that makes `new` of the first `old` in the first line with this text."""
    text = (HEADERS / header).read_text(encoding="utf-8")
    return RandomMutant(header=header, start=text.index(old, text.index(line)), old=old, new=new)


@pytest.mark.slow
def test_fates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that tests find, one that g++ refuses and one that leaves the code as it was.

    In the kernels that compile fastest, which no random mutant is built into.
    """
    monkeypatch.setattr(random_suite, "kernels_of", lambda header: (Kernels.COMBINE,))
    header, line = "combine/kernel.cuh", "lse[i] = first + i < params.num_parts"
    mutants = [
        _mutant(header, line, "<", ">"),
        _mutant(header, line, "<", "?"),
        _mutant(header, line, "first +", "(first) +"),
    ]
    found = random_suite.run_random(mutants, tmp_path, 1, lambda result: None)
    assert [result.fate for result in found] == [Fate.CAUGHT, Fate.REFUSED, Fate.SAME]
    assert found[0].kernels is Kernels.COMBINE
