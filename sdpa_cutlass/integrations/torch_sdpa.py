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
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..call.extras import causal_bias
from ..errors import LaunchError, SdpaError
from ..library.registry import Precision
from ..problem import Causal
from ..public import api
from . import usage
from .head_dims import HeadDims, served_head_dims
from .quantising import MIN_SEQLEN, Quantising, as_autocast, checked_quantising, is_to_be_quantised
from .usage import Usage, count_fallback, count_served

if TYPE_CHECKING:
    import torch


def enable(
    *,
    devices: Collection[str] | None = None,
    log_fallbacks: bool = False,
    precision: Precision | str | None = None,
    min_seqlen: int = MIN_SEQLEN,
) -> Usage:
    """Serves F.scaled_dot_product_attention from this library, in the whole process, until `disable`.

    What the library cannot serve goes to torch as before: inputs that require grad with a head_dim above the
    largest backward kernel's, a mask among them, and what carries a forward-mode gradient; a head_dim above
    the largest kernel's; dtypes but float16 and bfloat16; other devices; nested
    tensors, tensor subclasses, vmap and tracing by torch.jit.trace or make_fx. So do calls inside a
    torch.nn.attention.sdpa_kernel that leaves out one of flash, mem-efficient, cuDNN and math, and calls that
    torch refuses, such as attn_mask together with is_causal: the error is torch's. Each such call is logged
    with its reason to the logger "sdpa_cutlass" at debug level; `log_fallbacks` logs each reason once more,
    as a warning. torch.compile traces the choice into its graph, torch.jit.script compiles torch's own
    function, a TorchFunctionMode sees the call as one of F.scaled_dot_product_attention; torch.autocast means
    what it means for torch. Dropout is as likely as torch's and, under the same seed, another: its random
    numbers are this library's own (see dropout.py).

    precision: None or "exact"; or "int8_qk" or "int8", as `attention` takes it: calls of `min_seqlen` or more
    keys whose problem has a quantised kernel then run through it, whether they have a mask or not, and
    `Usage.quantised` counts them. Others are exact, as ever.

    devices: "cuda", "cpu" or both. By default CUDA, and CPU tensors only where there is no GPU that the
    library can use: the host library is for tests and is slow.

    Only calls that look the function up in torch.nn.functional at the time of the call are seen. Where torch
    has a swap point for flash attention, the name "sdpa_cutlass" is registered there as well, not activated:
    see flash_impl.py. Enabling twice is the same as once. Returns counts of the calls.

    Raises LibraryError or DriverError when the library cannot be used on these devices.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    usage = sdpa_cutlass.enable()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    sdpa_cutlass.disable()
    print(usage.served, usage.fallbacks)
    ```
    """
    quantising = checked_quantising(precision, min_seqlen)
    with _lock:
        served = served_head_dims(devices)
        if _state.explicit is None:
            _state.explicit = _Watch(Usage(), {})
        _state.explicit.quantising = quantising
        _state.explicit.usage.log_fallbacks = log_fallbacks
        _state.explicit.served |= served
        _state.update(replaces=True)
        return _state.explicit.usage


def disable() -> None:
    """Ends `enable`; without it, does nothing. Inside `with enabled()` the end of that block ends it."""
    with _lock:
        _state.explicit = None
        _state.update()


@contextlib.contextmanager
def enabled(
    *,
    devices: Collection[str] | None = None,
    log_fallbacks: bool = False,
    precision: Precision | str | None = None,
    min_seqlen: int = MIN_SEQLEN,
) -> Iterator[Usage]:
    """`enable` for the length of a with block, also when it ends by an exception. Yields the block's counts.

    Blocks nest with each other and with `enable`; their devices add up, and end with the block. The
    `precision` of the innermost block counts, also where it is None. The function
    is replaced in all threads, and put back when the last block of any thread has ended.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    with sdpa_cutlass.enabled() as usage:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ```
    """
    usage = Usage(log_fallbacks=log_fallbacks)
    quantising = checked_quantising(precision, min_seqlen)
    with _lock:
        watch = _Watch(usage, served_head_dims(devices), quantising)
        _state.contexts.append(watch)
        _state.update(replaces=True)
    try:
        yield usage
    finally:
        with _lock:
            _state.contexts.remove(watch)
            _state.update()


@dataclass(slots=True, eq=False)
class _Watch:
    """One `enable` or one `with enabled()` block: its counts, and what it wants served."""

    usage: Usage
    served: dict[Any, HeadDims]
    quantising: Quantising | None = None


