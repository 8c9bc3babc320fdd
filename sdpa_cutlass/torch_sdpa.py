"""enable(), disable(), enabled(): F.scaled_dot_product_attention served by this library, and back.

The mechanism is a replacement of `torch.nn.functional.scaled_dot_product_attention`. It sees a call before
torch chooses a backend, so it serves every device this library has kernels for, under every torch from 2.4
on, and can hand over to torch, with a reason, what it cannot serve. torch's official swap point for flash
attention sees only what torch gives to its flash backend on CUDA, but also calls that never look up
`F.scaled_dot_product_attention`; flash_impl.py offers this library there, for the user to activate. What
neither reaches: the C++ fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from . import api, checks
from ._c_api import library
from ._locate import Target
from .device import cuda_device
from .errors import ArgumentError, DriverError, LaunchError, LibraryError, LibraryNotFoundError, SdpaError
from .launch import check_device
from .registry import Family, read_kernels

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("sdpa_cutlass")


@dataclass(slots=True)
class Usage:
    """What became of the calls since `enable`. Calls inside compiled code are not counted."""

    served: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that torch served, by reason."""
    log_fallbacks: bool = False
    """Whether the first call of each reason is logged as a warning."""


def enable(*, devices: Collection[str] | None = None, log_fallbacks: bool = False) -> Usage:
    """Serves F.scaled_dot_product_attention from this library, in the whole process, until `disable`.

    What the library cannot serve goes to torch as before: inputs that require grad; a head_dim above the
    largest kernel's; dtypes but float16 and bfloat16; other devices; tensor subclasses, vmap and tracing by
    torch.jit.trace or make_fx. So do calls that torch refuses, such as attn_mask together with is_causal:
    the error is torch's. Each such call is logged with its reason to the logger "sdpa_cutlass" at debug
    level; `log_fallbacks` logs each reason once more, as a warning. torch.compile traces the choice into its
    graph; torch.autocast means what it means for torch. Dropout is as likely as torch's and, under the same
    seed, another: its random numbers are this library's own (see dropout.py).

    devices: "cuda", "cpu" or both. By default CUDA, and CPU tensors only where there is no GPU that the
    library can use: the host library is for tests and is slow.

    Only calls that look the function up in torch.nn.functional at the time of the call are seen. Where torch
    has a swap point for flash attention, the name "sdpa_cutlass" is registered there as well, not activated:
    see flash_impl.py. Enabling twice is the same as once. Returns counts of the calls.

    Raises LibraryError or DriverError when the library cannot be used on these devices.
    """
    with _lock:
        served = _served_head_dims(devices)
        if _state.explicit is None:
            _state.explicit = Usage()
        _state.explicit.log_fallbacks = log_fallbacks
        _state.update(served)
        return _state.explicit


def disable() -> None:
    """Ends `enable`; without it, does nothing. Inside `with enabled()` the end of that block ends it."""
    with _lock:
        _state.explicit = None
        _state.update()


@contextlib.contextmanager
def enabled(*, devices: Collection[str] | None = None, log_fallbacks: bool = False) -> Iterator[Usage]:
    """`enable` for the length of a with block, also when it ends by an exception. Yields the block's counts.

    Blocks nest with each other and with `enable`, and their devices add up. The function is replaced in all
    threads, and put back when the last block of any thread has ended.
    """
    usage = Usage(log_fallbacks=log_fallbacks)
    with _lock:
        served = _served_head_dims(devices)
        _state.contexts.append(usage)
        _state.update(served)
    try:
        yield usage
    finally:
        with _lock:
            _state.contexts = [other for other in _state.contexts if other is not usage]
            _state.update()


class HeadDims(NamedTuple):
    """Which head dimensions a library has fused kernels for."""

    plain: frozenset[int]
    """Those of calls without mask and dropout."""
    general: int
    """The largest with a mask, or where a kernel of a larger head_dim steps in; 0 when there is none."""
    dropout: int
    """The largest with dropout; 0 when there is none."""


