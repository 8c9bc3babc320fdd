"""The C ABI seen from Python: loading, handshake, and one method per function; structs.py has its structs.

Mirrors templates/include/sdpa/c_api.h, with which a test compares it; the handshake compares the sizes that
the library was compiled with. A library is loaded once per process and target, by absolute path, with local
symbols.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, c_char_p, c_int, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import (
    ArgumentError,
    HostCheckError,
    LaunchError,
    LibraryError,
    LibraryMismatchError,
    SdpaError,
    UnsupportedError,
)
from . import cpu_features
from .locate import Target, locate
from .structs import Addresses, BwdParams, MergeParams, Params, RawBuildInfo, RawKernelInfo

ABI_VERSION = 11

OK, INVALID_ARGUMENT, NOT_SUPPORTED, CUDA_ERROR, HOST_CHECK = range(5)  # enum sdpa_status

_ERRORS: dict[int, type[SdpaError]] = {
    INVALID_ARGUMENT: ArgumentError,
    NOT_SUPPORTED: UnsupportedError,
    CUDA_ERROR: LaunchError,
    HOST_CHECK: HostCheckError,
}
_TARGETS = (Target.CUDA, Target.HOST)  # in the order of enum sdpa_target


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sdpa_last_error": (c_char_p, ()),
    "sdpa_build_info_get": (c_int, (POINTER(RawBuildInfo),)),
    "sdpa_kernel_count": (c_int, ()),
    "sdpa_kernel_info_get": (c_int, (c_int, POINTER(RawKernelInfo))),
    "sdpa_can_implement": (c_int, (c_int, POINTER(Params))),
    "sdpa_workspace_bytes": (c_int, (c_int, POINTER(Params), POINTER(c_uint64))),
    "sdpa_launch": (c_int, (c_int, POINTER(Params), c_int, c_void_p)),
    "sdpa_plan_make": (c_int, (c_int, POINTER(Params), c_int, POINTER(c_void_p), POINTER(c_uint64))),
    "sdpa_plan_launch": (c_int, (c_void_p, POINTER(Addresses), c_void_p)),
    "sdpa_plan_free": (None, (c_void_p,)),
    "sdpa_kernel_occupancy": (c_int, (c_int, c_int, POINTER(c_int32), POINTER(c_int32), POINTER(c_int32))),
    "sdpa_prepare": (c_int, (c_int, c_int)),
    "sdpa_host_configure": (c_int, (c_uint64, c_int32)),
    "sdpa_merge_states": (c_int, (c_int, POINTER(MergeParams), c_int, c_void_p)),
    "sdpa_bwd_can_implement": (c_int, (c_int, POINTER(BwdParams))),
    "sdpa_bwd_workspace_bytes": (c_int, (c_int, POINTER(BwdParams), POINTER(c_uint64))),
    "sdpa_bwd_launch": (c_int, (c_int, POINTER(BwdParams), c_int, c_void_p)),
}
"""Every function of the ABI: result type and argument types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What a library was built from. Versions are as CUDART_VERSION (13000) and CUTLASS_VERSION (420)."""

    version: str
    target: Target
    digest: str
    space: str
    archs: str
    sanitizers: str
    cuda_runtime_version: int
    cutlass_version: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the CUDA runtime reports about a loaded kernel: registers a thread, spilled bytes, CTAs per SM."""

    registers: int
    local_bytes: int
    ctas_per_sm: int


class NativePlan:
    """An sdpa_plan, which is freed with this object. `address` must not be used any longer.

    `workspace_bytes`: what a launch needs.
    """

    __slots__ = ("_free", "address", "workspace_bytes")

    def __init__(self, address: c_void_p, workspace_bytes: int, free: Any) -> None:
        self.address = address
        self.workspace_bytes = workspace_bytes
        self._free = free

    def __del__(self) -> None:
        self._free(self.address)


