"""Which of the two shared libraries is meant: that for GPUs, or that which runs the same kernels on the CPU.

Names only. locate.py finds their files, abi.py loads them.
"""

from __future__ import annotations

from enum import Enum


class Target(Enum):
    """Which of the two libraries: ``CUDA`` runs on a GPU, ``HOST`` runs the same kernels on the CPU."""

    CUDA = "cuda"
    HOST = "host"

    __hash__ = object.__hash__  # Enum's own is Python code, and choosing a kernel hashes devices

    @property
    def file_name(self) -> str:
        return "libsdpa_cutlass.so" if self is Target.CUDA else "libsdpa_cutlass_host.so"

    @property
    def environment_variable(self) -> str:
        return "SDPA_CUTLASS_LIBRARY" if self is Target.CUDA else "SDPA_CUTLASS_HOST_LIBRARY"

    @property
    def how_to_build(self) -> str:
        return f"run `make {self.value}` in a checkout, or `pip install .`"
