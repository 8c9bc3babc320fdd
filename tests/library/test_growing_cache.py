"""Key caches that grow: a new signature with every token, and the plans that all other calls use stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass import attention, attention_varlen
from sdpa_cutlass.call import binding, call_table, calls, plan_cache, planning
from tests.library.reference import rand

HOT = 7  # keys of the signature that is used in every step
_STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)


def _plain_call(keys: int) -> torch.Tensor:
    k = rand(1, 2, keys, 64)
    return attention(rand(1, 2, 1, 64, seed=1), k, k)


def _general_call(keys: int) -> torch.Tensor:
    k = rand(1, 2, keys, 64)
    return attention(rand(1, 2, 1, 64, seed=1), k, k, attn_mask=torch.ones(keys, dtype=torch.bool))


def _packed_call(keys: int) -> torch.Tensor:
    k = rand(keys, 2, 64)
    return attention_varlen(rand(5, 2, 64, seed=1), k, k, _STARTS, _STARTS, 3, keys)


CALLS: dict[str, tuple[Callable[[int], torch.Tensor], Callable[[], plan_cache.Plans]]] = {
    "plain": (_plain_call, lambda: calls._plain),
    "general": (_general_call, lambda: calls._general),
    "packed": (_packed_call, lambda: calls._packed),
}
paths = pytest.mark.parametrize("path", CALLS)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of keys that a plan was made for, in order."""
    made: list[int] = []
    make_plan = planning.make_plan

    def counted(bound: binding.Bound, *rest: Any) -> Any:
        made.append(bound.problem.seqlen_k)
        return make_plan(bound, *rest)

    monkeypatch.setattr(planning, "make_plan", counted)
    return made


def count(plans: plan_cache.Plans) -> int:
    return len(plans) + len(plans._older)


@paths
@pytest.mark.usefixtures("_call_path")
def test_a_growing_cache_drops_no_plan_that_is_in_use(
    path: str, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, plans = CALLS[path]
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 16)
    hot = (HOT, HOT + 1)  # two, because the latest one is known without a look into the cache
    expected = [call(keys) for keys in hot]
    for keys in range(10, 50):
        call(keys)
        if keys % 4 == 0:
            assert all(map(torch.equal, map(call, hot), expected))
        assert count(plans()) <= 16
    assert planned == [*hot, *range(10, 50)]


@paths
def test_plans_that_nobody_uses_are_dropped(
    path: str, forget: Callable[[], None], planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    call, plans = CALLS[path]
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 4)
    for keys in (HOT, *range(10, 20), HOT):
        call(keys)
        assert 1 <= count(plans()) <= 4
    assert planned == [HOT, *range(10, 20), HOT]


@pytest.mark.usefixtures("_compiled_only")
def test_signatures_that_come_and_go_push_no_other_out_of_the_compiled_table(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's signature is met by several layers, so all of them get into the table of 32."""
    expected = _plain_call(HOT)
    for keys in range(10, 110):
        for _ in range(3):
            _plain_call(keys)
        assert torch.equal(_plain_call(HOT), expected)
    assert call_table.table is not None
    for name in ("_plain", "_general"):  # from here on only the table knows it
        monkeypatch.setattr(calls, name, plan_cache.Plans())
    monkeypatch.setattr(planning, "choose", None)
    assert torch.equal(_plain_call(HOT), expected)
    with pytest.raises(TypeError):
        _plain_call(10)


def test_a_signature_that_is_met_once_stays_out_of_the_compiled_table(forget: Callable[[], None]) -> None:
    forget()
    for keys in range(1, 40):
        _plain_call(keys)
    assert call_table.table is None
