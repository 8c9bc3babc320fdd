"""Theoretical occupancy, against NVIDIA's own calculator where its header and a compiler are there."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from sdpa_cutlass.machine_code.occupancy import SMS, occupancy

PROGRAM = """\
#include <cstddef>
#include <cstdio>
#include <initializer_list>
#include "cuda_occupancy.h"
int main() {
  int arch, warps, ctas, smem_per_sm, smem_per_cta, threads, registers, smem;
  while (scanf("%d %d %d %d %d %d %d %d", &arch, &warps, &ctas, &smem_per_sm, &smem_per_cta, &threads,
               &registers, &smem) == 8) {
    cudaOccDeviceProp sm;
    sm.computeMajor = arch / 10;
    sm.computeMinor = arch % 10;
    sm.maxThreadsPerBlock = 1024;
    sm.maxThreadsPerMultiprocessor = 32 * warps;
    sm.regsPerBlock = sm.regsPerMultiprocessor = 65536;
    sm.warpSize = 32;
    sm.sharedMemPerBlock = 49152;
    sm.sharedMemPerMultiprocessor = smem_per_sm;
    sm.numSms = 1;
    sm.sharedMemPerBlockOptin = smem_per_cta;
    sm.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = smem_per_cta;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &sm, &kernel, &state, threads, smem)) return 1;
    printf("%d\\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


def calculator(folder: Path) -> Path:
    """NVIDIA's calculator as a program."""
    nvidia = importlib.util.find_spec("nvidia")
    places = (
        [Path(place, "cu13/include") for place in nvidia.submodule_search_locations or []] if nvidia else []
    )
    places.append(Path("/usr/local/cuda/include"))
    include = next((place for place in places if (place / "cuda_occupancy.h").exists()), None)
    compiler = shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("cuda_occupancy.h or g++ is not there")
    (folder / "calculator.cpp").write_text(PROGRAM)
    program = folder / "calculator"
    subprocess.run([compiler, f"-I{include}", "-o", program, folder / "calculator.cpp"], check=True)
    return program


def test_agrees_with_nvidias_calculator(tmp_path: Path) -> None:
    cases = [
        (sm, threads, registers, smem)
        for sm in SMS.values()
        for threads in (32, 96, 128, 160, 256, 1024)
        for registers in range(16, 256, 9)
        for smem in (0, 100, 24576, 49152, 65536, 98304, 101376, 232448)
        if smem <= sm.smem_per_cta
    ]
    lines = [
        f"{sm.arch} {sm.warps} {sm.ctas} {sm.smem_per_sm} {sm.smem_per_cta} {threads} {registers} {smem}"
        for sm, threads, registers, smem in cases
    ]
    done = subprocess.run(
        [calculator(tmp_path)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    expected = [int(line) for line in done.stdout.split()]
    found = [
        occupancy(sm, threads=threads, registers=registers, smem_bytes=smem).ctas
        for sm, threads, registers, smem in cases
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("registers", "smem", "ctas", "limited_by"),
    [
        (142, 24576, 3, "registers"),
        (128, 49152, 2, "shared memory"),
        (32, 0, 12, "warps"),
        (255, 101376, 1, "shared memory"),
        (255, 101377, 0, "shared memory"),
    ],
)
def test_says_what_limits(registers: int, smem: int, ctas: int, limited_by: str) -> None:
    found = occupancy(SMS[89], threads=128, registers=registers, smem_bytes=smem)
    assert (found.ctas, found.warps, found.max_warps, found.limited_by) == (ctas, 4 * ctas, 48, limited_by)
