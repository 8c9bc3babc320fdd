"""The text of `nvdisasm --print-code` → functions, each a list of instructions.

One line of it is an instruction,

        /*0320*/              @!P0 BRA `(.L_x_2) ;

a label, or a directive. Subroutines that the compiler adds (shuffles in divergent code, say) follow in the
same function. Nothing here knows what an opcode does, except which operand of a branch is its target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NEVER = "@!PT"  # the predicate of an instruction that does nothing but take its issue slot

_SECTION = re.compile(r'^\s*\.section\s+\.text\.(\S+?),"')
_LABEL = re.compile(r"^\s*(\.L_\w+|\$\S+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<predicate>@!?U?P[T0-9]+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"`\((\.L_\w+|\$[^)]+)\)")
_TARGETS = re.compile(r'"BRANCH_TARGETS ([^"]*)"')
INSTRUCTION_BYTES = 16  # from sm_70 on


@dataclass(frozen=True, slots=True)
class Instruction:
    """`targets`: indices of the instructions that a branch names; empty for everything else."""

    opcode: str
    predicate: str | None
    operands: str
    targets: tuple[int, ...]

    @property
    def base(self) -> str:
        """The opcode without its modifiers: LDSM.16.M88.4 → LDSM."""
        return self.opcode.partition(".")[0]


def parse(text: str) -> dict[str, list[Instruction]]:
    """Every function of a disassembly. Raises ValueError when a line is not understood."""
    return {name: _function(name, lines) for name, lines in _sections(text)}


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, list[str]()
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section is None:
            lines.append(line)
            continue
        if name is not None:
            yield name, lines
        name, lines = section[1], []
    if name is not None:
        yield name, lines


def _function(name: str, lines: list[str]) -> list[Instruction]:
    labels: dict[str, int] = {}
    matches: list[re.Match[str]] = []
    for line in lines:
        instruction = _INSTRUCTION.match(line)
        if instruction is not None:
            if int(instruction["address"], 16) != INSTRUCTION_BYTES * len(matches):
                raise ValueError(f"{name}: the line before {line.strip()!r} is not understood")
            matches.append(instruction)
            continue
        label = _LABEL.match(line)
        if label is not None:
            labels[label[1]] = len(matches)
    return [_instruction(name, match, labels) for match in matches]


def _instruction(function: str, match: re.Match[str], labels: dict[str, int]) -> Instruction:
    operands = match["operands"].strip()
    names = _TARGET.findall(operands)
    several = _TARGETS.search(operands)
    if several is not None:
        names = several[1].split(",")
    try:
        targets = tuple(labels[name.strip()] for name in names if name != function)
    except KeyError as error:
        raise ValueError(f"{function}: {match['opcode']} goes to {error}, which is no label in it") from error
    return Instruction(match["opcode"], match["predicate"], operands, targets)
