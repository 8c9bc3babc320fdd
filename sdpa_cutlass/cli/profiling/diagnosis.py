"""Counters of a launch → what bounds it, the evidence, and what usually helps.

A unit that is busy for most of the time is the bound: nothing else can make the kernel faster than a smaller
load of that unit. When none is, warps wait, and the reasons for which they wait say for what. Before both:
with SMs that stand idle the grid is the matter, not the kernel. The thresholds are conventions, not
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdpa_cutlass.cli.profiling.ncu import STALLS, Counters

BUSY_PCT = 60.0  # a unit that is this busy bounds the kernel
IDLE_SM_PCT = 60.0  # SMs that are active for less than this share of the time are too few CTAs
SHORT_NS = 10_000.0  # a launch this short is mostly its own start and end
CONFLICT_SHARE = 0.05  # of shared memory's wavefronts: worth a line
# Not waiting: a warp that was chosen, or that could have been.
_READY = ("selected", "not_selected")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a busy unit is called, and what to do about it."""

    name: str
    counter: str
    hint: str


BOUNDS = (
    Bound(
        "tensor cores",
        "tensor_pct",
        "the multiplications themselves: skip blocks that a mask hides, or use a head_dim that is not padded",
    ),
    Bound(
        "exponentials (XU)",
        "xu_pct",
        "one ex2 a score at 16 a clock: compute some of them as a polynomial on the FMA pipe",
    ),
    Bound(
        "instruction issue",
        "issue_pct",
        "fewer instructions per MMA: a taller warp tile, cheaper masks, no address arithmetic in the loop",
    ),
    Bound(
        "integer and compare pipe (ALU)",
        "alu_pct",
        "fewer maxima, selections, conversions and address instructions per score",
    ),
    Bound(
        "fp32 pipe (FMA)", "fma_pct", "fewer rescales of O: rescale only when the row maximum grows enough"
    ),
    Bound(
        "shared memory",
        "shared_pct",
        "every warp reads all of K and V: give a warp more query rows, or keep Q in registers",
    ),
    Bound("L2", "l2_pct", "more query rows a CTA, so that K and V are read fewer times"),
    Bound("DRAM", "dram_pct", "K and V come from memory once at best: the problem is bound by their size"),
)

STALL_HINTS = {
    "barrier": "warps wait for each other: fewer barriers a block, or more CTAs per SM",
    "long_scoreboard": "warps wait for global memory: more stages, or loads further ahead",
    "lg_throttle": "too many loads of global memory at once: wider ones",
    "short_scoreboard": "warps wait for shared memory or ex2: fetch operands further ahead",
    "mio_throttle": "the queue to shared memory is full: fewer ldmatrix per MMA, wider warp tiles",
    "math_pipe_throttle": "warps wait for a busy pipe: overlap softmax with other MMAs",
    "wait": "fixed latencies of dependent instructions: more warps, or independent work between them",
    "no_instruction": "the code does not fit the instruction cache: a smaller loop body",
    "dispatch_stall": "the dispatcher holds instructions back: register bank conflicts, or uneven pipes",
    "drain": "warps wait for their stores at the end: longer work per CTA",
    "imc_miss": "constants are not in the cache yet: a very short kernel",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`bound` names the limit, `evidence` the numbers that say so, `hint` what usually helps."""

    bound: str
    evidence: tuple[str, ...]
    hint: str


def stalls(counters: Counters) -> list[tuple[str, float]]:
    """(reason, share of all warp time in it), largest first, of the warps that waited."""
    found = {reason: counters.get(f"stall_{reason}") or 0.0 for reason in STALLS}
    total = sum(found.values())
    if not total:
        return []
    shares = [(reason, value / total) for reason, value in found.items() if reason not in _READY and value]
    return sorted(shares, key=lambda pair: -pair[1])


def utilisations(counters: Counters) -> list[tuple[Bound, float]]:
    """Every unit that was counted, and how busy it was in percent of its peak, busiest first."""
    found = [(bound, value) for bound in BOUNDS if (value := counters.get(bound.counter)) is not None]
    return sorted(found, key=lambda pair: -pair[1])


def diagnose(counters: Counters) -> Diagnosis:
    """Names what bounds the launch."""
    busy = utilisations(counters)
    waits = stalls(counters)
    few = _too_few_ctas(counters)
    if few is not None:
        return few
    if busy and busy[0][1] >= BUSY_PCT:
        bound, share = busy[0]
        evidence = [f"{bound.name} busy {share:.0f} % of its peak"]
        evidence += [f"next: {other.name} {value:.0f} %" for other, value in busy[1:2]]
        if bound.counter == "shared_pct" and (conflicts := conflict_share(counters)) > CONFLICT_SHARE:
            evidence.append(f"{conflicts:.0%} of its wavefronts are bank conflicts")
            return Diagnosis(bound.name, tuple(evidence), "remove the bank conflicts: look at the swizzle")
        return Diagnosis(bound.name, tuple(evidence), bound.hint)
    evidence = [f"no unit is busy: the busiest is {b.name} with {share:.0f} %" for b, share in busy[:1]]
    if not waits:
        return Diagnosis("latency", tuple(evidence), "no stall reasons were counted: look at occupancy")
    reason, share = waits[0]
    evidence.append(f"{share:.0%} of all warp time is {reason}")
    return Diagnosis("latency", tuple(evidence), STALL_HINTS.get(reason, "more warps per SM hide it"))


def conflict_share(counters: Counters) -> float:
    """Bank conflicts as a share of all passes through shared memory; 0 where they were not counted."""
    wavefronts = counters.get("shared_wavefronts")
    found = sum(counters.get(f"conflicts_{kind}") or 0.0 for kind in ("ldsm", "ld", "st"))
    return found / wavefronts if wavefronts else 0.0


def _too_few_ctas(counters: Counters) -> Diagnosis | None:
    active = counters.get("sm_active_pct")
    if active is None or active >= IDLE_SM_PCT:
        return None
    grid, sms, waves = (counters.get(name) for name in ("grid", "sms", "waves"))
    duration = counters.get("duration_ns")
    evidence = [f"an SM is active for {active:.0f} % of the time"]
    if grid is not None and sms:
        evidence.append(f"{grid:.0f} CTAs on {sms:.0f} SMs")
    if waves is not None:
        evidence.append(f"{waves:.2f} waves")
    if duration is not None and duration < SHORT_NS:
        evidence.append(f"{duration / 1e3:.1f} µs in all, so that start and end of the launch count")
    hint = "smaller block_m, or split the keys over KV groups or CTAs: the grid has to cover every SM"
    if grid is not None and sms and grid >= sms:
        hint = "CTAs of unequal length, or a last wave with few of them: longest first, or smaller tiles"
    return Diagnosis("too few CTAs", tuple(evidence), hint)
