"""The ctypes mirror against the C header: same structs, fields, order, types, constants and functions."""

from __future__ import annotations

import ctypes
import enum
import re
from pathlib import Path

import pytest

from generator.core.kernel import Accuracy, Op, Takes
from sdpa_cutlass.choice.cost import splits
from sdpa_cutlass.library import abi, registry, structs

HEADER = Path(__file__).parents[2] / "templates" / "include" / "sdpa" / "c_api.h"
_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "const char *": ctypes.c_char_p,
    "const sdpa_detail *": ctypes.POINTER(structs.Detail),
    "const void *": ctypes.c_void_p,
    "const uint64_t *": ctypes.c_void_p,
    "const int32_t *": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
    "float *": ctypes.c_void_p,
    "uint32_t *": ctypes.c_void_p,
    "int32_t *": ctypes.POINTER(ctypes.c_int32),
    "uint64_t *": ctypes.POINTER(ctypes.c_uint64),
    "void": None,
    "const float *": ctypes.c_void_p,
    "const sdpa_merge_part *": ctypes.POINTER(structs.MergePart),
    "const sdpa_merge_params *": ctypes.POINTER(structs.MergeParams),
    "const sdpa_params *": ctypes.POINTER(structs.Params),
    "sdpa_params": structs.Params,
    "const sdpa_bwd_params *": ctypes.POINTER(structs.BwdParams),
    "const sdpa_addresses *": ctypes.POINTER(structs.Addresses),
    "sdpa_plan *": ctypes.c_void_p,
    "const sdpa_plan *": ctypes.c_void_p,
    "sdpa_plan **": ctypes.POINTER(ctypes.c_void_p),
    "sdpa_kernel_info *": ctypes.POINTER(structs.RawKernelInfo),
    "sdpa_build_info *": ctypes.POINTER(structs.RawBuildInfo),
}
STRUCTS = {
    "sdpa_params": structs.Params,
    "sdpa_addresses": structs.Addresses,
    "sdpa_detail": structs.Detail,
    "sdpa_kernel_info": structs.RawKernelInfo,
    "sdpa_merge_part": structs.MergePart,
    "sdpa_merge_params": structs.MergeParams,
    "sdpa_bwd_params": structs.BwdParams,
    "sdpa_build_info": structs.RawBuildInfo,
}


def _code() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def _declaration(text: str) -> tuple[object, str]:
    """(ctypes type, name) of "const void *q" or "int64_t q_stride[3]"."""
    match = re.fullmatch(r"(.+?)\s*(\w+)(?:\[(\d+)\])?", " ".join(text.split()))
    assert match, text
    kind, name, length = match.groups()
    return (_TYPES[kind] * int(length) if length else _TYPES[kind]), name


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_mirrors_the_header(name: str) -> None:
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", _code(), re.DOTALL)
    assert body
    fields = [_declaration(line) for line in body[1].split(";") if line.strip()]
    assert [(field, kind) for kind, field in fields] == list(STRUCTS[name]._fields_)


def test_every_function_is_declared_alike() -> None:
    declared = {}
    for result, name, arguments in re.findall(
        r"SDPA_API ([\w\s]+?\*?)(sdpa_\w+)\((.*?)\);", _code(), re.DOTALL
    ):
        kinds = () if arguments == "void" else tuple(_declaration(text)[0] for text in arguments.split(","))
        declared[name] = (_TYPES[result.strip()], kinds)
    assert declared == abi.FUNCTIONS


def test_constants() -> None:
    constants = dict(re.findall(r"(SDPA_\w+) = (\d)", _code()))
    names = ("OK", "INVALID_ARGUMENT", "NOT_SUPPORTED", "CUDA_ERROR", "HOST_CHECK")
    assert [int(constants[f"SDPA_{name}"]) for name in names] == [getattr(abi, name) for name in names]
    assert [constants[f"SDPA_DTYPE_{name}"] for name in ("F16", "BF16", "F32")] == ["0", "1", "2"]
    assert [constants[f"SDPA_BUILT_FOR_{name}"] for name in ("CUDA", "HOST")] == ["0", "1"]
    version = re.search(r"#define SDPA_ABI_VERSION (\d+)", _code())
    assert version
    assert int(version[1]) == abi.ABI_VERSION
    tiles = re.search(r"#define SDPA_MAX_SPLIT_TILES (\d+)", _code())
    assert tiles
    assert int(tiles[1]) == structs.MAX_TILES == splits.MAX_SPLIT_TILES
    listed = re.search(r"#define SDPA_MAX_LISTED_PARTS (\d+)", _code())
    assert listed
    assert int(listed[1]) == structs.MAX_LISTED_PARTS


def test_every_status_but_ok_has_an_error() -> None:
    statuses = {int(value) for value in re.findall(r"SDPA_(?!DTYPE|BUILT|MASK)\w+ = (\d)", _code())}
    assert set(abi._ERRORS) == statuses - {abi.OK}


@pytest.mark.parametrize("words", [registry.Takes, Takes], ids=["the package's", "the generator's"])
def test_what_kernels_take_is_numbered_alike(words: type[enum.Flag]) -> None:
    in_c = {name: 1 << int(bit) for name, bit in re.findall(r"SDPA_TAKES_(\w+) = 1 << (\d+)", _code())}
    assert {bit.name: bit.value for bit in words} == in_c


def test_accuracies_are_numbered_alike() -> None:
    in_c = {name: int(value) for name, value in re.findall(r"SDPA_ACCURACY_(\w+) = (\d+)", _code())}
    assert {accuracy.name: accuracy.value for accuracy in registry.Accuracy} == in_c
    assert [accuracy.name for accuracy in Accuracy] == list(in_c)


def test_ops_are_numbered_alike() -> None:
    in_c = {name: int(value) for name, value in re.findall(r"SDPA_OP_(\w+) = (\d+)", _code())}
    assert {op.name: op.value for op in registry.Op} == in_c
    assert [op.name for op in Op] == list(in_c)
