"""Puts many mutants into one copy of a header, each behind a switch that a process sets when it starts.

A build takes ten times as long as the tests that find a mutant. An expression becomes
`(sdpa_mutant == 7 ? (new) : (old))`, statements `if (sdpa_mutant == 7) {new} else {old}`. What decides types
or constants is neither, and has a build of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.mutation.model import Mutant

VARIABLE = "SDPA_MUTANT"
"""The environment variable with the number of the mutant that is on."""

DEFINITION = f"""#pragma once
#include <cstdlib>
inline const int sdpa_mutant = [] {{
  const char *number = std::getenv("{VARIABLE}");
  return number != nullptr ? std::atoi(number) : 0;
}}();
"""

_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*)"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|::|->|(?:<<|>>|[-+*/%&|^<>=!])=|<<|\+\+|--|&&|\|\||.""",
    re.DOTALL | re.MULTILINE,
)
_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
_ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
_BETWEEN_EXPRESSIONS = _ASSIGNMENTS | {",", ";", "?", ":", "return", "else", "do"}
_OF_STATEMENTS = frozenset(
    ("if", "for", "while", "do", "else", "switch", "case", "return", "break", "continue")
)
_OF_CONSTANTS = frozenset(("constexpr", "using", "static_assert", "template", "enum", "typedef", "decltype"))
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Token:
    """`text[start:end]` of what `tokens` was given."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Edit:
    """`text[start:end]` of a header becomes `new`; an expression, or any number of whole statements."""

    start: int
    end: int
    new: str
    is_statement: bool

    def overlaps(self, other: Edit) -> bool:
        return (self.start < other.end and other.start < self.end) or self.start == other.start

    def contains(self, other: Edit) -> bool:
        return self.start <= other.start and other.end <= self.end


def edit_of(mutant: Mutant) -> Edit | None:
    """The smallest expression, or the statements, that `mutant` changes. None if no switch can choose it."""
    if mutant.alone or mutant.why_stale() is not None:
        return None
    text = mutant.path.read_text(encoding="utf-8")
    return edit_between(text, text.replace(mutant.old, mutant.new))


def switched(text: str, edits: Sequence[tuple[int, Edit]]) -> str:
    """`text` with each edit behind the switch of its number. Edits that overlap lie within one of them."""
    groups: list[list[tuple[int, Edit]]] = []
    for numbered in sorted(edits, key=lambda numbered: (numbered[1].start, -numbered[1].end)):
        if groups and groups[-1][0][1].overlaps(numbered[1]):
            groups[-1].append(numbered)
        else:
            groups.append([numbered])
    for group in reversed(groups):
        outer = group[0][1]
        old = text[outer.start : outer.end]
        choices = [
            (number, text[outer.start : edit.start] + edit.new + text[edit.end : outer.end])
            for number, edit in group
        ]
        text = text[: outer.start] + _choice(choices, old, outer.is_statement) + text[outer.end :]
    return text


def together(mutants: Sequence[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """Those of one kind of kernel that fit into one build, behind switches, and those that do not."""
    fit: list[Mutant] = []
    alone: list[Mutant] = []
    taken: dict[str, list[Edit]] = {}
    for mutant in mutants:
        edit = edit_of(mutant)
        others = taken.setdefault(mutant.header, [])
        if edit is None or any(_cross(edit, other, others) for other in others):
            alone.append(mutant)
        else:
            fit.append(mutant)
            others.append(edit)
    return fit, alone


def _cross(edit: Edit, other: Edit, others: Sequence[Edit]) -> bool:
    """Whether both, or what overlaps with both, do not lie within one of them."""
    if not edit.overlaps(other):
        return False
    touched = [edit, *(known for known in others if known.overlaps(edit) or known.overlaps(other))]
    return not any(all(outer.contains(inner) for inner in touched) for outer in touched)


def _choice(choices: Sequence[tuple[int, str]], old: str, is_statement: bool) -> str:
    if is_statement:
        branches = (f"if (sdpa_mutant == {number}) {{\n{new}\n}} else " for number, new in choices)
        return "".join(branches) + f"{{\n{old}\n}}\n"
    return "(" + "".join(f"sdpa_mutant == {number} ? ({new}\n) : " for number, new in choices) + f"({old}\n))"


def edit_between(old_text: str, new_text: str) -> Edit | None:
    """What differs, as `edit_of` has it."""
    old, new = tokens(old_text), tokens(new_text)
    first = 0
    while first < min(len(old), len(new)) and old[first].text == new[first].text:
        first += 1
    same = 0  # tokens at the end
    while same < min(len(old), len(new)) - first and old[-1 - same].text == new[-1 - same].text:
        same += 1
    matches = _matches(old)
    begin, end = first, len(old) - same
    more = len(new) - len(old)

    def parts(begin: int, end: int) -> tuple[list[Token], list[Token]]:
        return old[begin:end], new[begin : end + more]

    def edit(begin: int, end: int, *, is_statement: bool) -> Edit:
        _, changed = parts(begin, end)
        if begin == end:  # in front of what stands there
            start = stop = old[begin].start
        else:
            start, stop = old[begin].start, old[end - 1].end
        text = new_text[changed[0].start : changed[-1].end] if changed else ""
        return Edit(start, stop, text, is_statement)

    while True:  # expressions, from the innermost on
        begin, end = _expression(old, matches, begin, end)
        if all(_is_expression(part) for part in parts(begin, end)) and not _is_constant(old, matches, begin):
            return edit(begin, end, is_statement=False)
        opener = _opener(old, matches, begin)
        if opener is None or (old[opener].text == "{" and _is_block(old, opener)):
            break
        begin, end = opener, max(end, matches[opener] + 1)
    changed = parts(first, len(old) - same)
    begin = _statement_begin(old, matches, first)
    if begin == first and all(_ends_statement(part) for part in changed):
        end = len(old) - same
    else:
        end = _statement_end(old, matches, begin, len(old) - same)
    if end >= len(old) - same and all(_are_statements(part) for part in parts(begin, end)):
        return edit(begin, end, is_statement=True)
    return None


def tokens(text: str) -> list[Token]:
    """Without spaces, comments and the preprocessor's lines."""
    found = (match for match in _TOKEN.finditer(text) if match.lastgroup != "skipped")
    return [Token(match.group(), match.start(), match.end()) for match in found]


