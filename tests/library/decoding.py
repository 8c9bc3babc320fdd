"""A small decoding problem and two cards, for questions about choices."""

from __future__ import annotations

from typing import Any

import torch

from sdpa_cutlass import DType, Problem
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.library.structs import Params
from tests.library.cards import made_card

L4, H200 = made_card("L4", (8, 9), 58, 1024), made_card("H200", (9, 0), 132, 2580)


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


def asked_params(problem: Problem) -> Params:
    q, k = torch.zeros(1, 8, 1, 64).half(), torch.zeros(1, 2, 3000, 64).half()
    return make_params(problem, 0.125, q, k, k, torch.empty_like(q), None)
