"""Which committed times are no longer those of today's kernels, of the families of exact attention.

Dates are those from which on a change counts, as results write them: a day, or a day and an hour.
"""

from __future__ import annotations

from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.cost.corrections import name_of
from sdpa_cutlass.choice.cost.ctas import REGISTERS, resident_ctas
from sdpa_cutlass.choice.cost.splits import merges_in_second_launch
from sdpa_cutlass.choice.mask_reads import LONG_COPY_KEYS, LONGEST_RUN, RUNS, UNALIGNED_COPY_SCORES
from sdpa_cutlass.cli import predictions
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Problem

_MERGES_SINCE = "2026-11-26T08"  # by a second launch: the last CTA of a tile had merged large parts too
_PAIRS_READ_SINCE = "2026-11-26T21"  # by Hopper's kernels of masks that others have copied
_SHORT_PROLOGUES_SINCE = "2026-11-27"  # of split kernels with KV groups: they took up to 1.5 times as long
_TURNS_SINCE = "2026-11-27T18"  # of general kernels of Hopper: a CTA had one tile
# Of tiles that leave SMs idle, or a few of them with more, with more than two KV groups, and with two.
_EVEN_SPLITS_SINCE = "2026-11-28T14"
_EVEN_SPLITS_OF_TWO_SINCE = "2026-11-28T18"
_EVEN_SPLITS_OF_FEW_SINCE = "2026-11-29T09:30"  # where tiles are more than a third as many as SMs: than half
_THREE_WAVES_SINCE = "2026-11-29T07"  # of such tiles, at most: there had been two
_ROOM_SINCE = "2026-11-29"  # for more CTAs on an SM than are promised, and so other numbers of splits
_LONG_COPIES_SINCE = "2026-11-29T01:20"  # of masks in long rows: kernels read them one element at a time
_SHORT_EPILOGUES_SINCE = "2026-11-28T16"  # of kernels for mma.sync whose warps do not share rows
_SHORT_EPILOGUES_KEYS = 512  # beyond, O's way out is a small part of the time


def has_changed(kernel: KernelInfo, problem: Problem, date: str) -> bool:
    """Whether times of `date` are another kernel's: its code has changed, its mask is copied or no longer is,
    or other CTAs share or merge its parts.
    """
    if date < _LONG_COPIES_SINCE and _is_copied_for_its_length(kernel, problem):
        return True
    if kernel.family is Family.FMHA_FWD_SM90:
        return kernel.is_general and _general_of_hopper_has_changed(kernel, problem, date)
    if kernel.family is not Family.FMHA_FWD:
        return False
    writes_much = kernel.kv_groups == 1 and problem.seqlen_k <= _SHORT_EPILOGUES_KEYS
    if date < _SHORT_EPILOGUES_SINCE and writes_much:
        return True
    return kernel.is_split and _split_has_changed(kernel, problem, date)


def _is_copied_for_its_length(kernel: KernelInfo, problem: Problem) -> bool:
    run = RUNS.get(kernel.family.value, LONGEST_RUN)
    is_long = problem.scores < UNALIGNED_COPY_SCORES and problem.seqlen_k >= LONG_COPY_KEYS
    return problem.mask is not None and is_long and not problem.reads_mask_by(run)


def _general_of_hopper_has_changed(kernel: KernelInfo, problem: Problem, date: str) -> bool:
    if date < _PAIRS_READ_SINCE and not problem.reads_mask_by(LONGEST_RUN):
        run = RUNS[kernel.family.value]
        return problem.reads_mask_by(run) and problem.scores >= UNALIGNED_COPY_SCORES
    return date < _TURNS_SINCE and problem.mask is None and not problem.has_lengths


def _split_has_changed(kernel: KernelInfo, problem: Problem, date: str) -> bool:
    if kernel.kv_groups > 1 and date < _SHORT_PROLOGUES_SINCE:
        return True
    rows = min(kernel.block_m, problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv)
    found = estimate(kernel, problem, predictions.H200.device)
    num_splits = found.num_splits
    if date < _ROOM_SINCE and num_splits > 1 and name_of(kernel) in REGISTERS:
        return True
    sms = predictions.H200.device.sms
    at_once = resident_ctas(kernel, predictions.H200.device) * sms
    if kernel.kv_groups > 1 and num_splits > 1:
        tiles = found.ctas // num_splits
        if date < _THREE_WAVES_SINCE and found.ctas > 2 * at_once:
            return True
        even_since = _EVEN_SPLITS_OF_TWO_SINCE if kernel.kv_groups == 2 else _EVEN_SPLITS_SINCE
        if date < even_since and 2 * tiles > sms:
            return True
        is_few = 3 * tiles > sms >= 2 * tiles and predictions.H200.device.dram_us(problem.bytes) > 0
        if date < _EVEN_SPLITS_OF_FEW_SINCE and is_few:
            return True
    return date < _MERGES_SINCE and merges_in_second_launch(kernel, rows, num_splits)
