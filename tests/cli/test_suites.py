"""The problems of every suite: how many, which shapes, distinct names."""

from __future__ import annotations

import pytest

from sdpa_cutlass.cli import suites
from sdpa_cutlass.cli.timing import GRAPH_CALLS
from sdpa_cutlass.problem import Causal


def test_gpu_grid() -> None:
    cases = suites.cases_of(suites.DEFAULT_SUITES["cuda"])
    assert len(cases) == 2 + 9 * 2 + 5 * 3 * 2
    assert sum(case.causal for case in cases) == len(cases) // 2
    assert cases[0].name == "mission/b1_h8_s512_d64"
    assert {case.batch * case.seqlen_q for case in cases if case.suite == "long"} == {16384}
    small = {(case.batch, case.seqlen_q) for case in cases if case.suite == "small"}
    assert small == {(batch, seqlen) for batch in (8, 16, 32) for seqlen in (128, 256, 512)}
    heads = {case.head_dim: case.num_heads_q for case in cases if case.suite == "long"}
    assert heads == {32: 64, 64: 32, 80: 24, 96: 20, 128: 16}


def test_host_suite_is_small_and_covers_every_head_dim() -> None:
    cases = suites.host()
    assert {(case.head_dim, case.causal) for case in cases} >= {
        (head_dim, causal) for head_dim in (32, 64, 80, 96, 128) for causal in (False, True)
    }
    assert any(case.num_heads_kv < case.num_heads_q and case.seqlen_k != case.seqlen_q for case in cases)
    assert max(case.problem().flops for case in cases) < 5e7


def test_masks() -> None:
    first, *cases = suites.masks()
    assert first.name == "masks/b1_h8_s512_d64_padding"
    assert len(cases) == 4 * 3 * 11
    assert {case.name for case in cases} >= {
        "masks/b8_h32_s2048_d64_lengths_full",
        "masks/b2_h16_s8192_d128_bias_f32",
        "masks/b8_h20_s2048_d96_causal_dropout",
        "masks/b8_h24x6_s2048_d80",
    }
    assert {case.mask for case in cases} == {"none", *suites.MASKS}
    small = suites.host_masks()
    assert [case.name.partition("_s")[2].partition("_d")[2] for case in small] == [
        case.name.partition("_s")[2].partition("_d")[2] for case in suites.matching(cases, ["*_s2048_d64*"])
    ]
    assert max(case.problem().flops for case in small) < 5e7
    for case in (first, *cases, *small):
        assert case.is_plain == (case.num_heads_kv < case.num_heads_q)


def test_decode() -> None:
    cases = suites.decode()
    names = [case.name for case in cases]
    for name in (
        "b1_h32x8_q1_k8192_d128",
        "b8_h32x8_q1_k8192_d128",
        "b32_h32x8_q1_k4096_d128",
        "b1_h16_q1_k8192_d64",
        "b8_h16_q1_k8192_d64",
        "b32_h16_q1_k4096_d64",
        "b1_h32x1_q1_k32768_d128",
        "b1_h16_q16_k8192_d64_causal_bottom_right",
        "b8_h32x8_q1_k8192_d128_bf16",
    ):
        assert f"decode/{name}" in names
    assert {case.seqlen_q for case in cases} == {1, 4, 16}
    assert {case.seqlen_k for case in cases} == {4096, 8192, 32768}
    for case in cases:
        assert case.is_cold
        assert case.problem().causal is (Causal.BOTTOM_RIGHT if case.seqlen_q > 1 else None)
        # Several times the L2 cache of any GPU here, in at most as many sets as a graph has calls.
        assert GRAPH_CALLS * case.problem().bytes > 4 * 60 * 2**20


def test_suites_of_each_machine() -> None:
    assert {*suites.GPU_SUITES, *suites.CPU_SUITES, *suites.HOPPER_SUITES} == {*suites.SUITE_NAMES}
    assert not [
        case for name in suites.SUITES if name != "decode" for case in suites.cases_of([name]) if case.is_cold
    ]


@pytest.mark.parametrize("suite", suites.SUITES)
def test_names_are_distinct(suite: str) -> None:
    names = [case.name for case in suites.cases_of([suite])]
    assert len(set(names)) == len(names)


def test_names_tell_grouped_heads_and_lengths() -> None:
    assert suites.host()[-1].name == "host/b1_h4x2_q97_k193_d64"


def test_flops_follow_the_convention() -> None:
    full, causal = suites.mission()
    assert full.problem().flops == 4 * 8 * 512 * 512 * 64
    assert causal.problem().flops * 2 == full.problem().flops


def test_matching() -> None:
    cases = suites.cases_of(["mission", "long"])
    assert suites.matching(cases, []) == cases
    assert [case.name for case in suites.matching(cases, ["mission/*_causal", "long/*_s8192_d80"])] == [
        "mission/b1_h8_s512_d64_causal",
        "long/b2_h24_s8192_d80",
    ]
    assert suites.matching(cases, ["nothing*"]) == []