class _Patch:
    """One replacement of torch's function. `active` ends it where others keep a reference to it."""

    def __init__(self, original: Callable[..., torch.Tensor], served: dict[Any, HeadDims]) -> None:
        self.original = original
        self.served = served
        self.active = True
        self.function = _replacement(self)


class _State:
    """Who wants the replacement, and the replacement. Changed under `_lock` only."""

    def __init__(self) -> None:
        self.explicit: Usage | None = None
        self.contexts: list[Usage] = []
        self.watchers: tuple[Usage, ...] = ()
        self.patch: _Patch | None = None

    def update(self, served: dict[Any, HeadDims] | None = None) -> None:
        """Puts the replacement in place or takes it away, as `explicit` and `contexts` ask."""
        import torch.nn.functional as F

        self.watchers = tuple(self.contexts) if self.explicit is None else (self.explicit, *self.contexts)
        patch = self.patch
        buried = patch is not None and F.scaled_dot_product_attention is not patch.function
        if patch is not None and (not self.watchers or (buried and served is not None)):
            patch.active = False
            if not buried:
                F.scaled_dot_product_attention = patch.original
            self.patch = patch = None
        if self.watchers and served is not None:
            if patch is None:
                self.patch = _Patch(F.scaled_dot_product_attention, served)
                F.scaled_dot_product_attention = self.patch.function
            else:
                patch.served = {**patch.served, **served}
            from . import flash_impl  # noqa: F401  registers this library at torch's swap point


_lock = threading.RLock()
_state = _State()


def count_served() -> None:
    """Counts a call that this library served."""
    for usage in _state.watchers:
        usage.served += 1


def count_fallback(reason: str, detail: object = None) -> None:
    """Counts and logs a call that torch serves. `reason` is one of few; `detail` is for the log."""
    message = reason if detail is None else f"{reason}: {detail}"
    logger.debug("scaled_dot_product_attention left to torch: %s", message)
    for usage in _state.watchers:
        usage.fallbacks[reason] += 1
        if usage.log_fallbacks and usage.fallbacks[reason] == 1:
            logger.warning("scaled_dot_product_attention left to torch (told once): %s", message)


def _replacement(patch: _Patch) -> Callable[..., torch.Tensor]:
    import torch
    from torch.nn.attention.bias import CausalBias
    from torch.overrides import handle_torch_function

    functional = torch.nn.functional
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """torch.nn.functional.scaled_dot_product_attention, replaced by sdpa_cutlass.enable()."""
        is_bias = isinstance(attn_mask, CausalBias)
        mask = None if is_bias else attn_mask
        if patch.active:
            reason = refusal(patch.served, query, key, value, mask, dropout_p, is_causal)
            tracing = is_dynamo_compiling()
            detail: object = None
            if reason is None and tracing:
                return _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if reason is None:
                try:
                    out = _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
                except LaunchError:
                    raise  # a failure of a kernel, not a refusal
                except SdpaError as error:
                    reason, detail = type(error).__name__, error
                else:
                    count_served()
                    return out
            if not tracing and not is_bias:  # what torch makes of a bias comes here again
                count_fallback(reason, detail)
        options: dict[str, Any] = {"scale": scale}
        if enable_gqa:
            options["enable_gqa"] = True  # torch 2.4 does not know it
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        if is_bias:  # it looks for the function that stands in functional, which the original is not
            return handle_torch_function(
                functional.scaled_dot_product_attention, (attn_mask,), *arguments, **options
            )
        return patch.original(*arguments, **options)

    return scaled_dot_product_attention


