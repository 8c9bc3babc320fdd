"""Which keyword arguments of `attention` this version has, for code that offers what may be missing."""

from __future__ import annotations

import functools
import inspect

from . import api


@functools.cache
def takes(argument: str) -> bool:
    """Whether `attention` and `attention_varlen` have the keyword `argument`, such as "window"."""
    return argument in inspect.signature(api.attention).parameters