class _Patch:
    """One replacement of torch's function. `active` ends it where others keep a reference to it."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self.original = original
        self.served: dict[Any, HeadDims] = {}
        self.quantising: Quantising | None = None
        self.active = True
        self.function = _replacement(self)
        _resolve_in_scripts(self.function, original)


class _State:
    """Who wants the replacement, and the replacement. Changed under `_lock` only."""

    def __init__(self) -> None:
        self.explicit: _Watch | None = None
        self.contexts: list[_Watch] = []
        self.patch: _Patch | None = None

    def update(self, *, replaces: bool = False) -> None:
        """Serves what `explicit` and `contexts` ask for, or puts torch's function back.

        `replaces` also replaces a function that somebody else has put into the place of ours meanwhile.
        """
        import torch.nn.functional as F

        watches = self.contexts if self.explicit is None else [self.explicit, *self.contexts]
        usage.watchers = tuple(watch.usage for watch in watches)
        patch = self.patch
        buried = patch is not None and F.scaled_dot_product_attention is not patch.function
        if patch is not None and (not watches or (buried and replaces)):
            patch.active = False
            if not buried:
                F.scaled_dot_product_attention = patch.original
            self.patch = patch = None
        if not watches:
            return
        if patch is None:
            self.patch = patch = _Patch(F.scaled_dot_product_attention)
            F.scaled_dot_product_attention = patch.function
        patch.quantising = watches[-1].quantising
        patch.served = {device: dims for watch in watches for device, dims in watch.served.items()}
        from . import flash_impl  # noqa: F401  registers this library at torch's swap point


_lock = threading.RLock()
_state = _State()


def _replacement(patch: _Patch) -> Callable[..., torch.Tensor]:
    import torch
    from torch._C import _is_torch_function_mode_enabled
    from torch.nn.attention.bias import CausalBias
    from torch.overrides import handle_torch_function

    from ..library.torch_state import is_recording
    from .torch_refusals import names_backends, refusal

    functional = torch.nn.functional
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    torch_takes = _TorchTakes()

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
        tracing = is_dynamo_compiling()
        is_bias = attn_mask is not None and isinstance(attn_mask, CausalBias)
        active = patch.active
        if active and (is_causal or attn_mask is not None) and not tracing:
            active = not torch_takes.bias  # what torch makes of a bias is causal or has a mask
        if active:
            if not tracing and _is_torch_function_mode_enabled() and not is_recording():
                # The mode sees the call, which then comes again.
                return handle_torch_function(
                    patch.function, (query, key, value, attn_mask), query, key, value, attn_mask,
                    dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
                )  # fmt: skip
            if names_backends():
                reason: str | None = "backends named by sdpa_kernel"
            else:
                mask = None if is_bias else attn_mask
                reason = refusal(patch.served, query, key, value, mask, dropout_p, is_causal)
            detail: object = None
            quantising = patch.quantising
            if (
                reason is None
                and quantising is not None
                and is_to_be_quantised(quantising, query, key, value, dropout_p)
            ):
                out = _serve_quantised(
                    quantising.precision, query, key, value, attn_mask, is_causal, scale, enable_gqa
                )
                if out is not None:
                    if not tracing:
                        count_served(is_quantised=True)
                    return out
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
            if not tracing:
                count_fallback(reason, detail)
        if not is_bias:
            if scale is None and not enable_gqa:  # keywords cost time
                return patch.original(query, key, value, attn_mask, dropout_p, is_causal)
            if enable_gqa:  # torch 2.4 does not know it
                return patch.original(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
                )
            return patch.original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        options: dict[str, Any] = {"scale": scale}
        if enable_gqa:
            options["enable_gqa"] = True
        with contextlib.nullcontext() if tracing else torch_takes:
            return handle_torch_function(  # a bias knows the function that stands in functional
                functional.scaled_dot_product_attention, (attn_mask,),
                query, key, value, attn_mask, dropout_p, is_causal, **options,
            )  # fmt: skip

    return scaled_dot_product_attention


class _TorchTakes(threading.local):
    """Whether this thread is inside a call that was left to torch, and that torch makes another call of."""

    bias = False

    def __enter__(self) -> None:
        self.bias = True

    def __exit__(self, *_: object) -> None:
        self.bias = False


def _resolve_in_scripts(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Makes torch.jit.script compile `original` where it meets `function`, which it could not compile."""
    from torch.jit import _builtins

    builtin = _builtins._find_builtin(original)
    if builtin is None:  # somebody's function in Python: TorchScript follows these attributes to it
        function.__name__ = original.__name__
        function.__original_fn = original  # type: ignore[attr-defined]
        function.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
        return
    _builtins._register_builtin(function, builtin)  # by its id
    weakref.finalize(function, _builtins._get_builtin_table().pop, id(function), None)


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
    query, key, value = as_autocast(query, key, value)
    return api.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _serve_quantised(
    precision: Precision,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """The quantised result as `_serve` has the exact one, or None where the library refuses the call. What is
    wrong with it, if anything, shows when it is computed exactly.
    """
    query, key, value = as_autocast(query, key, value)
    try:
        bias = None if attn_mask is None else causal_bias(attn_mask, query, key)
        causal = Causal.TOP_LEFT if is_causal else bias
        out: torch.Tensor = api.attention(
            query, key, value, attn_mask=attn_mask if bias is None else None, causal=causal, scale=scale,
            enable_gqa=enable_gqa, precision=precision,
        )  # fmt: skip
    except LaunchError:
        raise  # a failure of a kernel, not a refusal
    except SdpaError:
        return None
    return out