def refusal(
    served: dict[Any, HeadDims],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str | None:
    """Why torch has to serve this call, or None. torch.compile traces it; it reads no data."""
    import torch

    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not torch.compiler.is_dynamo_compiling():
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or checks.is_virtual(tensor):
                return "tensor subclass or vmap"
        if torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():
            return "dispatch mode or tracing"
    device = query.device
    head_dims = served.get(device)
    if head_dims is None:
        return f"device {device}"
    if (
        query.dim() < 2
        or value.dim() < 2
        or not _has_kernel(
            head_dims, query.shape[-1], value.shape[-1], has_mask=attn_mask is not None, dropout_p=dropout_p
        )
    ):
        return "head_dim"
    dtype = query.dtype
    autocast = torch.is_autocast_enabled(device.type)
    if autocast:
        dtype = _autocast_dtype(device.type, dtype)
    if dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {dtype}"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask with is_causal"
        mask_dtype = _autocast_dtype(device.type, attn_mask.dtype) if autocast else attn_mask.dtype
        if mask_dtype not in (torch.bool, torch.float32, dtype):
            return f"attn_mask's dtype {mask_dtype}"
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return "requires grad"
    return None


def _has_kernel(
    head_dims: HeadDims, head_dim: int, head_dim_v: int, *, has_mask: bool, dropout_p: float
) -> bool:
    """Whether some fused kernel takes these head dimensions, padded where need be."""
    if not has_mask and dropout_p == 0 and head_dim == head_dim_v and head_dim in head_dims.plain:
        return True
    largest = head_dims.general if dropout_p == 0 else head_dims.dropout
    return 0 < head_dim <= largest and 0 < head_dim_v <= largest


def _serve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """This library's result, of inputs as torch.autocast hands them to F.scaled_dot_product_attention."""
    import torch

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        query, key, value = (
            tensor.to(_autocast_dtype(device_type, tensor.dtype)) for tensor in (query, key, value)
        )
    return api.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """What torch.autocast makes of a tensor of `dtype`."""
    import torch

    eligible = dtype.is_floating_point and dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if eligible else dtype


def _served_head_dims(devices: Collection[str] | None) -> dict[Any, HeadDims]:
    """torch.device → head dimensions with a kernel, for every usable device among `devices`."""
    import torch

    if isinstance(devices, str):
        devices = (devices,)
    unknown = set(devices or ()) - {"cuda", "cpu"}
    if unknown or (devices is not None and not devices):
        raise ArgumentError(f"devices={devices!r}; allowed are 'cuda' and 'cpu'")
    if devices is not None:
        served = cuda_head_dims() if "cuda" in devices else {}
        return {**served, torch.device("cpu"): _head_dims(Target.HOST)} if "cpu" in devices else served
    try:
        return cuda_head_dims()
    except (DriverError, LibraryError) as error:
        try:
            served = {torch.device("cpu"): _head_dims(Target.HOST)}
        except LibraryNotFoundError as missing:
            raise type(error)(f"{error}\nand no CPU tensors can be served: {missing}") from None
        logger.info("serving CPU tensors through the host library, which is slow: %s", error)
        return served


def cuda_head_dims() -> dict[Any, HeadDims]:
    """As `_served_head_dims`, of the GPUs that the library can use. Raises when there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DriverError("torch sees no CUDA device")
    native, head_dims = library(Target.CUDA), _head_dims(Target.CUDA)
    served = {}
    refused: DriverError | None = None
    for index in range(torch.cuda.device_count()):
        try:
            check_device(native, cuda_device(index))
        except DriverError as error:
            logger.info("cuda:%d is left to torch: %s", index, error)
            refused = error
        else:
            served[torch.device("cuda", index)] = head_dims
    if not served and refused is not None:
        raise refused
    return served


def _head_dims(target: Target) -> HeadDims:
    rows = [row for row in read_kernels(library(target)) if row.family is Family.FMHA_FWD]
    general = [row for row in rows if row.is_general]
    return HeadDims(
        plain=frozenset(row.head_dim for row in rows if not row.is_general),
        general=max((row.head_dim for row in general if not row.has_dropout), default=0),
        dropout=max((row.head_dim for row in general if row.has_dropout), default=0),
    )
