"""What is legal: the table `RULES`, each rule a statement and a predicate that gives the reason why not.

The fused family's rules restate what templates/include/sdpa/fmha_fwd/kernel_traits.cuh asserts, so that an
illegal config is refused here, by name and with a reason, and not by the compiler in the middle of a build.
The loads of Q need no rule: what block_m has to be a multiple of for the MMA covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from generator.config import COPY_ELEMENTS, GENERAL_BLOCK_N, MMA_M, MMA_N, RING_TILES, Family, KernelConfig

ALL = frozenset(Family)
FUSED = frozenset({Family.FMHA_FWD})
PIPED = frozenset({Family.UNFUSED})

MAX_HEAD_DIM = {Family.FMHA_FWD: 256, Family.UNFUSED: 128}  # of a GEMM: its widest tile
MAX_WARPS = 16
KV_GROUPS = (1, 2, 4, 8)
STAGES = {Family.FMHA_FWD: range(1, 5), Family.UNFUSED: range(3, 6)}
UNFUSED_WARPS = (4, 8)

# Registers that a thread needs whatever the tile; with fewer the compiler has to spill.
MIN_REGISTERS_BESIDE_ACCUMULATORS = 56

Predicate = Callable[[KernelConfig], "str | None"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`why_not` gives None for a config that keeps to `statement`, else the reason."""

    name: str
    statement: str
    families: frozenset[Family]
    why_not: Predicate


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one rule says of one config; `reason` is None when it passes."""

    rule: Rule
    reason: str | None


def verdicts(config: KernelConfig) -> list[Verdict]:
    """Every rule of the config's family with its verdict."""
    return [
        Verdict(rule=rule, reason=rule.why_not(config)) for rule in RULES if config.family in rule.families
    ]


def refusal(config: KernelConfig) -> str | None:
    """None when the config is legal, else the first reason, as `rule: reason`."""
    for rule in RULES:
        if config.family in rule.families:
            reason = rule.why_not(config)
            if reason is not None:
                return f"{rule.name}: {reason}"
    return None


def smem_cols(head_dim: int) -> int:
    """Columns of the swizzled shared-memory atom: the widest of 64, 32 and 16 that divides head_dim."""
    return next((cols for cols in (64, 32) if head_dim % cols == 0), 16)


def load_rows_per_pass(config: KernelConfig) -> int:
    """Rows of K or V that one pass of a KV group's 16-byte loads covers."""
    threads_per_row = smem_cols(config.head_dim) // COPY_ELEMENTS
    return 32 * config.tile.warps_m // threads_per_row


def _require(holds: bool, reason: str) -> str | None:
    return None if holds else reason


def _one_of(value: int, allowed: Iterable[int], what: str) -> str | None:
    values = list(allowed)
    return _require(value in values, f"{what} {value} is not one of {', '.join(map(str, values))}")


def _dropout(c: KernelConfig) -> str | None:
    return _require(c.general or not c.dropout, "only the general kernels have dropout")


def _split(c: KernelConfig) -> str | None:
    return _require(
        not c.split or (c.general and not c.dropout and c.tile.kv_groups > 1),
        "a split kernel is general, has KV groups and no dropout",
    )


def _unbiased(c: KernelConfig) -> str | None:
    return _require(
        not c.unbiased or (c.general and not c.dropout and not c.split),
        "an unbiased kernel is general, without dropout and not split",
    )


def _general_causal(c: KernelConfig) -> str | None:
    return _require(not (c.general and c.causal), "a general kernel takes causal at run time")


def _general_block_n(c: KernelConfig) -> str | None:
    return _require(
        not c.general or c.tile.block_n % GENERAL_BLOCK_N == 0,
        f"masks and dropout go by {GENERAL_BLOCK_N} keys, which do not divide block_n {c.tile.block_n}",
    )


def _head_dim(c: KernelConfig) -> str | None:
    most = MAX_HEAD_DIM[c.family]
    return _require(
        c.head_dim % 16 == 0 and c.head_dim <= most,
        f"head_dim {c.head_dim} is not a multiple of 16 up to {most}",
    )


def _warps(c: KernelConfig) -> str | None:
    return _require(c.tile.warps <= MAX_WARPS, f"{c.tile.warps} warps are more than {MAX_WARPS}")


def _kv_groups(c: KernelConfig) -> str | None:
    return _one_of(c.tile.kv_groups, KV_GROUPS, "kv_groups")


def _kv_groups_divide_warps(c: KernelConfig) -> str | None:
    return _require(
        c.tile.warps % c.tile.kv_groups == 0,
        f"{c.tile.warps} warps cannot be shared out to {c.tile.kv_groups} KV groups",
    )


def _kv_groups_divide_head_dim(c: KernelConfig) -> str | None:
    columns = MMA_N * c.tile.kv_groups
    return _require(
        c.tile.kv_groups == 1 or c.head_dim % columns == 0,
        f"{c.tile.kv_groups} KV groups complete {MMA_N} columns at a time, and {columns} do not divide "
        f"head_dim {c.head_dim}",
    )


def _block_m(c: KernelConfig) -> str | None:
    rows = MMA_M * c.tile.warps_m
    return _require(
        c.tile.block_m % rows == 0,
        f"block_m {c.tile.block_m} is not a multiple of {rows} ({MMA_M} for each of {c.tile.warps_m} warps)",
    )


