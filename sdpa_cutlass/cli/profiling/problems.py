"""`--shape` → a problem, and the text by which the profiled process is told it."""

from __future__ import annotations

import dataclasses
import json
import re

from sdpa_cutlass.cli.suites import MASKS, P_DROPOUT, Case
from sdpa_cutlass.problem import Causal

WORDS = ("causal", "causal_bottom_right", "dropout", *MASKS)
_PAIR = re.compile(r"(?P<first>[1-9]\d{0,8})(?:x(?P<second>[1-9]\d{0,8}))?")
_GRAMMAR = "B,H,S,D[,WORD...], such as 1,8,512,64 or 8,32x8,1x4096,128,lengths"


class ShapeError(ValueError):
    """A `--shape` that is not understood."""


def parse_shape(text: str) -> Case:
    """The problem that `text` names. Raises ShapeError, naming the part that is wrong and what is allowed."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 4:
        raise ShapeError(f"--shape {text!r} has {len(parts)} parts; wanted: {_GRAMMAR}")
    batch, batch_again = _pair(parts[0], "B", text)
    heads_q, heads_kv = _pair(parts[1], "H", text)
    seqlen_q, seqlen_k = _pair(parts[2], "S", text)
    head_dim, head_dim_again = _pair(parts[3], "D", text)
    if batch != batch_again or head_dim != head_dim_again:
        raise ShapeError(f"--shape {text!r}: B and D are single numbers; wanted: {_GRAMMAR}")
    if heads_q % heads_kv:
        raise ShapeError(f"--shape {text!r}: {heads_kv} heads of k do not divide {heads_q} of q")
    words = parts[4:]
    unknown = [word for word in words if word not in WORDS]
    if unknown:
        raise ShapeError(f"--shape {text!r}: {unknown[0]!r} is none of {', '.join(WORDS)}")
    masks = [word for word in words if word in MASKS]
    if len(masks) > 1:
        raise ShapeError(f"--shape {text!r}: at most one mask, not {' and '.join(masks)}")
    if "packed" in masks and seqlen_q != seqlen_k:
        raise ShapeError(f"--shape {text!r}: packed sequences have as many queries as keys")
    bottom_right = "causal_bottom_right" in words
    return Case(
        suite="profile",
        batch=batch,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        causal=bottom_right or "causal" in words,
        alignment=Causal.BOTTOM_RIGHT if bottom_right else Causal.TOP_LEFT,
        mask=masks[0] if masks else "none",
        p_dropout=P_DROPOUT if "dropout" in words else 0.0,
    )


def _pair(part: str, name: str, text: str) -> tuple[int, int]:
    match = _PAIR.fullmatch(part)
    if match is None:
        raise ShapeError(f"--shape {text!r}: {name} is {part!r}; wanted: {_GRAMMAR}")
    return int(match["first"]), int(match["second"] or match["first"])


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the profiled process runs: the problem as `--shape` gave it, and the kernel."""

    shape: str
    dtype: str
    kernel: str

    def to_json(self) -> str:
        """One line of text, for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The other way round."""
        return cls(**json.loads(text))
