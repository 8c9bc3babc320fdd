"""Edge cases of values: NaN and infinity, seen and unseen; scale; dropout."""

from __future__ import annotations

import math

from benchmarks.semantics.inputs import (
    COLUMN,
    HEAD_DIM,
    KEY,
    OTHER_ROWS,
    ROW,
    ROW_AND_OTHERS,
    SEQLEN,
    THE_ROW,
    all_true,
    as_bias,
    call,
    without_key,
)
from benchmarks.semantics.outcomes import Call, EdgeCase, Region

RIGHT = {"": "right"}
NO_MASKS = "no masks"
ALL_NAN = {"": "NaN, LSE NaN"}
BEFORE, FROM = Region(rows=(0, KEY - 1)), Region(rows=(KEY, SEQLEN - 1))
THE_COLUMN = Region(columns=(COLUMN,))
OTHER_COLUMNS = Region(columns=tuple(column for column in range(HEAD_DIM) if column != COLUMN))


def _spoiled(made: Call, where: str, value: float = math.nan) -> Call:
    """The call with `value` in all of KEY's row of k or v."""
    getattr(made, where)[..., KEY, :] = value
    return made


def _hidden(where: str, *, as_boolean: bool, value: float = math.nan) -> EdgeCase:
    def make(device: str) -> Call:
        mask = without_key(device)
        return _spoiled(call(device, attn_mask=mask if as_boolean else as_bias(mask)), where, value)

    letter = where[0].upper()
    key_gives = RIGHT if as_boolean else ALL_NAN
    number = "nan" if math.isnan(value) else "infinity"
    behind = "False" if as_boolean else "a bias of −∞"
    return EdgeCase(
        name=f"{number}_{where}_hidden_by_{'boolean' if as_boolean else 'bias'}",
        what=f"{'NaN' if number == 'nan' else '∞'} in {letter} behind {behind}",
        make=make,
        ours=key_gives if where == "key" else {"": "NaN"},
        fa2=NO_MASKS,
    )


def _one_key(device: str, value: float) -> Call:
    """KEY's first element is `value`, and ROW's first element is negative, the others' positive."""
    made = call(device)
    made.key[..., KEY, 0] = value
    made.query[..., 0] = made.query[..., 0].abs() + 0.1
    made.query[..., ROW, 0] *= -1
    return made


def _infinite_key(device: str) -> Call:
    made = _one_key(device, math.inf)
    hidden = all_true(device)
    hidden[..., KEY] = False
    made.visible = hidden  # as if the key did not exist: its score is −∞
    return made


def _one_query(device: str, value: float) -> Call:
    made = call(device)
    made.query[..., ROW, 0] = value
    return made


def _one_value(device: str, value: float) -> Call:
    made = call(device)
    made.value[..., KEY, COLUMN] = value
    return made


def _one_bias(device: str, value: float) -> Call:
    bias = as_bias(all_true(device))
    bias[..., ROW, KEY] = value
    return call(device, attn_mask=bias)


def _nan_bias_behind_causal(device: str) -> Call:
    bias = as_bias(all_true(device)).masked_fill(all_true(device).triu(1), math.nan)
    return call(device, is_causal=True, attn_mask=bias)


def _large_scores(device: str) -> Call:
    """Scores beyond what float16 holds; the largest of each row wins by far."""
    made = call(device)
    made.query *= 100
    made.key *= 100
    return made


