"""A small decoding problem, two cards, and prices on one of them, for questions about choices."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sdpa_cutlass import DType, KernelInfo, Problem, kernels
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.choice.cost import model_of
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.structs import Params
from tests.library.cards import made_card

L4, H200 = made_card("L4", (8, 9), 58, 1024), made_card("H200", (9, 0), 132, 2580)
H200_WITH_DRAM = dataclasses.replace(H200, l2_bytes=50 << 20, dram_gbps=4800)


def made_problem(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "dtype": DType.F16,
        "batch": 1,
        "num_heads_q": 8,
        "num_heads_kv": 2,
        "seqlen_q": 1,
        "seqlen_k": 3000,
        "head_dim": 64,
    }
    return Problem(**{**values, **changes})


def row_of(name: str) -> KernelInfo:
    """Of the host library."""
    return next(row for row in kernels(Target.HOST) if row.name == name)


def price(name: str, problem: Problem) -> float:
    """Microseconds on H200_WITH_DRAM at the clock of prices."""
    return model_of(row_of(name), problem, H200_WITH_DRAM).cost(problem)[0] / (CLOCK_GHZ * 1e3)


def asked_params(problem: Problem) -> Params:
    q, k = torch.zeros(1, 8, 1, 64).half(), torch.zeros(1, 2, 3000, 64).half()
    return make_params(problem, 0.125, q, k, k, torch.empty_like(q), None)