def _matches(sequence: Sequence[Token]) -> dict[int, int]:
    """The other bracket of each bracket."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for i, token in enumerate(sequence):
        if token.text in _CLOSED_BY:
            opened.append(i)
        elif token.text in _CLOSED_BY.values():
            found[i] = opened.pop()
            found[found[i]] = i
    return found


def _is_block(sequence: Sequence[Token], opener: int) -> bool:
    """Whether the brace at `opener` begins statements or members, not a value such as `Int<2>{}`."""
    before = sequence[opener - 1].text if opener else ";"
    if (
        before in ("else", "do", "const", "mutable", "noexcept") or before.isupper()
    ):  # a macro behind a lambda's ()
        return True
    return before not in (">", "=", ",", "(", "return", "]") and _NAME.fullmatch(before) is None


def _expression(sequence: Sequence[Token], matches: dict[int, int], begin: int, end: int) -> tuple[int, int]:
    """Extends to the ends of the expression around, in both directions."""
    while begin > 0:
        text = sequence[begin - 1].text
        if text in _BETWEEN_EXPRESSIONS or text in _CLOSED_BY:
            break
        if begin - 1 in matches:
            opener = matches[begin - 1]
            if text == "}" and _is_block(sequence, opener):
                break
            begin = opener
        else:
            begin -= 1
    while end < len(sequence):
        text = sequence[end].text
        if text in _BETWEEN_EXPRESSIONS or text in _CLOSED_BY.values():
            break
        if text in _CLOSED_BY:
            if text == "{" and _is_block(sequence, end):
                break
            end = matches[end] + 1
        else:
            end += 1
    return begin, end


def _opener(sequence: Sequence[Token], matches: dict[int, int], begin: int) -> int | None:
    """The bracket around `begin`."""
    i = begin - 1
    while i >= 0:
        if sequence[i].text in _CLOSED_BY:
            return i
        i = matches[i] - 1 if i in matches else i - 1
    return None


def _statement_begin(sequence: Sequence[Token], matches: dict[int, int], begin: int) -> int:
    while begin > 0:
        text = sequence[begin - 1].text
        if text in (";", "else") or text in _CLOSED_BY:
            break
        if begin - 1 in matches:
            opener = matches[begin - 1]
            if text == "}" and _is_block(sequence, opener):
                break
            begin = opener
        else:
            begin -= 1
    return begin


def _statement_end(sequence: Sequence[Token], matches: dict[int, int], begin: int, least: int) -> int:
    """Behind the first statement from `begin` on that ends at `least` or later."""
    i = begin
    while i < len(sequence):
        text = sequence[i].text
        if text in _CLOSED_BY:
            is_block = text == "{" and _is_block(sequence, i)
            i = matches[i] + 1
            if is_block and i >= least and (i == len(sequence) or sequence[i].text not in ("else", "while")):
                return i
        elif text == ";" and i + 1 >= least:
            return i + 1
        elif text in _CLOSED_BY.values():
            return i
        else:
            i += 1
    return i


def _is_balanced(sequence: Sequence[Token]) -> bool:
    opened: list[str] = []
    for token in sequence:
        if token.text in _CLOSED_BY:
            opened.append(_CLOSED_BY[token.text])
        elif token.text in _CLOSED_BY.values() and (not opened or opened.pop() != token.text):
            return False
    return not opened


def _outer(sequence: Sequence[Token]) -> list[str]:
    """What is not within brackets."""
    depth, found = 0, []
    for token in sequence:
        depth -= token.text in _CLOSED_BY.values()
        if depth == 0:
            found.append(token.text)
        depth += token.text in _CLOSED_BY
    return found


def _is_expression(sequence: Sequence[Token]) -> bool:
    if not sequence or not _is_balanced(sequence) or sequence[0].text == "{":
        return False
    outer = _outer(sequence)
    if outer.count("?") != outer.count(":") or _declares(sequence):
        return False
    left_out = _ASSIGNMENTS | _OF_STATEMENTS | {",", ";"}
    return not left_out & set(outer)


def _is_constant(sequence: Sequence[Token], matches: dict[int, int], begin: int) -> bool:
    """Whether the statement that `begin` is in computes while compiling."""
    start = begin
    while True:
        start = _statement_begin(sequence, matches, start)
        if _OF_CONSTANTS & {token.text for token in sequence[start:begin]} and not (
            begin and sequence[begin - 1].text == ";"
        ):
            before = {sequence[i].text for i in range(start, begin) if not _is_qualified(sequence, i)}
            if _OF_CONSTANTS & before:
                return True
        if start == 0 or sequence[start - 1].text not in ("(", "["):
            return False
        start -= 1


def _is_qualified(sequence: Sequence[Token], i: int) -> bool:
    """`template` in `Arch::template copy<2>` begins no template."""
    return i > 0 and sequence[i - 1].text in ("::", ".", "->")


def _declares(sequence: Sequence[Token]) -> bool:
    """Whether a statement begins like `const int i`, `Tensor t` or `Layout<Shape> s`."""
    for before, after in pairwise(sequence):
        if before.text in ("(", "{", "[") or before.text in _ASSIGNMENTS:
            return False
        is_name = _NAME.fullmatch(after.text) is not None and after.text not in _OF_STATEMENTS
        if before.text == ">" and is_name:
            return True
        if (
            is_name
            and _NAME.fullmatch(before.text)
            and before.text not in _OF_STATEMENTS | {"template", "typename", "new", "else"}
            and before.text.upper() != before.text  # CUTE_UNROLL
        ):
            return True
    return False


def _ends_statement(sequence: Sequence[Token]) -> bool:
    return not sequence or (_is_balanced(sequence) and sequence[-1].text in (";", "}"))


def _are_statements(sequence: Sequence[Token]) -> bool:
    if not _ends_statement(sequence):
        return False
    statement: list[Token] = []
    depth = 0
    for token in sequence:
        depth += (token.text in _CLOSED_BY) - (token.text in _CLOSED_BY.values())
        statement.append(token)
        if depth == 0 and token.text in (";", "}"):
            if _declares(statement):
                return False
            statement = []
    return True
