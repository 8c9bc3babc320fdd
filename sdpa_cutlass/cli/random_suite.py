"""Problems drawn at random, so that what no suite asks is asked too. Shapes only: no tensors, no torch.

    self         as many queries as keys, causal or not, some under a mask
    cross        other numbers of queries than of keys
    few queries  2 to 64 against many keys, some of them the last ones of their sequence (bottom_right)
    few keys     8 to 128 keys, such as 77 text tokens, for many queries
    decode       one query

Lengths are drawn evenly on a logarithmic scale from 1 to 64K; half of the head dimensions are usual ones,
the others any multiple of 8 from 32 to 256. A problem that is too large for `Limits` loses batch, then heads,
then length. Problem `index` of a seed is the same whatever the count, so a longer run repeats a shorter one.
"""

from __future__ import annotations

import dataclasses
import random

from sdpa_cutlass.cli.suites import P_DROPOUT, Case
from sdpa_cutlass.problem import Causal

SUITE = "random"
HEAD_DIMS = tuple(range(32, 257, 8))
USUAL_HEAD_DIMS = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
KINDS = {"self": 40, "cross": 15, "few queries": 15, "few keys": 10, "decode": 20}  # shares in percent
MASKS = ("padding", "lengths", "dense", "bias_f16")
FEW_QUERIES = 64
FEW_KEYS = 128
LONGEST = 65536
GROUPS = (1, 1, 1, 2, 4, 8)  # query heads of a key head
MOST_HEADS = 256
SHARE_CAUSAL = 0.45
SHARE_MASKED = 0.2
SHARE_DROPPED = 0.03
SHARE_BF16 = 0.33


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a problem may need: FLOPs (before a causal mask), bytes of q, k, v and out, and mask."""

    flops: float = 1e12
    bytes: int = 2**30
    mask_elements: int = 2**27


GPU = Limits()
CPU = Limits(flops=2e7, bytes=2**22, mask_elements=2**18)  # for a GPU that is emulated


def draw(seed: int, count: int, limits: Limits = GPU) -> list[Case]:
    """`count` different problems."""
    found: dict[str, Case] = {}
    index = 0
    while len(found) < count:
        case = problem(seed, index, limits)
        found.setdefault(case.name, case)
        index += 1
    return list(found.values())


def problem(seed: int, index: int, limits: Limits = GPU) -> Case:
    """Problem `index` of a seed; a repeated one only where two draws are equal."""
    dice = random.Random(f"{seed}/{index}")
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    head_dim = dice.choice(USUAL_HEAD_DIMS if dice.random() < 0.5 else HEAD_DIMS)
    rows, keys = _lengths(dice, kind)
    heads_kv, group = _evenly(dice, 1, 64), dice.choice(GROUPS)
    case = Case(
        suite=SUITE,
        batch=2 ** dice.randint(0, 6),
        num_heads_q=heads_kv * min(group, max(1, MOST_HEADS // heads_kv)),
        num_heads_kv=heads_kv,
        seqlen_q=rows,
        seqlen_k=keys,
        head_dim=head_dim,
        dtype="bf16" if dice.random() < SHARE_BF16 else None,
    )
    chances = [dice.random() for _ in range(3)]
    mask = dice.choice(MASKS)
    if kind == "self" and chances[0] < SHARE_CAUSAL:
        case = dataclasses.replace(case, causal=True)
    elif kind == "few queries" and chances[0] < SHARE_CAUSAL / 2:
        case = dataclasses.replace(case, causal=True, alignment=Causal.BOTTOM_RIGHT)
    elif kind in ("self", "cross") and chances[1] < SHARE_MASKED:
        case = dataclasses.replace(case, mask=mask)
    if kind == "self" and case.mask == "none" and chances[2] < SHARE_DROPPED:
        case = dataclasses.replace(case, p_dropout=P_DROPOUT)
    return _within(case, limits)


def kind_of(case: Case) -> str:
    """Which of KINDS a case is, from its lengths alone: what limits shortened may be another than drawn."""
    if case.seqlen_q == 1:
        return "decode"
    if case.seqlen_k <= FEW_KEYS and case.seqlen_q > case.seqlen_k:
        return "few keys"
    if case.seqlen_q == case.seqlen_k:
        return "self"
    return "few queries" if case.seqlen_q <= FEW_QUERIES else "cross"


def _lengths(dice: random.Random, kind: str) -> tuple[int, int]:
    if kind == "self":
        rows = _evenly(dice, 16, LONGEST)
        return rows, rows
    if kind == "cross":
        return _evenly(dice, FEW_QUERIES + 1, LONGEST // 4), _evenly(dice, FEW_KEYS + 1, LONGEST)
    if kind == "few queries":
        return _evenly(dice, 2, FEW_QUERIES), _evenly(dice, FEW_KEYS + 1, LONGEST)
    if kind == "few keys":
        return _evenly(dice, 2 * FEW_KEYS, LONGEST // 4), _evenly(dice, 8, FEW_KEYS)
    return 1, _evenly(dice, FEW_QUERIES, LONGEST)


def _evenly(dice: random.Random, least: int, most: int) -> int:
    """An integer whose logarithm is spread evenly. Now and then a power of two, as models have them."""
    value = min(most, max(least, round(least * (most / least) ** dice.random())))
    power: int = 2 ** round(value.bit_length() - 0.5)
    return power if dice.random() < 0.3 and least <= power <= most else value


def _within(case: Case, limits: Limits) -> Case:
    """The case made smaller until it fits."""
    while not _fits(case, limits):
        if case.batch > 1:
            case = dataclasses.replace(case, batch=case.batch // 2)
        elif case.num_heads_kv > 1:
            group = case.num_heads_q // case.num_heads_kv
            heads_kv = case.num_heads_kv // 2
            case = dataclasses.replace(case, num_heads_kv=heads_kv, num_heads_q=heads_kv * group)
        elif case.num_heads_q > 1:
            case = dataclasses.replace(case, num_heads_q=case.num_heads_q // 2)
        elif case.seqlen_q == case.seqlen_k:
            half = max(1, case.seqlen_q // 2)
            case = dataclasses.replace(case, seqlen_q=half, seqlen_k=half)
        elif case.seqlen_q > case.seqlen_k:
            case = dataclasses.replace(case, seqlen_q=max(1, case.seqlen_q // 2))
        else:
            case = dataclasses.replace(case, seqlen_k=max(1, case.seqlen_k // 2))
    return case


def _fits(case: Case, limits: Limits) -> bool:
    plain = dataclasses.replace(case, causal=False).problem()
    heads = {"dense": case.batch, "bias_f16": case.num_heads_q}.get(case.mask, 0)
    elements = heads * case.seqlen_q * case.seqlen_k
    return plain.flops <= limits.flops and plain.bytes <= limits.bytes and elements <= limits.mask_elements
