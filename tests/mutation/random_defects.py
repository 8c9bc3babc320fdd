"""Defects drawn at random: one operator, constant or function of a header becomes another.

python -m tests.mutation --random 50 --seed 7

Every header that a fused kernel is made of can be drawn, except the machine model below it (arch/). Survivors
that equivalents.py knows are not drawn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.mutation.equivalents import EQUIVALENTS
from tests.mutation.model import HEADERS, Check, Kernels, Mutant

_FIRST_HEADER = "fmha_fwd/launch.cuh"  # what the generated units include
_NO_SITES = ("arch/",)
_INCLUDE = re.compile(r'^#include "sdpa/([^"]+)"', re.MULTILINE)

# Kernels that run into a header, or into what differs there, by its name; the other headers differ in all.
_ALL = tuple(kernels for kernels in Kernels if kernels.is_of_fmha_fwd)
_BY_KIND = (Kernels.RING, Kernels.GENERAL, Kernels.SPLIT)
_KERNELS: dict[str, tuple[Kernels, ...]] = {
    "checks.hpp": _BY_KIND,
    "dense_mask.cuh": (Kernels.GENERAL,),
    "dropout.cuh": (Kernels.DROPOUT,),
    "group_merge.cuh": (Kernels.GROUPS, Kernels.WARP_GROUPS, Kernels.SPLIT),
    "key_range.cuh": _BY_KIND,
    "key_split.cuh": (Kernels.SPLIT,),
    "kernel.cuh": (*_BY_KIND, Kernels.GROUPS),
    "launch.cuh": (*_BY_KIND, Kernels.DROPOUT),
    "mask.cuh": _BY_KIND,
    "sequence.cuh": _BY_KIND,
    "set_params.hpp": _BY_KIND,
    "softmax.cuh": _BY_KIND,
    "split.cuh": (Kernels.SPLIT,),
    "split_parts.cuh": (Kernels.SPLIT,),
    "tile_scheduler.cuh": (*_BY_KIND, Kernels.GROUPS),
}

# Comments, strings, characters, preprocessor lines, assertions of the compiler, lists of template parameters.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*#(?:\\\n|[^\n])*"
    r"|\bstatic_assert\b[^;]*;|^[ \t]*template <[^\n]*$",
    re.MULTILINE | re.DOTALL,
)


def _between_spaces(old: str, *new: str) -> tuple[str, tuple[str, ...]]:
    return rf"(?<= ){re.escape(old)}(?= )", new


def _call(old: str, new: str) -> tuple[str, tuple[str, ...]]:
    return rf"\b{old}(?=\()", (new,)


def _literal(old: str, *new: str) -> tuple[str, tuple[str, ...]]:
    return rf"(?<![\w.]){re.escape(old)}(?![\w.])", new


_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    _between_spaces("<", "<="),
    _between_spaces("<=", "<"),
    _between_spaces(">", ">="),
    _between_spaces(">=", ">"),
    _between_spaces("==", "!="),
    _between_spaces("!=", "=="),
    _between_spaces("&&", "||"),
    _between_spaces("||", "&&"),
    _between_spaces("+", "-"),
    _between_spaces("-", "+"),
    _between_spaces("*", "+"),
    _between_spaces("/", "*"),
    _between_spaces("%", "/"),
    _between_spaces("&", "|"),
    _between_spaces("|", "&"),
    _between_spaces("^", "|"),
    _between_spaces("<<", ">>"),
    _between_spaces(">>", "<<"),
    _between_spaces("+=", "-=", "="),
    _between_spaces("-=", "+="),
    _between_spaces("*=", "="),
    _between_spaces("|=", "="),
    _literal("0", "1"),
    _literal("1", "0", "2"),
    _literal("0.f", "1.f"),
    _literal("1.f", "0.f", "2.f"),
    _call("min", "max"),
    _call("max", "min"),
    _call("fminf", "fmaxf"),
    _call("fmaxf", "fminf"),
    _call("fabsf", ""),
    (r"!(?=[\w(])", ("",)),
    _literal("true", "false"),
    _literal("false", "true"),
)


@dataclass(frozen=True, kw_only=True)
class RandomMutant:
    """`old` becomes `new` at one place of a header."""

    header: str  # relative to templates/include/sdpa
    start: int  # of `old` in the header's text
    old: str
    new: str

    @cached_property
    def _text(self) -> str:
        return (HEADERS / self.header).read_text(encoding="utf-8")

    @property
    def line(self) -> int:
        """From 1 on."""
        return self._text.count("\n", 0, self.start) + 1

    @property
    def source(self) -> str:
        """The line as it is."""
        return self._text.splitlines()[self.line - 1]

    @property
    def column(self) -> int:
        """From 0 on."""
        return self.start - (self._text.rfind("\n", 0, self.start) + 1)

    @property
    def changed(self) -> str:
        """The line as it becomes."""
        return self.source[: self.column] + self.new + self.source[self.column + len(self.old) :]

    @property
    def key(self) -> tuple[str, str, str]:
        """What equivalents.py knows it by, wherever the line moves in its header."""
        return self.header, self.source.strip(), self.changed.strip()

    @property
    def name(self) -> str:
        return f"random_{Path(self.header).stem}_{self.start}_{'_'.join(str(ord(c)) for c in self.new)}"

    def as_mutant(self) -> Mutant:
        """The same for the workshop: with as many lines in front as make the old text unique."""
        lines = self._text.splitlines(keepends=True)
        changed = self.changed + "\n"
        last = self.line - 1
        first = last
        while self._text.count("".join(lines[first : last + 1])) > 1:
            first -= 1
        above = "".join(lines[first:last])
        return Mutant(
            name=self.name,
            header=self.header,
            old=above + lines[last],
            new=above + changed,
            defect=str(self),
            kernels=kernels_of(self.header)[0],
            by=Check.OTHER,
        )

    def __str__(self) -> str:
        return f"{self.header}:{self.line}: {self.source.strip()}  →  {self.changed.strip()}"


def drawn_headers() -> list[str]:
    """Those that a fused kernel includes, but the model of the machine and the library's own interfaces."""
    found: list[str] = []
    waiting = [_FIRST_HEADER]
    while waiting:
        header = waiting.pop()
        if header in found or header.startswith(_NO_SITES) or "/" not in header:
            continue
        found.append(header)
        waiting += _INCLUDE.findall((HEADERS / header).read_text(encoding="utf-8"))
    return sorted(found)


