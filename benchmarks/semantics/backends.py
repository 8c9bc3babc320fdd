"""Who answers: torch's backends, one at a time, and this library. A call → outcome by region, in words.

What raises is "refused"; what kills the process, or leaves CUDA unusable, is "crashes" (see __main__.py).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass
from benchmarks.semantics.outcomes import Call, EdgeCase, in_words

OURS = "ours"
TORCH = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BACKENDS = {"cpu": (OURS, "math", "flash"), "cuda": (OURS, *TORCH)}
REFUSED = "refused"
NOT_ASKED = "–"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a backend made of a case: words by region, and for a refusal its first line."""

    words: dict[str, str]
    reason: str = ""

    @property
    def is_fatal(self) -> bool:
        """True when CUDA cannot be used any more after this."""
        return "CUDA error" in self.reason


def ask(case: EdgeCase, backend: str, device: str) -> Outcome:
    """Runs a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = case.make(device)
        if backend != OURS and not call.has_torch:
            return Outcome({"": NOT_ASKED})
        try:
            out, lse = ours(call) if backend == OURS else (torchs(call, backend), None)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            return Outcome({"": REFUSED}, _first_line(error))
        if out is None:  # cuDNN in torch 2.11 for an output without elements
            return Outcome({"": REFUSED}, "returned None")
        out = out.detach()
        return Outcome({name: in_words(call, region, out, lse) for name, region in case.regions.items()})


def torchs(call: Call, backend: str) -> torch.Tensor:
    """The output of one backend of torch."""
    with sdpa_kernel([TORCH[backend]]):
        return F.scaled_dot_product_attention(call.query, call.key, call.value, **call.options)


def ours(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and softmax_lse of this library's `attention`."""
    if call.run_own is not None:
        return call.run_own()
    own: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa, "p_dropout": call.dropout_p}
    if call.own is not None:
        own |= call.own
    else:
        own |= {"attn_mask": call.attn_mask, "causal": "top_left" if call.is_causal else None}
    out, lse = sdpa_cutlass.attention(call.query, call.key, call.value, return_lse=True, **own)
    return out, lse


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.splitlines()[0].split())[:200]
