"""CUTLASS's example 88 as a peer: what it is asked, and what is read from its output."""

from __future__ import annotations

import pytest

from benchmarks.peers import example_88

OUTPUT = """\
###### B 16 H 16 Q 1024 K 1024 D 128 Forward Causal #SM 132
 [OK]  tma ws cooperative 128x128x128   : 412.5 TFLOPS/s
       t=0.166ms, smem=164352b
 [--]  tma ws ping-pong 128x128x128     : 430.25 TFLOPS/s
       t=0.1597ms, smem=213504b
[FAIL] tma 64x128x128                   : 1e+02 TFLOPS/s
       t=6.9e-01ms, smem=98304b
"""


def test_times_and_verdicts_are_read_from_what_it_prints() -> None:
    assert example_88.kernels_of(OUTPUT) == {
        "tma ws cooperative 128x128x128": {"us": pytest.approx(166), "is_right": True},
        "tma ws ping-pong 128x128x128": {"us": pytest.approx(159.7), "is_right": None},
        "tma 64x128x128": {"us": pytest.approx(690), "is_right": False},
    }


def test_output_without_a_time_is_an_error() -> None:
    with pytest.raises(example_88.PeerError, match="No forward kernel"):
        example_88.kernels_of("No forward kernel instantiated for d=512\n")


def test_it_is_asked_for_the_cases_that_it_has_kernels_for() -> None:
    found = example_88.cases(["*_s2048_d128*"])
    assert [case.name for case in found] == [
        "hopper/b8_h16_s2048_d128",
        "hopper/b8_h16_s2048_d128_causal",
        "hopper/b1_h8_s2048_d128",
        "hopper/b1_h8_s2048_d128_causal",
    ]
    assert example_88.arguments_of(found[1], 7, verify=True) == [
        "--b=8", "--h=16", "--q=2048", "--k=2048", "--d=128", "--mask=causal", "--iterations=7",
        "--verbose", "--verify",
    ]  # fmt: skip
    assert {case.head_dim for case in example_88.cases([])} == {64, 128, 256}


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(example_88, "find_spec", lambda name: None)
    with pytest.raises(example_88.PeerError, match="nvidia-cutlass"):
        example_88.build(tmp_path / "program")
