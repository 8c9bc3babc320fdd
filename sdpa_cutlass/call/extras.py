"""What general kernels take besides q, k and v: a mask, dropout, lengths and sinks, as the C ABI has them.

A mask becomes a view [B, Hq, Sq, Sk] whose broadcast dimensions have stride 0; only batch dimensions that
cannot be merged into one are copied, never what they broadcast over. A large mask that kernels would have to
read element by element is copied too, by who runs it (`dense_copy`). Lengths are int32 tensors on the device,
and their values are never read here. Every error names argument, value and what is allowed.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.tensors import as_tensor, is_tensor
from ..choice.mask_reads import LONGEST_RUN, RUNS, copies_unaligned
from ..dropout import PhiloxState, as_float32, checked_p_dropout
from ..errors import ArgumentError, ArgumentTypeError
from ..library.registry import Family
from ..problem import MASK_ALIGNMENT, Causal, MaskReading, MaskType
from .operands import INT32_MAX, Operands, check_no_grad, dtype_name

if TYPE_CHECKING:
    import torch

DENSE_COPY_SCORES = 2**20
"""From so many scores on, a mask with a strided last dimension is copied. On an H200 (2026-11-23) the bias of
T5, bfloat16 [16, 12, 512, 512] with strides (3145728, 1, 6144, 12), took 511 µs as it lies and 67 µs when
contiguous and shared by the batch: 9 µs for a million scores, which is what a copy costs at least."""
MASK_TYPES = {
    "bool": MaskType.BOOL,
    "float16": MaskType.F16,
    "bfloat16": MaskType.BF16,
    "float32": MaskType.F32,
}


class Extras(NamedTuple):
    """The tensors must outlive the launch. `philox` is needed when `p_dropout`, less than 1, is not 0."""

    mask: torch.Tensor | None = None  # [B, Hq, Sq, Sk]
    p_dropout: float = 0.0
    philox: PhiloxState | torch.Tensor | None = None
    seqlens_q: torch.Tensor | None = None  # [B]
    seqlens_k: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # [B + 1]
    cu_seqlens_k: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [Hq]

    @property
    def mask_type(self) -> MaskType | None:
        return None if self.mask is None else MASK_TYPES[dtype_name(self.mask)]

    @property
    def has_lengths(self) -> bool:
        return not (self.seqlens_q is self.seqlens_k is self.cu_seqlens_q is self.cu_seqlens_k is None)


NO_EXTRAS: Extras = Extras()


def canonical_mask(attn_mask: object, operands: Operands) -> torch.Tensor:
    """`attn_mask`, of any shape that broadcasts to [..., Hq, Sq, Sk], as a view [B, Hq, Sq, Sk].

    Raises ArgumentTypeError or ArgumentError; UnsupportedError when it requires grad.
    """
    mask = as_tensor("attn_mask", attn_mask)
    refuse_causal_bias(mask)
    if str(mask.layout) != "torch.strided":
        raise ArgumentTypeError(f"attn_mask has layout {mask.layout}; allowed is torch.strided")
    if dtype_name(mask) not in MASK_TYPES:
        raise ArgumentTypeError(
            f"attn_mask has dtype {mask.dtype}; allowed are torch.bool (True = attend) and, added to the "
            "scaled scores, torch.float16, torch.bfloat16 and torch.float32"
        )
    if mask.device != operands.query.device:
        raise ArgumentTypeError(
            f"attn_mask is on {mask.device}; query is on {operands.query.device}: all must share one device"
        )
    check_no_grad({"attn_mask": mask})
    sizes = (operands.query.shape[1], operands.query.shape[2], operands.key.shape[2])
    shape = (*operands.batch_shape, *sizes)
    missing = len(shape) - mask.dim()
    if missing < 0 or not all(
        size in (1, wanted) for size, wanted in zip(mask.shape, shape[missing:], strict=True)
    ):
        wanted = shape[len(shape) - operands.rank :]
        raise ArgumentError(
            f"attn_mask has shape {tuple(mask.shape)}; allowed is any shape that broadcasts to {wanted}"
        )
    if missing:
        mask = mask[(None,) * missing]
    if len(shape) > 4:
        batch = operands.batch_shape if any(size != 1 for size in mask.shape[:-3]) else mask.shape[:-3]
        mask = mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
    return mask.expand(math.prod(operands.batch_shape), *sizes)


def needs_dense_copy(mask: torch.Tensor, family: Family | None = None) -> bool:
    """Whether reading `mask` [B, Hq, Sq, Sk] element by element costs more than a copy of which kernels read
    vectors: each element is a memory request of its own then. Without a `family`: whether it does for any.
    """
    stride, keys, scores = mask.stride(3), mask.shape[3], math.prod(mask.shape)
    if keys == 1 or stride == 0:
        return False
    if stride != 1:
        return scores >= DENSE_COPY_SCORES
    if not copies_unaligned(scores, keys):
        return False
    run = LONGEST_RUN if family is None else RUNS.get(family.value, LONGEST_RUN)
    vector = min(run * mask.element_size(), MASK_ALIGNMENT)
    return reading(mask).alignment < vector or mask.data_ptr() % vector != 0


def reading(mask: torch.Tensor) -> MaskReading:
    """How kernels read `mask` [B, Hq, Sq, Sk], or its copy if all of them need one."""
    shape, strides = mask.shape, mask.stride()
    starts, elements = 0, shape[3] if strides[3] else 1
    for size, stride in zip(shape[:3], strides, strict=False):
        if size > 1 and stride:
            starts |= stride
            elements *= size
    has_one_row = strides[2] == 0 and shape[2] > 1
    if strides[3] != 1:
        return MaskReading(MASK_ALIGNMENT if needs_dense_copy(mask) else 0, elements, has_one_row)
    alignment = math.gcd(MASK_ALIGNMENT, starts * MASK_TYPES[dtype_name(mask)].itemsize)
    return MaskReading(alignment, elements, has_one_row)


def dense_copy(mask: torch.Tensor) -> torch.Tensor:
    """`mask` [B, Hq, Sq, Sk] with neighbouring keys side by side, in rows that vectors can be loaded from.

    Dimensions that it broadcasts over are not written out.
    """
    own = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    vector = MASK_ALIGNMENT // mask.element_size()
    keys = mask.shape[3]
    copy = own.new_empty((*own.shape[:3], -(-keys // vector) * vector))[..., :keys]
    return copy.copy_(own).expand(mask.shape)


def autocast_mask(attn_mask: Any, query: torch.Tensor) -> Any:
    """A float mask in query's dtype where torch.autocast is on: torch casts it along with the inputs."""
    if not is_tensor(attn_mask) or _is_causal_bias(attn_mask):
        return attn_mask
    torch = sys.modules["torch"]
    if (
        attn_mask.dtype in (query.dtype, torch.bool, torch.float64)
        or not attn_mask.is_floating_point()
        or not torch.is_autocast_enabled(query.device.type)
    ):
        return attn_mask
    return attn_mask.to(query.dtype)


