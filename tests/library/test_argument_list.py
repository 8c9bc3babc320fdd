"""call/arguments.py lists the arguments of attention once. What writes them out again is held to it here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sdpa_cutlass
import sdpa_cutlass.integrations.torch_ops
from sdpa_cutlass.call import calls
from sdpa_cutlass.call.arguments import Form, Inputs, Options, arguments_of

PADDED, PACKED = Form.PADDED, Form.PACKED
DEFAULTS: dict[str, Any] = Inputs._field_defaults | Options._field_defaults
NEEDED = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
PUBLIC: dict[str, tuple[Form, set[str]]] = {
    "attention": (PADDED, {"family"}),
    "attention_varlen": (PACKED, set()),
    "plan": (PADDED, {"p_dropout", "philox"}),
    "explain": (PADDED, {"out", "return_lse", "philox"}),
}
"""Public functions: their form, and what they do not take of it."""

NOT_LISTED = {
    "precision": None,  # with family, one field of Options
    "row_offset": None,  # a part of causal
    "key_offset": None,
    "return_philox": False,  # what is returned, not how it is computed
    "accumulate": None,
    "out_dtype": None,
    "softmax_lse": None,  # without torch
    "stream": None,
}
"""Arguments of public functions that no step of a call hands on, and their defaults."""


def listed(form: Form) -> list[str]:
    return [*arguments_of(Options, form), *arguments_of(Inputs, form)]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def wrong_defaults(found: dict[str, inspect.Parameter]) -> list[str]:
    """The parameters with another default than the list has. What every call has to give has none."""
    known = DEFAULTS | NOT_LISTED | dict.fromkeys(NEEDED, inspect.Parameter.empty)
    return [
        name
        for name, parameter in found.items()
        if (type(parameter.default), parameter.default) != (type(known[name]), known[name])
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_what_is_listed(name: str) -> None:
    form, missing = PUBLIC[name]
    found = parameters(getattr(sdpa_cutlass, name))
    assert set(found) - set(NOT_LISTED) == set(listed(form)) - missing
    # A QuantizedKV has the values, and attention alone takes one.
    assert wrong_defaults(found) == (["value"] if name == "attention" else [])


def test_unfused_attention_takes_nothing_else() -> None:
    found = parameters(sdpa_cutlass.unfused_attention)
    assert set(found) < set(listed(PADDED))
    assert wrong_defaults(found) == []


@pytest.mark.parametrize("name", ["attention_varlen", "plan", "explain", "unfused_attention"])
def test_keywords_have_one_order(name: str) -> None:
    def keywords(function: Callable[..., Any]) -> list[str]:
        return [name for name, one in parameters(function).items() if one.kind is one.KEYWORD_ONLY]

    order = keywords(sdpa_cutlass.attention)
    order.insert(order.index("kernel") + 1, "family")
    found = keywords(getattr(sdpa_cutlass, name))
    assert [one for one in order if one in found] == found


@pytest.mark.parametrize(
    ("function", "form"), [(calls.run_general, PADDED), (calls.run_packed, PACKED)], ids=["padded", "packed"]
)
def test_a_call_hands_on_what_is_listed(function: Callable[..., Any], form: Form) -> None:
    """In the order of the records, all options among them."""
    found = [name for name in parameters(function) if name != "is_operator"]
    assert found == [*Options._fields, *arguments_of(Inputs, form)]


@pytest.mark.parametrize("form", Form)
def test_operators_take_what_is_listed(form: Form) -> None:
    for suffix, inputs in (("", set(Inputs._fields) - {"out"}), ("_out", set(Inputs._fields))):
        op = getattr(torch.ops.sdpa_cutlass, f"{form.value}_forward{suffix}").default
        found = {one.name.replace("kernel_name", "kernel"): one for one in op._schema.arguments}
        assert set(found) == (inputs | set(Options._fields) | {"precision"}) & {*listed(form), "precision"}
        for name, argument in found.items():
            if argument.has_default_value():
                assert argument.default_value == getattr(DEFAULTS.get(name), "value", DEFAULTS.get(name)), (
                    name
                )


def test_a_wrong_default_is_found() -> None:
    def attention(query: Any, *, window: Any = None, p_dropout: float = 0.5, sinks: Any = 0) -> None: ...

    assert wrong_defaults(parameters(attention)) == ["p_dropout", "sinks"]
