"""The compiled call path: native/ does in 1 µs what calls.py and launch.py do in 4.

It needs its file, which builds have that found Python's headers, and a torch whose tensors have DLPack's C
exchange interface. Without either, or with SDPA_CUTLASS_LAUNCHER=off in the environment, calls take the way
through Python, with the same results and errors.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import __version__
from . import locate
from .locate import Target

if TYPE_CHECKING:
    import torch

    from .abi import Library, NativePlan
    from .device import DeviceInfo

_INTERFACE = 4  # kInterface of native/launcher.c
_DEVICE_TYPES = {Target.HOST: 1, Target.CUDA: 2}  # of DLPack


@functools.cache
def module() -> ModuleType | None:
    """The extension module, loaded once; None where there is none for this Python and this package.

    `abi.library` asks first, before there is a kernel to run. Raises the errors of `locate_launcher`: a
    file that cannot be trusted is not passed over in silence.
    """
    path = locate.locate_launcher()
    if path is None or ".abi3.so" not in importlib.machinery.EXTENSION_SUFFIXES:
        return None  # there is none, or this Python (free-threaded, PyPy) has no stable ABI
    name = "sdpa_cutlass._launcher"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        found = importlib.util.module_from_spec(spec)
        loader.exec_module(found)
    except ImportError:  # another platform's file
        return None
    return found if (found.version, found.interface) == (__version__, _INTERFACE) else None


def exchange() -> Any:
    """torch's table of DLPack's C functions, or None."""
    torch = sys.modules.get("torch")
    return None if torch is None else getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def is_used() -> bool:
    """True when calls on this Python and torch take the compiled path. Raises the errors of `module`."""
    return module() is not None and exchange() is not None


def make_launcher(
    library: Library,
    doing: str,
    plan: NativePlan,
    device: DeviceInfo,
    addresses: bytes,
    make_workspace: Callable[[torch.Tensor, int], tuple[object, int]] | None,
) -> Any:
    """A Launcher of `plan` with an sdpa_addresses to begin with, or None where nothing compiled can serve.

    `doing` begins the message of a launch that fails. `make_workspace`, for kernels that need one, is called
    before each launch with out and the stream's handle: what to keep until it is queued, and the address.
    """
    found, table = module(), exchange()
    if found is None or table is None:
        return None
    from . import torch_state

    torch_state.tell(found)

    def fail(status: int) -> None:
        library.check(status, doing)

    try:
        return found.Launcher(
            tensor_type=sys.modules["torch"].Tensor,
            exchange=table,
            launch=ctypes.cast(library.launch_plan, ctypes.c_void_p).value,
            plan=plan.address.value,
            owner=plan,
            device_type=_DEVICE_TYPES[device.target],
            device=device.index,
            addresses=addresses,
            fail=fail,
            make_workspace=make_workspace,
        )
    except ValueError:  # torch speaks another DLPack
        return None
