"""Tags: names, parsing and grammar from one word a field."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.core.tags import InvalidNameError, TagError, Tagged


class Colour(Enum):
    RED = "red"
    DARK_RED = "dark.red"


@dataclass(frozen=True, kw_only=True)
class Inner(Tagged):
    rows: Annotated[int, "r"]
    columns: Annotated[int, "c"] = 7
    is_odd: Annotated[bool, "_odd"] = False


@dataclass(frozen=True, kw_only=True)
class Outer(Tagged):
    colour: Annotated[Colour, "_"]
    inner: Annotated[Inner, "_"]
    is_new: Annotated[bool, "_new"] = False
    other: Annotated[Colour, "_o"] = Colour.RED

    @classmethod
    def lead(cls) -> str:
        return "thing"


numbers = st.integers(1, 999_999)
inners = st.builds(Inner, rows=numbers, columns=numbers, is_odd=st.booleans())
colours = st.sampled_from(Colour)


@given(st.builds(Outer, colour=colours, inner=inners, is_new=st.booleans(), other=colours))
def test_a_name_parses_back(value: Outer) -> None:
    assert Outer.parse(value.name) == value


def test_names_follow_the_tags() -> None:
    inner = Inner(rows=3)
    assert inner.name == "r3"
    assert Outer(colour=Colour.RED, inner=inner).name == "thing_red_r3"
    inner = Inner(rows=3, columns=8, is_odd=True)
    outer = Outer(colour=Colour.RED, inner=inner, is_new=True, other=Colour.DARK_RED)
    assert outer.name == "thing_red_r3c8_odd_new_odark.red"
    assert Outer.grammar() == "thing_<colour>_r<rows>[c<columns>][_odd][_new][_o<other>]"


@pytest.mark.parametrize(
    "name", ["", "thing", "thing_red_r3c7", "thing_red_r03", "thing_red_r3_ored", "thing_darkxred_r3", "r3"]
)
def test_other_texts_are_refused_with_the_grammar(name: str) -> None:
    assert Outer.read(name) is None
    with pytest.raises(InvalidNameError, match="is not a Outer; the grammar is thing_<colour>_r<rows>"):
        Outer.parse(name)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="colour must be a Colour, not 'red'"):
        Outer(colour="red", inner=Inner(rows=1))  # type: ignore[arg-type]


def test_a_field_without_a_tag_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(Tagged):
        rows: int

    with pytest.raises(TagError, match=r"Silent\.rows has 0 tags; it must have one"):
        Silent.grammar()
    with pytest.raises(TagError, match=r"Silent\.rows"):
        Silent(rows=1)


def test_two_fields_with_one_tag_are_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Tagged):
        stages: Annotated[int, "_s"]
        splits: Annotated[int, "_s"] = 1

    with pytest.raises(TagError, match="Twice has two fields with the tag '_s'"):
        Twice.grammar()


def test_a_field_that_names_cannot_hold_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Real(Tagged):
        scale: Annotated[float, "_x"]

    with pytest.raises(TagError, match=r"Real\.scale is <class 'float'>; names hold numbers, bools"):
        Real.grammar()


def test_a_flag_that_is_on_by_default_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class On(Tagged):
        fast: Annotated[bool, "_fast"] = True

    with pytest.raises(TagError, match=r"On\.fast is a bool, so its default must be False"):
        On.grammar()
