"""What `precision` asks for: exact kernels, or those that multiply bytes (docs/quantised.md)."""

from __future__ import annotations

from ..errors import ArgumentError, ArgumentTypeError
from ..library.registry import Asked, Family, Precision

_ASKED: dict[str, Precision | None] = {"exact": None, "int8_qk": Precision.INT8_QK, "int8": Precision.INT8}


def asked_of(precision: object, family: Family = Family.FMHA_FWD) -> Asked:
    """What competes for a call with this `precision`: `family` for None and "exact".

    Raises ArgumentTypeError for what is no word, and ArgumentError for a word that is not known, and for a
    precision of another family than FMHA_FWD.
    """
    if precision is None:
        return family
    if isinstance(precision, Precision):
        precision = precision.value
    if not isinstance(precision, str):
        raise ArgumentTypeError(
            f"precision={precision!r} is a {type(precision).__name__}; allowed are None, {_allowed()}"
        )
    if precision not in _ASKED:
        raise ArgumentError(f"precision={precision!r}; allowed are None, {_allowed()}")
    asked = _ASKED[precision]
    if asked is None:
        return family
    if family is not Family.FMHA_FWD:
        raise ArgumentError(
            f"precision={precision!r} and family={family.value!r}; a precision goes with family='fmha_fwd'"
        )
    return asked


def _allowed() -> str:
    return ", ".join(map(repr, _ASKED))
