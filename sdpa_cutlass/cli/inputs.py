"""Inputs of a problem: seeded random tensors, or q, k, v read from a .safetensors file.

Random inputs are standard normal in float32, rounded to the wanted type. The seed, the problem's name and
the index of the input set fix them; GPU and CPU generators differ, so a result says where it was taken.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from sdpa_cutlass.cli.suites import Case

# Captured from a pretrained encoder; tests/data/README.md tells its story.
MINILM = Path(__file__).resolve().parents[1] / "data" / "minilm_qkv.safetensors"

DTYPES = {"f16": "float16", "bf16": "bfloat16"}


class InputError(ValueError):
    """A file that holds no usable q, k and v."""


class QKV(NamedTuple):
    """q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> QKV:
        """Contiguous copies on `device` in `dtype`."""
        return QKV(*(tensor.to(device=device, dtype=dtype).contiguous() for tensor in self))


def torch_dtype(name: str) -> torch.dtype:
    """The torch type that a command calls `f16` or `bf16`."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def random_qkv(case: Case, *, dtype: torch.dtype, device: torch.device, seed: int, index: int = 0) -> QKV:
    """Standard normal q, k, v of `case`'s shapes; `index` numbers the input sets of one problem."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed}/{index}/{case.name}".encode()))
    shape_q = (case.batch, case.num_heads_q, case.seqlen_q, case.head_dim)
    shape_k = (case.batch, case.num_heads_kv, case.seqlen_k, case.head_dim)
    tensors = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for shape in (shape_q, shape_k, shape_k)
    )
    return QKV(*tensors)


def load_qkv(path: Path) -> QKV:
    """q, k, v of a .safetensors file, on the CPU and in the file's own type.

    Raises InputError, naming file and tensor, when one is missing, is not 4-D or does not fit the others.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
    missing = [name for name in "qkv" if name not in tensors]
    if missing:
        held = ", ".join(sorted(tensors)) or "nothing"
        raise InputError(f"{path}: no tensor {', '.join(missing)}; it holds {held}")
    qkv = QKV(tensors["q"], tensors["k"], tensors["v"])
    _check_shapes(path, qkv)
    return qkv


def _check_shapes(path: Path, qkv: QKV) -> None:
    for name, tensor in zip("qkv", qkv, strict=True):
        if tensor.dim() != 4 or tensor.numel() == 0:
            raise InputError(
                f"{path}: {name} is {list(tensor.shape)}; wanted: non-empty [batch, heads, seqlen, head_dim]"
            )
        if not tensor.is_floating_point():
            raise InputError(f"{path}: {name} is {tensor.dtype}; a floating-point type is wanted")
    q, k, v = qkv
    if k.shape != v.shape:
        raise InputError(f"{path}: k is {list(k.shape)} but v is {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"{path}: q {list(q.shape)} and k {list(k.shape)} must agree in batch and head_dim, "
            "and k's heads must divide q's"
        )
