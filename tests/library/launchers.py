"""What the tests of the compiled launcher share: small inputs, and a C function that launches nothing."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import torch

from sdpa_cutlass.library import launcher
from sdpa_cutlass.library.structs import Addresses
from tests.library.reference import rand

SHAPE = (1, 2, 9, 64)
PLAN = 2**47 + 8
LaunchFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def qkv(device: str, seed: int = 0) -> list[torch.Tensor]:
    return [rand(*SHAPE, device=device, seed=3 * seed + i) for i in range(3)]


class Recorder:
    """A launch function of C that keeps what it is given, and returns `status`."""

    def __init__(self, status: int = 0) -> None:
        self.seen: list[tuple[int | None, Addresses, int | None]] = []
        self._status = status
        self.function = LaunchFunction(self._launch)

    def _launch(self, plan: int | None, addresses: int, stream: int | None) -> int:
        copied = Addresses.from_buffer_copy(ctypes.string_at(addresses, ctypes.sizeof(Addresses)))
        self.seen.append((plan, copied, stream))
        return self._status

    def launcher(self, module: ModuleType, **changes: Any) -> Any:
        """A Launcher of CPU tensors that ends here."""
        options: dict[str, Any] = {
            "tensor_type": torch.Tensor,
            "exchange": launcher.exchange(),
            "launch": ctypes.cast(self.function, ctypes.c_void_p).value,
            "plan": PLAN,
            "owner": None,
            "device_type": 1,
            "device": 0,
            "addresses": bytes(Addresses(struct_size=5, workspace_bytes=9)),
            "fail": None,
            "make_workspace": None,
        }
        return module.Launcher(**options | changes)


class Subclass(torch.Tensor):
    pass
