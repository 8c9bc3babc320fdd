"""Instructions → basic blocks → natural loops.

A natural loop is a header and every block from which the header can be reached again without leaving the
blocks that it dominates: a branch back is all it takes, so blocks that the compiler put elsewhere (the rare
side of an `if`) belong to their loop, and code that merely lies between two branches does not. Loops with
one header are one loop. Method: dominators after Cooper, Harvey and Kennedy ("A Simple, Fast Dominance
Algorithm", 2001).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sdpa_cutlass.machine_code.sass import Instruction

_JUMPS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"})
_ENDS = frozenset({"EXIT", "RET", "KILL"})
PRODUCTS = frozenset({"HMMA", "IMMA"})
_LOADS = frozenset({"LDGSTS"})


@dataclass(frozen=True, slots=True)
class Loop:
    """Indices into the function: of the first instruction of the header, and of all, sorted.

    `always` is how many of them every pass executes: those in blocks that no pass can go around. `whole` are
    those of a whole pass: of the ways from the header back to it with the most products, and of these with
    the most asynchronous copies, the shortest one. What is rare or an alternative is not in it.
    """

    header: int
    instructions: tuple[int, ...]
    always: int
    whole: tuple[int, ...]


def find_loops(code: list[Instruction]) -> list[Loop]:
    """Every natural loop of a function, by header; an outer loop's instructions include its inner loops'."""
    starts, successors = _blocks(code)
    order, predecessors, dominator = _dominators(successors)
    bodies: dict[int, set[int]] = defaultdict(set)
    latches: dict[int, list[int]] = defaultdict(list)
    for block in order:
        for header in successors[block]:
            if _dominates(header, block, order, dominator):
                latches[header].append(block)
                bodies[header] |= _body(header, block, predecessors)
    ranges = [range(start, end) for start, end in zip(starts, [*starts[1:], len(code)], strict=True)]
    found = []
    for header, body in sorted(bodies.items()):
        always = [
            block
            for block in body
            if all(_dominates(block, latch, order, dominator) for latch in latches[header])
        ]
        instructions = tuple(i for block in sorted(body) for i in ranges[block])
        whole = _whole_pass(code, ranges, header, body, latches[header], successors, order)
        found.append(
            Loop(
                header=starts[header],
                instructions=instructions,
                always=sum(len(ranges[block]) for block in always),
                whole=tuple(i for block in whole for i in ranges[block]),
            )
        )
    return found


def _whole_pass(
    code: list[Instruction],
    ranges: list[range],
    header: int,
    body: set[int],
    latches: list[int],
    successors: list[list[int]],
    order: dict[int, int],
) -> list[int]:
    """The blocks of `Loop.whole`, from the header to a latch. A loop inside is gone through once."""

    def worth(block: int) -> tuple[int, int, int]:
        bases = [code[i].base for i in ranges[block]]
        return sum(b in PRODUCTS for b in bases), sum(b in _LOADS for b in bases), -len(bases)

    best: dict[int, tuple[tuple[int, ...], list[int]]] = {header: (worth(header), [header])}
    for block in sorted(body, key=order.__getitem__):
        value, way = best[block]
        for after in successors[block]:
            if after not in body or order[after] <= order[block]:
                continue
            there = tuple(a + b for a, b in zip(value, worth(after), strict=True))
            if after not in best or there > best[after][0]:
                best[after] = there, [*way, after]
    return max(best[latch] for latch in latches)[1]


def _successors(code: list[Instruction], index: int) -> list[int] | None:
    """Where control goes after a branch, as instruction indices; None after everything else."""
    instruction = code[index]
    falls_through = [index + 1]
    if instruction.base == "CALL":
        # A call to one of the function's own labels is a far jump; from a subroutine, control comes back.
        if "$" in instruction.operands or not instruction.targets:
            return falls_through
    elif instruction.base not in _JUMPS | _ENDS:
        return None
    # `BRA P0, target` and `BRA.DIV ~URZ, target` have their condition among the operands.
    conditional = instruction.predicate is not None or (
        instruction.base == "BRA" and "," in instruction.operands
    )
    return [*instruction.targets, *(falls_through if conditional else [])]


def _blocks(code: list[Instruction]) -> tuple[list[int], list[list[int]]]:
    """The first instruction of every basic block, and the blocks that can follow it."""
    after = {i: s for i in range(len(code)) if (s := _successors(code, i)) is not None}
    leaders = {0} | {i + 1 for i in after} | {target for targets in after.values() for target in targets}
    starts = sorted(leader for leader in leaders if leader < len(code))
    block_of = {start: block for block, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    successors = [
        [block_of[target] for target in after.get(end - 1, [end]) if target < len(code)] for end in ends
    ]
    return starts, successors


def _dominators(successors: list[list[int]]) -> tuple[dict[int, int], list[list[int]], dict[int, int]]:
    """Reachable blocks → place in reverse postorder; predecessors; immediate dominators."""
    order = {block: place for place, block in enumerate(_reverse_postorder(successors))}
    predecessors: list[list[int]] = [[] for _ in successors]
    for block in order:
        for successor in successors[block]:
            predecessors[successor].append(block)
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in list(order)[1:]:
            known = [p for p in predecessors[block] if p in dominator]
            new = known[0]
            for other in known[1:]:
                new = _common(new, other, order, dominator)
            changed |= dominator.get(block) != new
            dominator[block] = new
    return order, predecessors, dominator


def _reverse_postorder(successors: list[list[int]]) -> list[int]:
    seen, postorder = {0}, []
    stack = [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((s for s in rest if s not in seen), None)
        if following is None:
            postorder.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    return postorder[::-1]


def _common(a: int, b: int, order: dict[int, int], dominator: dict[int, int]) -> int:
    """The nearest block that dominates both."""
    while a != b:
        while order[a] > order[b]:
            a = dominator[a]
        while order[b] > order[a]:
            b = dominator[b]
    return a


def _dominates(a: int, b: int, order: dict[int, int], dominator: dict[int, int]) -> bool:
    while order[b] > order[a]:
        b = dominator[b]
    return a == b


def _body(header: int, latch: int, predecessors: list[list[int]]) -> set[int]:
    """The blocks of the loop that the branch from `latch` to `header` closes."""
    body, waiting = {header, latch}, [latch] if latch != header else []
    while waiting:
        for block in predecessors[waiting.pop()]:
            if block not in body:
                body.add(block)
                waiting.append(block)
    return body
