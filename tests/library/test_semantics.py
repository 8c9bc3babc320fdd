"""Every line of the tables in docs/edge-cases.md: the cases of benchmarks/semantics, run by this library.

A case says in words what must come out ("right", "0, LSE −∞", "NaN", "refused", ...); here the words are made
from what does come out.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import sdpa_cutlass
from benchmarks.semantics.backends import OURS, REFUSED, Outcome, ask
from benchmarks.semantics.cases import CASES
from benchmarks.semantics.inputs import ROW_AND_OTHERS, call
from benchmarks.semantics.outcomes import Call, EdgeCase, Region, in_words, right_answer
from benchmarks.semantics.table import keeps_promise
from tests.library.torch_features import GIVES_ZERO_WITHOUT_KEYS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_line(case: EdgeCase, device: str) -> None:
    """The words are those of the table; a refusal is an error of this package."""
    outcome = ask(case, OURS, device)
    assert keeps_promise(case, outcome.words), outcome
    if REFUSED in outcome.words.values():
        kinds = ("ArgumentError", "ArgumentTypeError", "UnsupportedError", "NoKernelError")
        assert outcome.reason.startswith(kinds), outcome


# What scaled_dot_product_attention refuses and torch does not: the list in docs/semantics.md.
REFUSALS = {
    "head_dim_264": NotImplementedError,
    "float32": TypeError,
    "float64": TypeError,
    "scale_infinite": ValueError,
    "scale_nan": ValueError,
    "dropout_below_zero": ValueError,
    "dropout_nan": ValueError,
}
IN_TORCHS_WORDS = {name: case for name, case in CASES.items() if case.make("cpu").has_torch}


def torchs_and_ours(case: EdgeCase, device: str) -> tuple[Outcome, Outcome | Exception]:
    """The answers of torch's math backend and of scaled_dot_product_attention to the same arguments."""
    torchs = ask(case, "math", device)
    arguments = case.make(device)
    try:
        out = sdpa_cutlass.scaled_dot_product_attention(
            arguments.query, arguments.key, arguments.value, **arguments.options
        )
    except Exception as error:
        return torchs, error
    return torchs, Outcome(
        {name: in_words(arguments, region, out, None) for name, region in case.regions.items()}
    )


@pytest.mark.parametrize("name", IN_TORCHS_WORDS)
def test_drop_in(name: str, device: str) -> None:
    """The same arguments as torch's, the same result: but for the refusals, and NaN where ours is right."""
    torchs, ours = torchs_and_ours(CASES[name], device)
    if REFUSED in torchs.words.values():
        return
    if isinstance(ours, Exception):
        assert isinstance(ours, REFUSALS[name]), ours
        return
    assert name not in REFUSALS
    for region, words in ours.words.items():
        theirs = torchs.words[region]
        if theirs in ("NaN", "other") and not GIVES_ZERO_WITHOUT_KEYS:
            continue
        assert words == theirs or (words == "right" and "NaN" in theirs), (region, words, theirs)


def test_every_refusal_of_the_list_is_met() -> None:
    for name, kind in REFUSALS.items():
        torchs, ours = torchs_and_ours(CASES[name], "cpu")
        assert REFUSED not in torchs.words.values()
        assert isinstance(ours, kind)
        assert isinstance(ours, sdpa_cutlass.SdpaError)


def test_nested_and_sparse_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(8, 16), torch.zeros(5, 16)], layout=torch.jagged).half()
    sparse = torch.zeros(1, 8, 16, dtype=torch.float16).to_sparse()
    for tensor in (nested, sparse):
        with pytest.raises((NotImplementedError, TypeError)):
            sdpa_cutlass.scaled_dot_product_attention(tensor, tensor, tensor)


def test_the_right_answer_is_torchs_in_float64() -> None:
    """On cases without NaN and without rows that see nothing, where nobody disagrees."""
    compared = 0
    for name in (
        "top_left",
        "mask_full",
        "bias_transposed",
        "scale_negative",
        "grouped_heads",
        "head_dim_32_96",
    ):
        made = CASES[name].make("cpu")
        options = made.options
        if options.get("attn_mask") is not None and options["attn_mask"].dtype is not torch.bool:
            options["attn_mask"] = options["attn_mask"].double()
        q, k, v = (tensor.double() for tensor in (made.query, made.key, made.value))
        if options.pop("enable_gqa", False):  # torch 2.4 does not know it
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        torch.testing.assert_close(right_answer(made)[0], F.scaled_dot_product_attention(q, k, v, **options))
        compared += 1
    assert compared == 6


def answer(made: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = right_answer(made)
    return out.to(made.query.dtype), lse.float()


def test_words_tell_answers_apart() -> None:
    made = call("cpu")
    made.candidates = {"twice that": (2 * right_answer(made)[0], 1e-2)}
    everything, row = Region(), ROW_AND_OTHERS["the row"]
    out, lse = answer(made)
    assert in_words(made, everything, out, lse) == "right"
    assert in_words(made, everything, 2 * out, None) == "twice that"
    assert in_words(made, everything, torch.zeros_like(out), lse) == "0"
    assert in_words(made, everything, out * math.nan, lse) == "NaN"
    assert in_words(made, everything, out[..., :8], lse) == "shape (2, 2, 32, 8)"
    assert in_words(made, everything, out, lse + 0.1) == "right, LSE other"
    assert in_words(made, everything, out, lse * math.nan) == "right, LSE NaN"
    assert in_words(made, everything, out, lse[0]) == "right, LSE of another shape"
    broken = out.clone()
    broken[0, 0, 4, 5] += 0.1
    assert in_words(made, everything, broken, lse) == "other"
    assert in_words(made, row, broken, lse) == "right"
    broken[0, 0, 4, 5] = math.nan
    assert in_words(made, everything, broken, lse) == "some NaN"
    assert in_words(made, Region(batches=(1,)), broken, lse) == "right"
    assert in_words(made, Region(columns=(0, 1)), broken, lse) == "right"
    assert in_words(made, Region(columns=(5,)), broken, lse) == "some NaN"


def test_promises_can_be_broken() -> None:
    case = CASES["row_false"]
    kept = {"the row": "0, LSE −∞", "others": "right"}
    assert keeps_promise(case, kept)
    assert not keeps_promise(case, kept | {"the row": "NaN"})
    assert not keeps_promise(case, {"": REFUSED})
    assert keeps_promise(CASES["float32"], {"": REFUSED})
    assert not keeps_promise(CASES["float32"], {"": "right"})
    either = dataclasses.replace(case, ours={"": "right or NaN"}, regions={"": Region()})
    assert keeps_promise(either, {"": "NaN"})
    assert not keeps_promise(either, {"": "0"})
