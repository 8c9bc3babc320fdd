"""GPUs that a choice of kernels may be made for, without one."""

from __future__ import annotations

from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.locate import Target


def made_card(name: str, capability: tuple[int, int], sms: int, mma_flops_per_clock: int) -> DeviceInfo:
    return DeviceInfo(
        target=Target.CUDA,
        index=0,
        name=name,
        compute_capability=capability,
        sms=sms,
        mma_flops_per_clock=mma_flops_per_clock,
    )