def causal_bias(attn_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Causal | None:
    """What a torch.nn.attention.bias.CausalBias stands for; None for any other mask.

    Raises ArgumentError when it was made for other lengths than those of query and key [..., S, D].
    """
    if not _is_causal_bias(attn_mask):
        return None
    made_for = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    lengths = (query.shape[-2], key.shape[-2])
    if made_for != lengths:
        raise ArgumentError(
            f"attn_mask is a CausalBias for seqlen_q {made_for[0]} and seqlen_k {made_for[1]}; the tensors "
            f"have {lengths[0]} and {lengths[1]}"
        )
    return Causal.TOP_LEFT if attn_mask.variant.name == "UPPER_LEFT" else Causal.BOTTOM_RIGHT


def refuse_causal_bias(attn_mask: object) -> None:
    """Raises ArgumentTypeError for torch's CausalBias. That of torch 2.4 answers no other question."""
    if _is_causal_bias(attn_mask):
        raise ArgumentTypeError(
            "attn_mask is a CausalBias, which has no elements; allowed is a tensor, or causal='top_left' or "
            "'bottom_right'"
        )


def _is_causal_bias(attn_mask: Any) -> bool:
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(attn_mask, bias.CausalBias)


def lengths(name: str, value: object, count: int, query: torch.Tensor) -> torch.Tensor:
    """`value`, if it is a contiguous int32 tensor [count] on query's device. Does not read it."""
    tensor = as_tensor(name, value)
    if dtype_name(tensor) != "int32":
        raise ArgumentTypeError(f"{name} has dtype {tensor.dtype}; allowed is torch.int32")
    if tensor.device != query.device:
        raise ArgumentTypeError(
            f"{name} is on {tensor.device}; query is on {query.device}: kernels read it there"
        )
    if tensor.dim() != 1 or tensor.shape[0] != count:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed is ({count},)")
    if count > 1 and tensor.stride(0) != 1:
        raise ArgumentError(f"{name} has stride {tensor.stride(0)}; it must be contiguous")
    return tensor


def head_sinks(value: object, query: torch.Tensor) -> torch.Tensor:
    """`value`, if it is a contiguous tensor [Hq] of floats on the device of query [B, Hq, Sq, D].

    Raises ArgumentTypeError or ArgumentError; UnsupportedError when it requires grad.
    """
    sinks = as_tensor("sinks", value)
    if dtype_name(sinks) not in ("float16", "bfloat16", "float32"):
        raise ArgumentTypeError(
            f"sinks has dtype {sinks.dtype}; allowed are torch.float16, torch.bfloat16 and torch.float32"
        )
    if sinks.device != query.device:
        raise ArgumentTypeError(
            f"sinks is on {sinks.device}; query is on {query.device}: kernels read it there"
        )
    check_no_grad({"sinks": sinks})
    if sinks.dim() != 1 or sinks.shape[0] != query.shape[1]:
        raise ArgumentError(
            f"sinks has shape {tuple(sinks.shape)}; allowed is ({query.shape[1]},): one logit a query head"
        )
    if sinks.shape[0] > 1 and sinks.stride(0) != 1:
        raise ArgumentError(f"sinks has stride {sinks.stride(0)}; it must be contiguous")
    return sinks


def checked_window(window: object, name: str = "window") -> tuple[int, int]:
    """`window` as two integers. Raises ArgumentTypeError or ArgumentError for anything but (left, right)."""
    allowed = "allowed is (left, right): how many keys a row sees before and after its own, -1 for no limit"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError(f"{name}={window!r}; {allowed}")
    for limit in window:
        if isinstance(limit, bool) or not hasattr(limit, "__index__"):
            raise ArgumentTypeError(f"{name}={window!r} has a {type(limit).__name__}; {allowed}")
    left, right = (operator.index(limit) for limit in window)
    if left < -1 or right < -1:
        raise ArgumentError(f"{name}={window!r}; {allowed}")
    return min(left, INT32_MAX), min(right, INT32_MAX)


def dropout_probability(p_dropout: object, name: str = "p_dropout") -> float:
    """`p_dropout` rounded to float32, as kernels see it: 1 - 1e-9 is 1, and 1e-50 is 0."""
    if type(p_dropout) is float and p_dropout == 0:
        return 0.0
    return as_float32(checked_p_dropout(p_dropout, name))