def kernels_of(header: str) -> tuple[Kernels, ...]:
    """The groups of kernels that run into a header, in the order of trial."""
    groups = _KERNELS.get(Path(header).name, _ALL)
    return (*(k for k in _BY_KIND if k in groups), *(k for k in groups if k not in _BY_KIND))


def code_of(text: str) -> str:
    """`text` with blanks, character for character, in place of what is not code."""
    return _NO_CODE.sub(lambda match: re.sub(r"[^\n]", "\0", match.group()), text)


def _mutants_of(header: str) -> Iterator[RandomMutant]:
    code = code_of((HEADERS / header).read_text(encoding="utf-8"))
    for pattern, replacements in _RULES:
        for match in re.finditer(pattern, code):
            for new in replacements:
                yield RandomMutant(header=header, start=match.start(), old=match.group(), new=new)


def all_mutants() -> list[RandomMutant]:
    """Every mutant that there is, known equivalents among them, in an order that only the headers decide."""
    return [mutant for header in drawn_headers() for mutant in _mutants_of(header)]


def draw(number: int, seed: int) -> list[RandomMutant]:
    """`number` mutants, or all when there are fewer. A larger number begins with the same ones."""
    pool = [mutant for mutant in all_mutants() if mutant.key not in EQUIVALENTS]
    random.Random(seed).shuffle(pool)
    return pool[:number]
