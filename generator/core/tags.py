"""Names from fields: a class writes each field's tag once, and names, parsing and grammar follow.

    @dataclass(frozen=True, kw_only=True)
    class Tile(Tagged):
        block_m: Annotated[int, "m"]
        stages: Annotated[int, "_s"]
        q_in_regs: Annotated[bool, "_qreg"] = False

    Tile(block_m=64, stages=2).name == "m64_s2"; Tile.grammar() == "m<block_m>_s<stages>[_qreg]"

A number, an enum's value or the name of another Tagged follows its tag; of a bool, the tag is all there is.
A field with a default is left out where it has that value, so every value has one name.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

_NUMBER = "[1-9][0-9]{0,5}"
T = TypeVar("T", bound="Tagged")


class InvalidNameError(ValueError):
    """A text that does not follow the grammar of names."""


class TagError(TypeError):
    """A class whose fields do not say how they stand in its name."""


class Tagged:
    """A frozen dataclass with a tag for every field. Wrong values raise ValueError when it is made."""

    def __post_init__(self) -> None:
        for word in self._words():
            word.check(getattr(self, word.field))

    @classmethod
    def _words(cls) -> tuple[_Word, ...]:
        return _words_of(cast("Any", cls))

    @classmethod
    def lead(cls) -> str:
        """What every name begins with."""
        return ""

    @property
    def name(self) -> str:
        """The value as a word; `parse` gives the value back."""
        return self.lead() + "".join(word.text(getattr(self, word.field)) for word in self._words())

    @classmethod
    def grammar(cls) -> str:
        """The names, for people. Raises TagError when a field has no usable tag."""
        return cls.lead() + "".join(word.grammar for word in cls._words())

    @classmethod
    def regex(cls) -> str:
        """The names, and those that write out a value which names leave out."""
        return re.escape(cls.lead()) + "".join(word.regex for word in cls._words())

    @classmethod
    def read(cls: type[T], name: str) -> T | None:
        """The value of that name, or None."""
        match = re.fullmatch(cls.regex(), name)
        try:
            value = match and cls(**{word.field: word.read(match[word.field]) for word in cls._words()})
        except ValueError:
            return None
        return value if value and value.name == name else None

    @classmethod
    def parse(cls: type[T], name: str) -> T:
        """The value of that name. Raises InvalidNameError."""
        value = cls.read(name)
        if value is None:
            raise InvalidNameError(f"{name!r} is not a {cls.__name__}; the grammar is {cls.grammar()}")
        return value


@dataclass(frozen=True, kw_only=True)
class _Word:
    """One field as it stands in names."""

    field: str
    tag: str
    type: Any
    default: object  # MISSING: never left out
    grammar: str
    regex: str

    def text(self, value: Any) -> str:
        if value == self.default:
            return ""
        if self.type is bool:
            return self.tag
        return f"{self.tag}{value.value if isinstance(value, Enum) else getattr(value, 'name', value)}"

    def read(self, text: str | None) -> Any:
        if self.type is bool:
            return text is not None
        if text is None:
            return self.default
        return self.type.parse(text) if issubclass(self.type, Tagged) else self.type(text)

    def check(self, value: object) -> None:
        """What a template prints must be what its type says."""
        if self.type is int:
            if type(value) is not int or not 1 <= value < 10**6:
                raise ValueError(f"{self.field} must be an int from 1 to 999999, not {value!r}")
        elif not isinstance(value, self.type):
            raise ValueError(f"{self.field} must be a {self.type.__name__}, not {value!r}")


@cache
def _words_of(cls: Any) -> tuple[_Word, ...]:
    hints = get_type_hints(cls, include_extras=True)
    words = tuple(_word(f"{cls.__name__}.{field.name}", field, hints[field.name]) for field in fields(cls))
    tags = Counter(word.tag for word in words if word.tag != "_")
    if twice := [tag for tag, count in tags.items() if count > 1]:
        raise TagError(f"{cls.__name__} has two fields with the tag {twice[0]!r}")
    return words


def _word(where: str, field: Field[Any], hint: Any) -> _Word:
    of, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    tags = [extra for extra in extras if isinstance(extra, str)]
    if len(tags) != 1:
        raise TagError(f"{where} has {len(tags)} tags; it must have one")
    if not (isinstance(of, type) and issubclass(of, (int, Enum, Tagged))):
        raise TagError(f"{where} is {of!r}; names hold numbers, bools, enums and other tagged classes")
    if of is bool and field.default is not False:
        raise TagError(f"{where} is a bool, so its default must be False")
    shown, value = f"<{field.name}>", _NUMBER
    if issubclass(of, Enum):
        value = "|".join(re.escape(member.value) for member in of)
    elif issubclass(of, Tagged):
        shown, value = of.grammar(), re.sub(r"\?P<\w+>", "?:", of.regex())
    grammar, regex = tags[0] + shown, f"{re.escape(tags[0])}(?P<{field.name}>{value})"
    if of is bool:
        grammar, regex = tags[0], f"(?P<{field.name}>{re.escape(tags[0])})"
    if field.default is not MISSING:
        grammar, regex = f"[{grammar}]", f"(?:{regex})?"
    return _Word(field=field.name, tag=tags[0], type=of, default=field.default, grammar=grammar, regex=regex)
