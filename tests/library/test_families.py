"""Which rows compete: those of the op and the accuracy that are asked for, whose code runs on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from generator.core.kernel import Op as GeneratorOp
from generator.families import FAMILIES
from sdpa_cutlass import Causal, DType, Family, KernelInfo, MaskType, kernels
from sdpa_cutlass.choice import backward, legal, select
from sdpa_cutlass.choice.cost import MODELS, estimate
from sdpa_cutlass.errors import ArgumentError, LibraryMismatchError, NoKernelError
from sdpa_cutlass.integrations import head_dims
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.device import HOST, DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Op, Precision
from sdpa_cutlass.library.structs import Params
from tests.library.cards import made_card
from tests.library.decoding import H200, L4, asked_params, made_problem


class Rows(Library):
    """A library with the rows that it is given; kernels refuse nothing."""

    def __init__(self, rows: list[KernelInfo], archs: str) -> None:
        native = library(Target.HOST)
        self.path = native.path
        self.build = dataclasses.replace(native.build, target=Target.CUDA, archs=archs)
        self.rows = tuple(rows)

    def refusal(self, index: int, params: Params) -> str | None:
        return None


@pytest.fixture
def rows_of_two_archs(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Each fused d64 row twice: for sm_89 as it is, and a faster one for sm_90."""
    rows: list[KernelInfo] = []
    for row in kernels(Target.HOST):
        if row.family is Family.FMHA_FWD and row.head_dim == 64:
            newer = {
                "arch": 90,
                "name": row.name.replace("sm89", "sm90"),
                "ctas_per_sm": 4,
                "smem_bytes": 8192,
            }
            for made in (row, dataclasses.replace(row, **newer)):
                rows.append(dataclasses.replace(made, index=len(rows)))
    made_library = Rows(rows, "89;90-real")
    for module in (select, legal):
        monkeypatch.setattr(module, "read_kernels", lambda native: native.rows)
    return made_library


def names(native: Rows, device: DeviceInfo, **changes: Any) -> list[str]:
    problem = made_problem(**changes)
    found = select.ranking(native, problem, Family.FMHA_FWD, device)
    chosen = select.choose(native, problem, Family.FMHA_FWD, device, asked_params(problem))
    assert chosen.kernel.name == found[0][0].name
    return [row.name for row, _ in found]


@pytest.mark.parametrize("changes", [{}, {"seqlen_q": 512}, {"mask": MaskType.BOOL}], ids=str)
def test_a_row_for_a_newer_gpu_is_never_offered(rows_of_two_archs: Rows, changes: dict[str, Any]) -> None:
    on_l4, on_h200 = names(rows_of_two_archs, L4, **changes), names(rows_of_two_archs, H200, **changes)
    assert on_l4
    assert not [name for name in on_l4 if "sm90" in name]
    assert {name.replace("sm89", "sm90") for name in on_l4} | set(on_l4) == set(on_h200)
    assert set(names(rows_of_two_archs, HOST, **changes)) == set(on_l4)  # whose place the host takes