class Library:
    """A loaded library that passed the handshake. Methods raise the package's errors; all are thread-safe."""

    def __init__(self, path: Path, functions: dict[str, Any], launch_plan: Any, build: BuildInfo) -> None:
        self.path = path
        self.build = build
        self.launch_function = functions["sdpa_launch"]  # for callers that check the status themselves
        self.launch_plan = launch_plan
        """`sdpa_plan_launch` without argtypes, whose conversions take 0.2 µs. Takes a NativePlan's address,
        Addresses as `bytes` and the stream as a c_void_p or None: other pointers would be cut to 32 bits."""
        self._functions = functions

    def last_error(self) -> str:
        """The calling thread's last failure."""
        return _text(self._functions["sdpa_last_error"]())

    def check(self, status: int, doing: str) -> None:
        """Raises the error that `status` stands for, unless it is OK."""
        if status != OK:
            kind = _ERRORS.get(status, LibraryError)
            raise kind(f"{doing}: {self.last_error() or f'status {status} without a message'}")

    def kernel_count(self) -> int:
        return int(self._functions["sdpa_kernel_count"]())

    def kernel_info(self, index: int) -> RawKernelInfo:
        info = RawKernelInfo(struct_size=ctypes.sizeof(RawKernelInfo))
        self._call("sdpa_kernel_info_get", f"kernel row {index} of {self.path}", index, ctypes.byref(info))
        return info

    def refusal(self, index: int, params: Params) -> str | None:
        """Why kernel `index` cannot run `params`, or None when it can."""
        status = self._functions["sdpa_can_implement"](index, ctypes.byref(params))
        return None if status == OK else self.last_error() or f"status {status}"

    def workspace_bytes(self, index: int, params: Params) -> int:
        size = c_uint64()
        self._call("sdpa_workspace_bytes", "workspace size", index, ctypes.byref(params), ctypes.byref(size))
        return size.value

    def make_plan(self, index: int, params: Params, device: int) -> NativePlan:
        """Checks kernel `index` against `params` and loads it, for any number of launches."""
        plan, size = c_void_p(), c_uint64()
        status = self._functions["sdpa_plan_make"](
            index, ctypes.byref(params), device, ctypes.byref(plan), ctypes.byref(size)
        )
        if status != OK:
            self.check(status, f"kernel row {index}")
        return NativePlan(plan, size.value, self._functions["sdpa_plan_free"])

    def prepare(self, index: int, device: int) -> None:
        """Loads kernel `index` onto `device`, so that a later launch neither compiles nor sets attributes."""
        self._call("sdpa_prepare", f"loading kernel row {index} onto device {device}", index, device)

    def occupancy(self, index: int, device: int) -> Occupancy:
        """Raises UnsupportedError in the host library and for rows that launch several kernels."""
        values = (c_int32(), c_int32(), c_int32())
        pointers = [ctypes.byref(value) for value in values]
        self._call("sdpa_kernel_occupancy", f"occupancy of kernel row {index}", index, device, *pointers)
        return Occupancy(*(value.value for value in values))

    def host_configure(self, *, schedule_seed: int = 0, num_threads: int = 0) -> None:
        """Host library: the seed that orders warps, and how many OS threads run blocks (0: all cores)."""
        self._call("sdpa_host_configure", "host configuration", schedule_seed, num_threads)

    def merge_states(self, index: int, params: MergeParams, device: int, stream: int | None) -> None:
        """Queues kernel `index`, which merges partial results, on `stream` of `device`."""
        self._call(
            "sdpa_merge_states", f"kernel row {index}", index, ctypes.byref(params), device, c_void_p(stream)
        )

    def backward_refusal(self, index: int, params: BwdParams) -> str | None:
        """Why kernel `index` cannot make the gradients of `params`, or None when it can."""
        status = self._functions["sdpa_bwd_can_implement"](index, ctypes.byref(params))
        return None if status == OK else self.last_error() or f"status {status}"

    def backward_workspace_bytes(self, index: int, params: BwdParams) -> int:
        size = c_uint64()
        arguments = (index, ctypes.byref(params), ctypes.byref(size))
        self._call("sdpa_bwd_workspace_bytes", "workspace size", *arguments)
        return size.value

    def launch_backward(self, index: int, params: BwdParams, device: int, stream: int | None) -> None:
        """Queues kernel `index`, which makes gradients, on `stream` of `device`."""
        arguments = (index, ctypes.byref(params), device, c_void_p(stream))
        self._call("sdpa_bwd_launch", f"kernel row {index}", *arguments)

    def _call(self, function: str, doing: str, *arguments: Any) -> None:
        self.check(self._functions[function](*arguments), doing)


_lock = threading.Lock()
_loaded: dict[Target, Library] = {}


def library(target: Target) -> Library:
    """The library for `target`, loaded at first use. A failure is not kept: a later call tries again.

    The compiled launcher is loaded first, so that what is wrong with it is told before any kernel runs.
    """
    found = _loaded.get(target)
    if found is None:
        from . import launcher

        with _lock:
            found = _loaded.get(target)
            if found is None:
                launcher.module()
                found = _loaded[target] = load(locate(target), target)
    return found


def load(path: Path, target: Target) -> Library:
    """Loads the file at the absolute `path` and checks that it speaks this package's ABI for `target`.

    Raises LibraryError when the CPU or the loader refuses it, LibraryMismatchError when it is not the
    expected library.
    """
    if target is Target.HOST:
        cpu_features.check(path)
    try:
        handle = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    functions = {}
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(handle, name)
        except AttributeError:
            raise _mismatch(path, target, f"it has no function {name}") from None
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    launch_plan = handle["sdpa_plan_launch"]
    launch_plan.restype = c_int
    return Library(path, functions, launch_plan, _handshake(path, target, functions))


def _handshake(path: Path, target: Target, functions: dict[str, Any]) -> BuildInfo:
    raw = RawBuildInfo(struct_size=ctypes.sizeof(RawBuildInfo))
    if functions["sdpa_build_info_get"](ctypes.byref(raw)) != OK:
        raise _mismatch(path, target, f"it refused the handshake: {_text(functions['sdpa_last_error']())}")
    if raw.abi_version != ABI_VERSION:
        raise _mismatch(
            path, target, f"it has ABI version {raw.abi_version}; this package needs {ABI_VERSION}"
        )
    if raw.params_size != ctypes.sizeof(Params):
        expected = ctypes.sizeof(Params)
        raise _mismatch(
            path, target, f"its sdpa_params has {raw.params_size} bytes; this package's {expected}"
        )
    if raw.target not in (0, 1) or _TARGETS[raw.target] is not target:
        made_for = _TARGETS[raw.target].value if raw.target in (0, 1) else f"target {raw.target}"
        raise _mismatch(path, target, f"it was built for {made_for}, not for {target.value}")
    if _text(raw.version) != __version__:
        raise _mismatch(
            path, target, f"it is version {_text(raw.version)!r}; this package is {__version__!r}"
        )
    return BuildInfo(
        version=_text(raw.version),
        target=target,
        digest=_text(raw.digest),
        space=_text(raw.space),
        archs=_text(raw.archs),
        sanitizers=_text(raw.sanitizers),
        cuda_runtime_version=raw.cuda_runtime_version,
        cutlass_version=raw.cutlass_version,
    )


def _mismatch(path: Path, target: Target, what: str) -> LibraryMismatchError:
    return LibraryMismatchError(
        f"{path} does not fit this package: {what}. To make it again, {target.how_to_build}."
    )


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