def _block_n(c: KernelConfig) -> str | None:
    return _require(c.tile.block_n % 16 == 0, f"block_n {c.tile.block_n} is not a multiple of 16")


def _stages(c: KernelConfig) -> str | None:
    return _one_of(c.tile.stages, STAGES[c.family], "stages")


def _kv_groups_stages(c: KernelConfig) -> str | None:
    return _require(
        c.tile.kv_groups == 1 or c.tile.stages == 1,
        f"KV groups work on rings of {RING_TILES} tiles, so stages is 1, not {c.tile.stages}",
    )


def _q_in_regs(c: KernelConfig) -> str | None:
    return _require(
        not c.tile.q_in_regs or c.tile.kv_groups == 1,
        f"with {c.tile.kv_groups} KV groups, Q is in registers anyway and never in shared memory",
    )


def _load(c: KernelConfig) -> str | None:
    rows = load_rows_per_pass(c)
    return _require(
        c.tile.block_n % rows == 0,
        f"one pass of the K and V loads covers {rows} rows, which do not divide block_n {c.tile.block_n}",
    )


def _smem(c: KernelConfig) -> str | None:
    limit = c.arch.limits.smem_per_cta
    return _require(
        c.smem_bytes <= limit, f"{c.smem_bytes} bytes of shared memory, {c.arch.value} gives a CTA {limit}"
    )


def _registers(c: KernelConfig) -> str | None:
    least = c.accumulator_registers + MIN_REGISTERS_BESIDE_ACCUMULATORS
    limit = c.arch.limits.registers_for(c.tile.threads)
    return _require(
        least <= limit,
        f"at least {least} registers a thread ({c.accumulator_registers} accumulators), the limit is {limit}",
    )


def _unfused_variants(c: KernelConfig) -> str | None:
    return _require(
        not c.general and not c.dropout and not c.split and not c.unbiased,
        "the piped family has no masks, dropout or splits",
    )


def _unfused_warps(c: KernelConfig) -> str | None:
    return _one_of(c.tile.warps, UNFUSED_WARPS, "warps")


def _unfused_block(c: KernelConfig) -> str | None:
    m, n = c.tile.block_m, c.tile.block_n
    return _require(m % 64 == 0 and n % 64 == 0, f"block {m}x{n} is not in steps of 64x64")


def _unfused_warp_tile(c: KernelConfig) -> str | None:
    outputs = c.tile.block_m * c.tile.block_n // c.tile.warps
    return _require(
        outputs >= 32 * 32, f"each of {c.tile.warps} warps has {outputs} outputs, fewer than 32x32"
    )


def _unfused_plain(c: KernelConfig) -> str | None:
    return _require(
        c.tile.kv_groups == 1 and not c.tile.q_in_regs, "a GEMM has neither KV groups nor Q in registers"
    )


def _rule(name: str, families: frozenset[Family], statement: str, why_not: Predicate) -> Rule:
    return Rule(name=name, families=families, statement=statement, why_not=why_not)


RULES: tuple[Rule, ...] = (
    _rule("dropout", FUSED, "dropout only in general kernels", _dropout),
    _rule("split", FUSED, "split only in general kernels with KV groups, without dropout", _split),
    _rule("unbiased", FUSED, "unbiased only in general kernels without dropout or splits", _unbiased),
    _rule("general_causal", FUSED, "general and causal exclude each other", _general_causal),
    _rule("head_dim", ALL, "head_dim is a multiple of 16 up to 256, in a GEMM up to 128", _head_dim),
    _rule("warps", FUSED, f"1 to {MAX_WARPS} warps", _warps),
    _rule("kv_groups", FUSED, "1, 2, 4 or 8 KV groups", _kv_groups),
    _rule("kv_groups_divide_warps", FUSED, "KV groups have equally many warps", _kv_groups_divide_warps),
    _rule(
        "kv_groups_divide_head_dim",
        FUSED,
        "head_dim is a multiple of 8 columns for each KV group",
        _kv_groups_divide_head_dim,
    ),
    _rule("block_m", FUSED, "block_m is a multiple of 16 rows for each warp of a KV group", _block_m),
    _rule("block_n", FUSED, "block_n is a multiple of 16", _block_n),
    _rule("general_block_n", FUSED, "block_n of a general kernel is a multiple of 32", _general_block_n),
    _rule("stages", ALL, "1 to 4 stages in a fused kernel, 3 to 5 in a GEMM", _stages),
    _rule("kv_groups_stages", FUSED, "one stage with KV groups", _kv_groups_stages),
    _rule("q_in_regs", FUSED, "Q in registers only without KV groups", _q_in_regs),
    _rule("load", FUSED, "the K and V loads of a KV group cover whole tiles", _load),
    _rule(
        "unfused_variants", PIPED, "a GEMM is neither general nor split, nor has dropout", _unfused_variants
    ),
    _rule("unfused_warps", PIPED, "4 or 8 warps in a GEMM", _unfused_warps),
    _rule("unfused_block", PIPED, "GEMM tiles come in steps of 64x64", _unfused_block),
    _rule("unfused_warp_tile", PIPED, "a GEMM's warp has at least 32x32 outputs", _unfused_warp_tile),
    _rule("unfused_plain", PIPED, "no KV groups and no Q in registers in a GEMM", _unfused_plain),
    _rule("smem", ALL, "shared memory fits one CTA", _smem),
    _rule("registers", ALL, "the accumulators leave a thread enough registers", _registers),
)