NAN_AND_INFINITY = [
    _hidden("key", as_boolean=True),
    _hidden("value", as_boolean=True),
    _hidden("key", as_boolean=False),
    _hidden("value", as_boolean=False),
    _hidden("key", as_boolean=True, value=math.inf),
    _hidden("value", as_boolean=True, value=math.inf),
    EdgeCase(
        name="nan_key_behind_causal",
        what="NaN in K; rows before it do not see it (`is_causal`)",
        make=lambda device: _spoiled(call(device, is_causal=True), "key"),
        regions={"rows before": BEFORE, "rows from it on": FROM},
        ours={"rows before": "right", "rows from it on": "NaN, LSE NaN"},
    ),
    EdgeCase(
        name="nan_value_behind_causal",
        what="NaN in V; rows before it do not see it, but may share its tile",
        make=lambda device: _spoiled(call(device, is_causal=True), "value"),
        regions={"rows before": BEFORE, "rows from it on": FROM},
        ours={"rows before": "right or NaN", "rows from it on": "NaN"},
    ),
    EdgeCase(
        name="nan_query",
        what="NaN in a row of Q",
        make=lambda device: _one_query(device, math.nan),
        regions=ROW_AND_OTHERS,
        ours={"the row": "NaN, LSE NaN", "others": "right"},
    ),
    EdgeCase(
        name="nan_key",
        what="NaN in a key that every row sees",
        make=lambda device: _spoiled(call(device), "key"),
        ours=ALL_NAN,
    ),
    EdgeCase(
        name="nan_value",
        what="NaN in one element of V",
        make=lambda device: _one_value(device, math.nan),
        regions={"its column": THE_COLUMN, "others": OTHER_COLUMNS},
        ours={"its column": "NaN", "others": "right"},
    ),
    EdgeCase(
        name="infinity_query",
        what="∞ in a row of Q",
        make=lambda device: _one_query(device, math.inf),
        regions=ROW_AND_OTHERS,
        ours={"the row": "NaN, LSE NaN", "others": "right"},
    ),
    EdgeCase(
        name="infinity_key",
        what="∞ in a key: rows that score +∞, and one that scores −∞, as if it did not see the key",
        make=_infinite_key,
        regions={"+∞": OTHER_ROWS, "−∞": THE_ROW},
        ours={"+∞": "NaN, LSE NaN", "−∞": "right"},
    ),
    EdgeCase(
        name="infinity_value",
        what="∞ in one element of V",
        make=lambda device: _one_value(device, math.inf),
        regions={"its column": THE_COLUMN, "others": OTHER_COLUMNS},
        ours={"its column": "±∞", "others": "right"},
    ),
    EdgeCase(
        name="bias_plus_infinity",
        what="a bias of +∞",
        make=lambda device: _one_bias(device, math.inf),
        regions=ROW_AND_OTHERS,
        ours={"the row": "NaN, LSE NaN", "others": "right"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="bias_nan",
        what="NaN in a bias",
        make=lambda device: _one_bias(device, math.nan),
        regions=ROW_AND_OTHERS,
        ours={"the row": "NaN, LSE NaN", "others": "right"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="bias_nan_behind_causal",
        what="NaN in a bias where `is_causal` hides the key",
        make=_nan_bias_behind_causal,
        ours=RIGHT,
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="large_scores",
        what="scores beyond float16's largest number",
        make=_large_scores,
        ours=RIGHT,
    ),
]


def _scale(name: str, what: str, scale: float, ours: str) -> EdgeCase:
    def make(device: str) -> Call:
        return call(device, scale=scale, right_is="mean of V" if scale == 0 else "right")

    return EdgeCase(name=f"scale_{name}", what=what, make=make, ours={"": ours})


SCALE = [
    _scale("zero", "scale 0", 0.0, "mean of V"),
    _scale("negative", "scale −0.2", -0.2, "right"),
    _scale("large", "scale 10⁶: one key wins", 1e6, "right"),
    _scale("infinite", "scale ∞", math.inf, "refused"),
    _scale("nan", "scale NaN", math.nan, "refused"),
]


def _ones_on_average(device: str) -> Call:
    """V is 1, so that without dropout everything is; torch's mask and ours differ."""
    made = call(device, batch=4, heads=8, seqlen_q=64, seqlen_k=64, dropout_p=0.5)
    made.value.fill_(1)
    made.view = lambda out: (out.mean() * 10).round() / 10
    return made


def _dropped(name: str, what: str, p: float, ours: str, fa2: str = "") -> EdgeCase:
    make = lambda device: call(device, dropout_p=p)  # noqa: E731
    return EdgeCase(name=f"dropout_{name}", what=what, make=make, ours={"": ours}, fa2=fa2)


DROPOUT = [
    _dropped("zero", "p = 0", 0.0, "right", "right"),
    EdgeCase(
        name="dropout_half",
        what="p = 0.5: right on average; softmax_lse is that without dropout",
        make=_ones_on_average,
        ours=RIGHT,
        fa2="right",
    ),
    _dropped("one", "p = 1", 1.0, "0"),
    _dropped("below_zero", "p = −0.1", -0.1, "refused"),
    _dropped("above_one", "p = 1.1", 1.1, "refused"),
    _dropped("nan", "p = NaN", math.nan, "refused"),
]
