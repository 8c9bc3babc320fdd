"""Tuned tables of one row, made up: what the tests of their format and of choices work on."""

from __future__ import annotations

import json
from typing import Any

from sdpa_cutlass import DType, Family, KernelInfo, Problem, kernels
from sdpa_cutlass.choice import select, tuned_lookup
from sdpa_cutlass.choice.tuned_table import Bucket, HeadDims, TunedRow, TunedTable, bucket_of, to_json
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST, DeviceInfo
from sdpa_cutlass.library.locate import Target

PROBLEM = Problem(
    dtype=DType.F16, batch=1, num_heads_q=2, num_heads_kv=2, seqlen_q=128, seqlen_k=128, head_dim=64
)
H200 = DeviceInfo(
    target=Target.CUDA,
    index=0,
    name="NVIDIA H200",
    compute_capability=(9, 0),
    sms=132,
    mma_flops_per_clock=2580,
)


def forget() -> None:
    tuned_lookup.forget()


def head_dims() -> HeadDims:
    return HeadDims(kernels(Target.HOST))


def bucket(problem: Problem = PROBLEM) -> Bucket:
    found = bucket_of(problem, head_dims())
    assert found is not None
    return found


def slowest(problem: Problem = PROBLEM) -> KernelInfo:
    """The kernel that the cost model would take last."""
    return select.ranking(library(Target.HOST), problem, Family.FMHA_FWD, HOST)[-1][0]


def row(problem: Problem = PROBLEM, **changes: Any) -> TunedRow:
    values: dict[str, Any] = {
        "bucket": bucket(problem),
        "kernel": slowest(problem).name,
        "gpu_ns": 5120,
        "check": "ok",
        "max_error_nano": 120_000,
        "runner_up": None,
        "runner_up_ns": 0,
    }
    return TunedRow(**{**values, **changes})


def table(*rows: TunedRow, device: DeviceInfo = HOST, **changes: Any) -> TunedTable:
    values: dict[str, Any] = {
        "gpu": device.name,
        "compute_capability": device.compute_capability,
        "sms": device.sms,
        "library": "0.1.0",
        "digest": library(Target.HOST).build.digest,
        "driver": "580.159.04",
        "torch": "2.11.0+cu130",
        "date": "2026-11-21",
        "rows": rows or (row(),),
    }
    return TunedTable(**{**values, **changes})


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(to_json(table())), **changes}


def edited(**changes: Any) -> str:
    """A table's text whose only row has other values."""
    found = document()
    found["rows"][0] |= changes
    return json.dumps(found)
