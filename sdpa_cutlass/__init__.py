"""Fused scaled-dot-product attention for NVIDIA GPUs, with the piped CUTLASS baseline next to it.

    scaled_dot_product_attention(query, key, value, ...)   torch's signature and meaning
    attention(query, key, value, *, causal=None, ...)      this library's own options
    attention_varlen(query, key, value, cu_seqlens_q, ...) the same for packed sequences
    dropout_mask(batch, num_heads_q, ...)                  what a seed and an offset drop, outside the kernels
    merge_states(outs, lses, *, sinks=None, ...)           partial results of the same queries, merged
    quantize_kv(key, value, *, precision="int8", ...)      keys and values of 8 bits, made once for many calls
    unfused_attention(query, key, value, *, ...)           plain attention through GEMM → softmax → GEMM
    plan(query, key, value, ...)                           checks once, for runs that check nothing
    kernels()                                              every kernel of the library
    explain(query, key, value, ...)                        which kernel would run, and why
    enable(), disable(), enabled()                         serve torch's own F.scaled_dot_product_attention

CUDA tensors run on their device and torch's current stream; CPU tensors run the same kernels in the host
library. Without torch, attention(..., out=array) takes the arrays of other libraries. Under torch.compile
the functions are operators, torch.ops.sdpa_cutlass. Importing this package loads neither torch nor a library,
registers nothing and replaces nothing.
"""

__version__ = "0.1.0"

from .call.operands import Layout
from .dropout import PhiloxState, dropout_mask
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    DriverError,
    HostCheckError,
    LaunchError,
    LibraryError,
    LibraryMismatchError,
    LibraryNotFoundError,
    NoKernelError,
    SdpaError,
    UnsupportedError,
    UntrustedLibraryError,
)
from .integrations.torch_sdpa import disable, enable, enabled
from .integrations.usage import Usage
from .library.registry import Family, KernelInfo, Precision
from .problem import Causal, DType, MaskType, Problem
from .public.api import attention, kernels, scaled_dot_product_attention, unfused_attention
from .public.attention_plan import AttentionPlan, plan
from .public.explain import Explanation, explain
from .public.merge import merge_states
from .public.quantized_kv import QuantizedKV, quantize_kv
from .public.varlen import attention_varlen

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionPlan",
    "Causal",
    "DType",
    "DriverError",
    "Explanation",
    "Family",
    "HostCheckError",
    "KernelInfo",
    "LaunchError",
    "Layout",
    "LibraryError",
    "LibraryMismatchError",
    "LibraryNotFoundError",
    "MaskType",
    "NoKernelError",
    "PhiloxState",
    "Precision",
    "Problem",
    "QuantizedKV",
    "SdpaError",
    "UnsupportedError",
    "UntrustedLibraryError",
    "Usage",
    "__version__",
    "attention",
    "attention_varlen",
    "disable",
    "dropout_mask",
    "enable",
    "enabled",
    "explain",
    "kernels",
    "merge_states",
    "plan",
    "quantize_kv",
    "scaled_dot_product_attention",
    "unfused_attention",
]