def test_a_row_for_a_newer_gpu_is_refused_by_name(rows_of_two_archs: Rows) -> None:
    problem = made_problem()
    params = asked_params(problem)
    newer = next(
        row.name
        for row in rows_of_two_archs.rows
        if row.arch == 90 and row.is_split and row.dtype is DType.F16
    )
    with pytest.raises(NoKernelError, match="is for sm_90, and L4 is sm_89"):
        select.choose(rows_of_two_archs, problem, Family.FMHA_FWD, L4, params, name=newer)
    named = select.choose(rows_of_two_archs, problem, Family.FMHA_FWD, H200, params, name=newer)
    assert named.kernel.name == newer
    named = select.choose(rows_of_two_archs, problem, Family.FMHA_FWD, HOST, params, name=newer)
    assert named.kernel.name == newer  # the host runs them all
    for candidate in select.candidates(rows_of_two_archs, problem, Family.FMHA_FWD, L4, params):
        is_newer = candidate.kernel.arch == 90
        assert is_newer == ("is for sm_90, and L4 is sm_89" in (candidate.refusal or ""))


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("89", (8, 9), True),
        ("89", (9, 0), True),  # by way of PTX
        ("89", (12, 0), True),
        ("89", (8, 6), False),
        ("80;89", (8, 6), True),  # built for this one too
        ("80-real;89", (8, 0), True),
        ("75;89", (7, 5), False),  # another major version
    ],
)
def test_a_row_runs_where_its_code_runs(archs: str, capability: tuple[int, int], runs: bool) -> None:
    row = next(row for row in kernels(Target.HOST) if row.arch == 89)
    reason = legal.unsupported(row, Rows([row], archs), made_card("a card", capability, 58, 1024))
    assert (reason is None) == runs
    assert runs or reason == f"is for sm_89, and a card is sm_{capability[0]}{capability[1]}"


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((8, 9), False), ((10, 0), False), ((12, 0), False)]
)
def test_code_for_one_architecture_runs_there_alone(capability: tuple[int, int], runs: bool) -> None:
    row = next(row for row in kernels(Target.HOST) if row.family is Family.FMHA_FWD_SM90)
    assert (row.arch, row.code, row.is_for_one_arch) == (90, "90a-real", True)
    card = made_card("a card", capability, 132, 2580)
    for archs in ("89", "89;90-real;100"):  # what other units were compiled for says nothing of this one
        reason = legal.unsupported(row, Rows([row], archs), card)
        assert (reason is None) == runs
        assert legal.unsupported(row, Rows([row], archs), HOST) is None


def chosen(device: DeviceInfo, **changes: Any) -> KernelInfo:
    problem = made_problem(**changes)
    native = library(Target.HOST)
    return select.choose(native, problem, Family.FMHA_FWD, device, asked_params(problem)).kernel


def square(seqlen: int, head_dim: int) -> dict[str, Any]:
    """16384 tokens of 2048 channels."""
    heads = 2048 // head_dim
    return {
        "batch": 16384 // seqlen, "num_heads_q": heads, "num_heads_kv": heads, "seqlen_q": seqlen,
        "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim,
    }  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT])
@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_hoppers_family_wins_where_its_instructions_are(
    seqlen: int, causal: Causal | None, head_dim: int
) -> None:
    large = square(seqlen, head_dim)
    assert chosen(H200, **large, causal=causal).family is Family.FMHA_FWD_SM90
    for device in (L4, HOST):
        assert chosen(device, **large, causal=causal).family is Family.FMHA_FWD


def test_few_tiles_are_the_other_familys() -> None:
    mission = {"num_heads_q": 8, "num_heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512}
    for asked in ({}, {"mask": MaskType.BOOL}, {"mask": MaskType.F32, "has_dropout": True}):
        best, _ = select.ranking(
            library(Target.HOST), made_problem(**mission, **asked), Family.FMHA_FWD, H200
        )[0]
        assert best.family is Family.FMHA_FWD


@pytest.mark.parametrize(
    "asked",
    [
        {"has_lengths": True},
        {"window": (512, 0)},
        {"has_sinks": True},
        *({"mask": mask} for mask in MaskType),
        {"has_dropout": True},
        {"has_dropout": True, "mask": MaskType.BOOL, "has_lengths": True},
    ],
    ids=str,
)
def test_hoppers_general_kernels_serve_what_plain_ones_do_not(asked: dict[str, Any]) -> None:
    problem = made_problem(**square(2048, 128), **asked)
    for device, family in ((H200, Family.FMHA_FWD_SM90), (L4, Family.FMHA_FWD)):
        best, _ = select.ranking(library(Target.HOST), problem, Family.FMHA_FWD, device)[0]
        assert (best.is_general, best.family) == (True, family)


def best_quantised(device: DeviceInfo, precision: Precision, **changes: Any) -> KernelInfo:
    problem = made_problem(**square(2048, 128) | changes)
    return select.ranking(library(Target.HOST), problem, precision, device)[0][0]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"causal": Causal.BOTTOM_RIGHT},
        {"has_lengths": True},
        {"window": (1024, 0)},
        {"has_sinks": True},
        {"head_dim": 104, "head_dim_v": 72},
    ],
    ids=str,
)
def test_hoppers_quantised_kernels_win_where_their_instructions_are(asked: dict[str, Any]) -> None:
    assert best_quantised(H200, Precision.INT8, **asked).family is Family.FMHA_FWD_Q8_SM90
    for device in (L4, HOST):
        assert best_quantised(device, Precision.INT8, **asked).family is Family.FMHA_FWD_Q8


