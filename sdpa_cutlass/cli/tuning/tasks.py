"""Which problems a sweep measures, and in which order: the most valuable first, for a budget may end it.

The suites of suites.py come in their own order, and `grid` is spread among them. The grid covers what the
bucket of a problem distinguishes, for every head_dim that the library has kernels for:
    plain    seqlen 128 to 8192 in octaves, full and causal, batch · heads from GRID_HEADS up in octaves until
             the GPU is full (tuned_table.ENOUGH_ROWS); every second of both is coarse, the rest fine
    decode   few queries against many keys, with and without grouped heads
    general  masks, biases, lengths and dropout at three lengths and two sizes of grid
Level 0: `mission` and `small`. Level 1: the coarse grid and the other suites. Level 2: the fine grid.
Within a level f16 comes before bf16 and the usual head dimensions before the others. A problem of the grid
whose bucket another problem has is left out.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence

from sdpa_cutlass.choice.tuned_table import ENOUGH_ROWS, Bucket, HeadDims, bucket_of
from sdpa_cutlass.cli import suites
from sdpa_cutlass.cli.suites import P_DROPOUT, Case, with_conditions
from sdpa_cutlass.cli.tuning.arguments import GRID
from sdpa_cutlass.problem import Causal, DType, Problem

FIRST_SUITES = ("mission", "small")
USUAL_HEAD_DIMS = (64, 128, 80, 96, 32)
GRID_SEQLENS = (128, 256, 512, 1024, 2048, 4096, 8192)
GRID_HEADS = 4
MAX_HEADS = 8  # of one sequence; more become a batch
DECODE_SEQLENS_Q = (1, 4, 16)
DECODE_SEQLENS_K = (512, 2048, 8192, 32768)
DECODE_HEADS = (8, 64, 512)
DECODE_KEYS = 2**22  # of all heads, at most
DECODE_GQA = (1, 8)
GENERAL_SEQLENS = (128, 1024, 8192)
GENERAL_TOKENS = (8192, 65536)  # batch · heads · seqlen
GENERAL_KINDS = ("dense", "bias_f16", "bias_f32", "lengths", "dropout")
CAUSAL_KINDS = ("lengths", "dropout")  # the other masks hold what they like, a causal part too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem to measure; `level` says how soon."""

    case: Case
    dtype: DType
    bucket: Bucket
    level: int

    @property
    def name(self) -> str:
        """Tells all tasks apart."""
        name = self.case.name
        return name if self.case.dtype else f"{name}_{self.dtype.value}"

    @property
    def problem(self) -> Problem:
        """What select.py is asked."""
        return problem_of(self.case, self.dtype)


def problem_of(case: Case, dtype: DType) -> Problem:
    """The problem that a case poses with its mask, lengths and dropout, as the library sees it."""
    return with_conditions(case.problem(dtype), case.mask, case.p_dropout)


def make_tasks(names: Sequence[str], dtypes: Iterable[str], head_dims: HeadDims) -> list[Task]:
    """The tasks of the named suites, in the order in which they are to be measured."""
    tasks = []
    for dtype in (DType(name) for name in dtypes):
        seen: set[Bucket] = set()
        for name in names:
            if name == GRID:
                continue
            for case in suites.cases_of([name]):
                task = _task(case, dtype, head_dims, 0 if name in FIRST_SUITES else 1)
                if task is not None:
                    tasks.append(task)
                    seen.add(task.bucket)
        for level, case in grid(head_dims) if GRID in names else ():
            task = _task(case, dtype, head_dims, level)
            if task is not None and task.bucket not in seen:
                tasks.append(task)
                seen.add(task.bucket)
    unique = {task.name: task for task in tasks}
    return sorted(unique.values(), key=lambda task: _rank(task, names))


def matching(tasks: Sequence[Task], globs: Sequence[str]) -> list[Task]:
    """The tasks whose name matches any of `globs`; all of them when there are none."""
    return [
        task for task in tasks if not globs or any(fnmatch.fnmatchcase(task.name, glob) for glob in globs)
    ]


def _task(case: Case, dtype: DType, head_dims: HeadDims, level: int) -> Task | None:
    if case.dtype not in (None, dtype.value):
        return None
    bucket = bucket_of(problem_of(case, dtype), head_dims)
    return None if bucket is None else Task(case=case, dtype=dtype, bucket=bucket, level=level)


def _rank(task: Task, names: Sequence[str]) -> tuple[int, ...]:
    """Tasks of equal rank keep their order."""
    head_dim = task.case.head_dim
    usual = USUAL_HEAD_DIMS.index(head_dim) if head_dim in USUAL_HEAD_DIMS else len(USUAL_HEAD_DIMS)
    return task.level, list(DType).index(task.dtype), list(names).index(task.case.suite), usual


def grid(head_dims: HeadDims) -> list[tuple[int, Case]]:
    """The grid's problems with their levels."""
    found: list[tuple[int, Case]] = []
    for head_dim in sorted(head_dims.plain):
        found += _plain(head_dim)
        found += [(1, case) for case in _decode(head_dim)]
    for head_dim in head_dims.general:
        found += [(1, case) for case in _general(head_dim)]
    return found


def _plain(head_dim: int) -> Iterable[tuple[int, Case]]:
    for i, seqlen in enumerate(GRID_SEQLENS):
        heads, j = GRID_HEADS, 0
        while heads * seqlen <= ENOUGH_ROWS:
            level = 1 if i % 2 == 0 and j % 2 == 0 else 2
            for causal in (False, True):
                yield level, _case(heads, seqlen, seqlen, head_dim, causal=causal)
            heads, j = 2 * heads, j + 1


def _decode(head_dim: int) -> Iterable[Case]:
    for seqlen_k in DECODE_SEQLENS_K:
        for heads in DECODE_HEADS:
            if heads * seqlen_k > DECODE_KEYS:
                continue
            for gqa in DECODE_GQA:
                for seqlen_q in DECODE_SEQLENS_Q:
                    case = _case(heads, seqlen_q, seqlen_k, head_dim, causal=seqlen_q > 1)
                    yield dataclasses.replace(
                        case, num_heads_kv=case.num_heads_q // gqa, alignment=Causal.BOTTOM_RIGHT
                    )


def _general(head_dim: int) -> Iterable[Case]:
    for seqlen in GENERAL_SEQLENS:
        for tokens in GENERAL_TOKENS:
            for kind in GENERAL_KINDS:
                for causal in (False, True) if kind in CAUSAL_KINDS else (False,):
                    case = _case(max(tokens // seqlen, 1), seqlen, seqlen, head_dim, causal=causal)
                    if kind == "dropout":
                        yield dataclasses.replace(case, p_dropout=P_DROPOUT)
                    else:
                        yield dataclasses.replace(case, mask=kind)


def _case(heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, *, causal: bool) -> Case:
    """`heads` counts those of all sequences; it is a power of two."""
    per_sequence = min(heads, MAX_HEADS)
    return Case(
        suite=GRID,
        batch=heads // per_sequence,
        num_heads_q=per_sequence,
        num_heads_kv=per_sequence,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        causal=causal,
    )
