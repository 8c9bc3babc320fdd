"""Nsight Compute as a program: which counters are asked for, how it is called, and what it prints.

Every counter exists on sm_89 and sm_90 under the name used here (ncu 2025.3); one that a release or a GPU
does not know is printed as n/a and is None here. Caches are not flushed and clocks not fixed: that is how a
model runs. Counters do not fit into one run, so ncu repeats the kernel, restoring the memory in between.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdpa_cutlass.cli.profiling.problems import Task
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.machine_code.expected import MASK_BYTES

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
_ACTIVE = "avg.pct_of_peak_sustained_active"
_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_CONFLICTS = "data_bank_conflicts_pipe_lsu_mem_shared_op"

# Our name of a number and the counter that it is, the first one that the GPU has.
COUNTERS: dict[str, tuple[str, ...]] = {
    "duration_ns": ("gpu__time_duration.sum",),
    "sm_hz": ("sm__cycles_elapsed.avg.per_second",),
    "sm_active_pct": (f"sm__cycles_active.{_ELAPSED}",),
    "sms": ("device__attribute_multiprocessor_count",),
    "grid": ("launch__grid_size",),
    "threads": ("launch__block_size",),
    "registers": ("launch__registers_per_thread",),
    "smem_dynamic_bytes": ("launch__shared_mem_per_block_dynamic",),
    "smem_static_bytes": ("launch__shared_mem_per_block_static",),
    "ctas_by_registers": ("launch__occupancy_limit_registers",),
    "ctas_by_smem": ("launch__occupancy_limit_shared_mem",),
    "ctas_by_warps": ("launch__occupancy_limit_warps",),
    "waves": ("launch__waves_per_multiprocessor",),
    "occupancy_pct": (f"sm__warps_active.{_ACTIVE}",),
    "instructions": ("smsp__inst_executed.sum",),
    "issue_pct": (f"smsp__issue_active.{_ACTIVE}",),
    "tensor_pct": (
        f"sm__pipe_tensor_op_hmma_cycles_active.{_ACTIVE}",
        f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
    ),
    "alu_pct": (f"sm__inst_executed_pipe_alu.{_ACTIVE}",),
    "fma_pct": (f"sm__inst_executed_pipe_fma.{_ACTIVE}",),
    "xu_pct": (f"sm__inst_executed_pipe_xu.{_ACTIVE}",),
    "lsu_pct": (f"sm__inst_executed_pipe_lsu.{_ACTIVE}",),
    "shared_pct": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{_ELAPSED}",),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    "conflicts_ldsm": (f"sm__sass_l1tex_{_CONFLICTS}_ldsm.sum",),
    "conflicts_ld": (f"l1tex__{_CONFLICTS}_ld.sum",),
    "conflicts_st": (f"l1tex__{_CONFLICTS}_st.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l2_pct": (f"lts__throughput.{_ELAPSED}", f"lts__t_bytes.{_ELAPSED}"),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "dram_pct": (f"dram__throughput.{_ELAPSED}", f"dram__bytes.{_ELAPSED}"),
    **{
        f"stall_{reason}": (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",)
        for reason in STALLS
    },
}

# What the functions of one kernel are called, after its name: one without a mask, one for each kind of mask,
# or one for all kinds in a backward kernel. Its statistics and what is converted are launches of other names.
_FUNCTION = f"(_({'|'.join((*MASK_BYTES, 'masked'))}))?"
_USUAL_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_TIMEOUT_S = 600.0
Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class NcuError(SdpaError, RuntimeError):
    """ncu is not there, was not allowed to read counters, or saw no launch of the kernel."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One profiled launch of function `kernel`. `values` by the names of COUNTERS; None: was not counted."""

    kernel: str
    compute_capability: str
    values: Mapping[str, float | None]

    def get(self, name: str) -> float | None:
        """A number by its name in COUNTERS."""
        return self.values[name]


def find() -> str | None:
    """The path of ncu: on PATH, or where the toolkit's installer puts it."""
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    return next((place for place in _USUAL_PLACES if os.access(place, os.X_OK)), None)


def command(ncu: str, task: Task) -> list[str]:
    """The command line that profiles the second launch of the task's kernel."""
    metrics = dict.fromkeys(name for names in COUNTERS.values() for name in names)
    return [
        ncu,
        *("--csv", "--page", "raw", "--print-units", "base", "--target-processes", "application-only"),
        *("--cache-control", "none", "--clock-control", "none"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^{task.kernel}{_FUNCTION}$"),
        *("--launch-skip", "1", "--launch-count", "1"),
        *("--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "sdpa_cutlass.cli.profiling.child", task.to_json()),
    ]


def run_process(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command so that it finds this package, installed or not."""
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": path},
    )


def profile(ncu: str, task: Task, runner: Runner = run_process) -> Counters:
    """Profiles the task's kernel. Raises NcuError, saying what ncu said."""
    try:
        done = runner(command(ncu, task))
    except (OSError, subprocess.SubprocessError) as error:
        raise NcuError(f"{ncu} cannot be run: {error}") from error
    said = f"{done.stdout}\n{done.stderr}"
    if "ERR_NVGPUCTRPERM" in said:
        raise NcuError(
            "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root, or let "
            "the administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode != 0:
        raise NcuError(f"{ncu} failed with status {done.returncode}: {_last_words(said)}")
    return parse(done.stdout, task.kernel)


def parse(text: str, kernel: str) -> Counters:
    """Reads `ncu --csv --page raw`: a line of names, one of units, then one per launch, amid other output.

    Raises NcuError unless exactly one launch of a function of `kernel` is there.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise NcuError(f"ncu saw no launch of {kernel}: {_last_words(text)}")
    rows = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    launches = [row for row in rows if row["ID"]]  # the line of units has none
    functions = [row["Kernel Name"].partition("(")[0] for row in launches]
    if len(functions) != 1 or not re.fullmatch(kernel + _FUNCTION, functions[0]):
        names = ", ".join(row["Kernel Name"] for row in launches) or "nothing"
        raise NcuError(f"ncu was to profile one launch of {kernel}; it profiled {names}")
    row = launches[0]
    values = {
        ours: next((value for name in names if (value := _number(row.get(name))) is not None), None)
        for ours, names in COUNTERS.items()
    }
    return Counters(functions[0], row.get("CC", ""), values)


def _number(text: str | None) -> float | None:
    """Numbers have commas between thousands; what is not counted is n/a, an empty cell or nan."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==") or "Error" in line]
    return (errors or lines or ["it said nothing"])[-1]