def test_what_hoppers_quantised_kernels_do_not_take_is_their_siblings() -> None:
    for mask in MaskType:
        assert best_quantised(H200, Precision.INT8, mask=mask).family is Family.FMHA_FWD_Q8
    assert best_quantised(H200, Precision.INT8_QK).family is Family.FMHA_FWD_Q8
    assert best_quantised(H200, Precision.INT8, seqlen_q=1).is_split


def test_torchs_calls_are_served_for_head_dims_that_the_device_has_code_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = next(row for row in kernels(Target.HOST) if row.head_dim == 64 and not row.is_general)
    newer = dataclasses.replace(row, index=1, arch=90, code="90a-real", head_dim=72)
    for module in (select, legal, backward):
        monkeypatch.setattr(module, "read_kernels", lambda native: native.rows)
    native = Rows([row, newer], "89")
    assert head_dims._head_dims(native, L4).plain == {64}
    assert head_dims._head_dims(native, H200).plain == {64, 72}


def siblings(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Rows:
    """The plain fp16 rows of head_dim 64, and one of the baseline's with these changes."""
    rows = [
        row for row in kernels(Target.HOST)
        if row.head_dim == 64 and row.dtype is DType.F16 and not row.is_causal and not row.is_general
    ]  # fmt: skip
    fused = [row for row in rows if row.family is Family.FMHA_FWD]
    other = next(row for row in rows if row.family is Family.UNFUSED)
    rows = [*fused, dataclasses.replace(other, **changes)]
    for module in (select, legal):
        monkeypatch.setattr(module, "read_kernels", lambda native: native.rows)
    return Rows([dataclasses.replace(row, index=i) for i, row in enumerate(rows)], "89")


def test_exact_kernels_of_all_families_compete_at_the_prices_of_their_own_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = siblings(monkeypatch, accuracy=Accuracy.EXACT)
    problem = made_problem()
    sibling = native.rows[-1]
    found = select.ranking(native, problem, Family.FMHA_FWD, L4)
    assert [row.family for row, _ in found].count(Family.UNFUSED) == 1
    assert {row.name: cost for row, cost in found}[sibling.name] == estimate(sibling, problem, L4)
    assert [cost.cycles for _, cost in found] == sorted(cost.cycles for _, cost in found)

    monkeypatch.setattr(MODELS[Family.UNFUSED], "cost", lambda self, problem: (1.0, 0))
    other = dataclasses.replace(problem, has_dropout=False, num_heads_q=16, num_heads_kv=16)
    chosen = select.choose(native, other, Family.FMHA_FWD, L4, asked_params(other))
    assert chosen.kernel is sibling


@pytest.mark.parametrize("changes", [{}, {"accuracy": Accuracy.EXACT, "op": None}], ids=["accuracy", "op"])
def test_a_choice_crosses_no_line_of_accuracy_or_op_unasked(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However cheap the other kernel looks."""
    native = siblings(monkeypatch, **changes)
    monkeypatch.setattr(MODELS[Family.UNFUSED], "cost", lambda self, problem: (1.0, 0))
    problem = made_problem()
    found = select.ranking(native, problem, Family.FMHA_FWD, L4)
    assert {row.family for row, _ in found} == {Family.FMHA_FWD}
    params = asked_params(problem)
    assert select.choose(native, problem, Family.FMHA_FWD, L4, params).kernel.family is Family.FMHA_FWD
    with pytest.raises(ArgumentError, match="is not one of the"):
        select.choose(native, problem, Family.FMHA_FWD, L4, params, name=native.rows[-1].name)
    if "op" in changes:
        with pytest.raises(NoKernelError):
            select.choose(native, problem, Family.UNFUSED, L4, params)
    else:
        assert select.choose(native, problem, Family.UNFUSED, L4, params).kernel is native.rows[-1]


def test_general_kernels_are_behind_plain_ones_of_their_own_family_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = made_problem()
    fused = next(
        row for row in kernels(Target.HOST)
        if row.serves(Family.FMHA_FWD) and row.is_general
        and not row.is_split and not legal.mismatches(row, problem)
    )  # fmt: skip
    plain = siblings(monkeypatch, accuracy=Accuracy.EXACT).rows[-1]
    monkeypatch.setattr(MODELS[Family.UNFUSED], "cost", lambda self, problem: (1e9, 0))
    native = Rows([dataclasses.replace(row, index=i) for i, row in enumerate((plain, fused))], "89")
    found = select.choose(native, problem, Family.FMHA_FWD, L4, asked_params(problem))
    assert found.kernel.name == fused.name


def test_every_family_of_attention_has_a_cost_model() -> None:
    """Gradients have one too. What computes something else competes with nothing, and has none."""
    ops = (GeneratorOp.FORWARD, GeneratorOp.BACKWARD)
    assert {family.value for family in MODELS} == {
        family.name for family in FAMILIES if family.kernel.op in ops
    }
    assert {family.value for family in Family} == {family.name for family in FAMILIES}
    for family, model in MODELS.items():
        assert getattr(model, "__module__", None) == f"sdpa_cutlass.choice.cost.{family.value}"


@pytest.mark.parametrize("asked", Family, ids=lambda family: family.value)
def test_a_row_of_another_op_is_in_no_choice_even_of_its_own_family(
    asked: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However well it would fit otherwise: it has the details and takes of a plain kernel of attention."""
    native = siblings(monkeypatch, accuracy=Accuracy.EXACT, op=Op.MERGE, family=asked)
    problem = made_problem()
    merging = native.rows[-1]
    assert not merging.serves(asked)
    assert merging not in [row for row, _ in select.ranking(native, problem, asked, L4)]
    params = asked_params(problem)
    assert merging not in [found.kernel for found in select.candidates(native, problem, asked, L4, params)]
    with pytest.raises(ArgumentError, match="is not one of the"):
        select.choose(native, problem, asked, L4, params, name=merging.name)


def test_a_family_without_a_cost_model_is_refused_and_not_priced_as_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = next(row for row in kernels(Target.HOST) if row.family is Family.UNFUSED and row.head_dim == 64)
    problem = made_problem(dtype=row.dtype, causal=Causal.TOP_LEFT if row.is_causal else None)
    others = {family: model for family, model in MODELS.items() if family is not Family.UNFUSED}
    # In a dict of its own: deleted from MODELS and put back, it would be the last one.
    monkeypatch.setattr("sdpa_cutlass.choice.cost.MODELS", others)
    with pytest.raises(LibraryMismatchError, match=r"family unfused, which has no cost model; .*: fmha_fwd"):
        estimate(row, problem, HOST)
    unknown = Rows([row], "89")
    for module in (select, legal):
        monkeypatch.setattr(module, "read_kernels", lambda native: native.rows)
    with pytest.raises(LibraryMismatchError, match="no cost model"):
        select.choose(unknown, problem, Family.UNFUSED, HOST, asked_params(problem))
