"""Arrays of other libraries read as they lie in memory, by the protocols that they speak. Needs no torch.

`view_of` reads `__array_interface__`, DLPack (the versioned and the older capsule) or
`__cuda_array_interface__`, in this order, and keeps both protocols' rules for streams: DLPack's producer is
told the stream that will use the memory, and that stream waits for the one that a CUDA array names. Nothing
is copied and nothing allocated.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError, DriverError, UnsupportedError
from ..library.device import pointer_device, wait_for
from .array_view import (
    PRODUCER_ERRORS,
    ArrayView,
    Device,
    check_is_array,
    contiguous_strides,
    has_protocol,
    not_without_torch,
)

_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}  # of a typestr
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 13: "cuda"}  # kDLCPU, kDLCUDA, kDLCUDAManaged
_READ_ONLY, _IS_COPIED = 1, 2  # flags of a versioned capsule
_CPU = Device("cpu", 0)


def view_of(name: str, value: Any, stream: int, *, writable: bool = False) -> ArrayView:
    """`value` as it lies in memory, ready to be used on the CUDA stream `stream` (0: the legacy default one).

    Raises ArgumentTypeError or ArgumentError naming the argument `name`.
    """
    check_is_array(name, value)
    try:
        if has_protocol(value, "__array_interface__"):
            return _from_interface(name, value, value.__array_interface__, writable=writable)
        if has_protocol(value, "__dlpack__"):
            return _from_dlpack(name, value, stream, writable=writable)
        return _from_cuda_interface(name, value, stream, writable=writable)
    except (ArgumentError, ArgumentTypeError, UnsupportedError):
        raise
    except (*PRODUCER_ERRORS, KeyError, DriverError) as error:
        what = f"{type(value).__name__} of dtype {getattr(value, 'dtype', 'unknown')}"
        raise ArgumentTypeError(f"{name} is a {what}, which cannot be read: {error}") from error


def named_stream(name: str, value: Any) -> int | None:
    """The stream that `value` names in its `__cuda_array_interface__`; None where it names none."""
    if not has_protocol(value, "__cuda_array_interface__"):
        return None
    named = value.__cuda_array_interface__.get("stream")
    if named == 0:
        raise ArgumentError(
            f"{name} names stream 0 in its __cuda_array_interface__; allowed are 1, 2, handles and None"
        )
    return None if named is None else legacy_as_zero(int(named))


def legacy_as_zero(handle: int) -> int:
    """Both protocols write 1 for the legacy default stream, the CUDA runtime 0."""
    return 0 if handle == 1 else handle


def _from_cuda_interface(name: str, value: Any, stream: int, *, writable: bool) -> ArrayView:
    interface = value.__cuda_array_interface__
    address = interface["data"][0]
    device = Device("cuda", pointer_device(address) if address else 0)  # no address: no elements
    view = _from_interface(name, value, interface, writable=writable, device=device)
    producer = named_stream(name, value)
    if producer is not None and producer != stream:
        wait_for(stream, producer, device.index)
    return view


def _from_interface(
    name: str, value: Any, interface: Any, *, writable: bool, device: Device = _CPU
) -> ArrayView:
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise ArgumentTypeError(f"{name} is a {type(value).__name__} without an address in its interface")
    if interface.get("mask") is not None:
        raise ArgumentTypeError(f"{name} is a masked array; allowed are arrays without missing elements")
    if writable:
        _check_writable(name, value, data[1])
    shape = tuple(map(int, interface["shape"]))
    dtype, itemsize = _dtype_of(interface["typestr"], value)
    strides = interface.get("strides")
    if strides is None:
        in_elements = contiguous_strides(shape)
    else:
        if any(size > 1 and stride % itemsize for size, stride in zip(shape, strides, strict=True)):
            raise ArgumentError(f"{name} has byte strides {tuple(strides)}: no multiples of {itemsize}")
        in_elements = tuple(stride // itemsize for stride in strides)
    return _checked(name, int(data[0]), shape, in_elements, dtype, itemsize, device, value)


def _dtype_of(typestr: str, value: Any) -> tuple[str, int]:
    """torch's name for a typestr such as "<f2", and bytes; what has none keeps the typestr.

    The typestr of ml_dtypes.bfloat16 says "two bytes" only; its name is on the array.
    """
    order, kind, itemsize = typestr[0], typestr[1], int(typestr[2:])
    if kind == "V" and str(getattr(value, "dtype", "")) == "bfloat16":
        return "bfloat16", itemsize
    if order == ">" or kind not in _KINDS:
        return typestr, itemsize
    return (_KINDS[kind] if kind == "b" else f"{_KINDS[kind]}{8 * itemsize}"), itemsize


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


# Prototypes of our own: those of ctypes.pythonapi are shared by everything in the process.
_is_capsule = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"


def _from_dlpack(name: str, value: Any, stream: int, *, writable: bool) -> ArrayView:
    """The capsule is borrowed, not consumed: it frees what it holds when the view is gone."""
    kind, index = value.__dlpack_device__()
    if int(kind) not in _DLPACK_DEVICES:
        raise ArgumentTypeError(f"{name} is on DLPack device type {int(kind)}; allowed are CPU and CUDA")
    device = Device(_DLPACK_DEVICES[int(kind)], int(index))
    if writable and device.type == "cuda" and has_protocol(value, "__cuda_array_interface__"):
        _check_writable(
            name, value, value.__cuda_array_interface__["data"][1]
        )  # an older capsule cannot say it
    options = {"stream": stream or 1} if device.type == "cuda" else {}
    try:
        capsule = value.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = value.__dlpack__(**options)
    if _is_capsule(capsule, _VERSIONED_NAME):
        versioned = _Versioned.from_address(_pointer_of(capsule, _VERSIONED_NAME))
        if versioned.major != 1:
            raise ArgumentTypeError(f"{name} speaks DLPack {versioned.major}; allowed is 1 or older")
        if device.type == "cuda" and versioned.flags & _IS_COPIED:
            raise ArgumentTypeError(
                f"{name} is a {type(value).__name__} whose __dlpack__ lends a copy, which is freed when the "
                "call returns, maybe before the kernel has run; allowed are arrays that lend their own memory"
            )
        if writable:
            _check_writable(name, value, versioned.flags & (_READ_ONLY | _IS_COPIED))
        tensor = versioned.tensor
    elif _is_capsule(capsule, _NAME):
        tensor = _Tensor.from_address(_pointer_of(capsule, _NAME))
    else:
        raise ArgumentTypeError(f"{name}.__dlpack__() gave no capsule that can be used")
    bits = tensor.bits * tensor.lanes
    dtype = _DLPACK_CODES.get(tensor.code, f"DLPack type {tensor.code} of ")
    if tensor.lanes != 1:
        dtype = f"{tensor.lanes} x {dtype}"
    if dtype != "bool":
        dtype += str(tensor.bits)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return _checked(name, address, shape, strides, dtype, bits // 8, device, (value, capsule))


def _check_writable(name: str, value: Any, is_read_only: object) -> None:
    if is_read_only:
        raise ArgumentTypeError(f"{name} is a read-only {type(value).__name__}; it must be writable")


def _checked(
    name: str,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    itemsize: int,
    device: Device,
    owner: Any,
) -> ArrayView:
    if any(size > 1 and stride < 0 for size, stride in zip(shape, strides, strict=True)):
        raise UnsupportedError(
            f"{name} has strides {strides}, some of them negative; {not_without_torch('copied')}"
        )
    if itemsize in (2, 4) and address % itemsize:
        raise ArgumentError(f"{name} starts at address {address:#x}; it must be a multiple of {itemsize}")
    return ArrayView(
        name=name,
        address=address,
        shape=shape,
        strides=strides,
        dtype=dtype,
        itemsize=itemsize,
        device=device,
        owner=owner,
    )
