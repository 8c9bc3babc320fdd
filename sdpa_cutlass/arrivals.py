"""Where the CTAs of split kernels meet: counters in device memory that are zero between launches.

Launches that may run at the same time must not share counters. So every stream has its own, on a CPU every
thread; and a launch that is captured into a CUDA graph has those of its graph and stream, for good, because
the graph may run beside anything. Graphs take theirs from a stock that was zeroed beforehand; when it is used
up, the graph zeroes new ones itself at every replay.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from .device import capture_id

if TYPE_CHECKING:
    import torch

MAX_TILES = 1024  # SDPA_MAX_SPLIT_TILES
_STOCK = 256  # blocks of counters for graphs: 1 MiB
_MAX_STREAMS = 1024

_lock = threading.Lock()
_of_thread = threading.local()
_of_stream: dict[tuple[int, int], torch.Tensor] = {}
_of_capture: dict[tuple[int, int, int], torch.Tensor] = {}
_stocks: dict[int, list[torch.Tensor]] = {}


def arrival_counters(device: torch.device, stream: int) -> int:
    """The address of MAX_TILES counters, uint32, for a launch on `stream` of `device`."""
    if device.type == "cpu":
        counters: torch.Tensor | None = getattr(_of_thread, "counters", None)
        if counters is None:
            counters = _of_thread.counters = _zeros(device)
        return counters.data_ptr()
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, stream).data_ptr()
    key = device.index, stream
    counters = _of_stream.get(key)
    if counters is None:
        with _lock:
            if len(_of_stream) >= _MAX_STREAMS:
                _of_stream.clear()  # torch reuses the memory in the order of its stream
            counters = _of_stream.setdefault(key, _zeros(device))
    return counters.data_ptr()


def prepare_counters(device: int) -> None:
    """Makes the stock of `device`, unless there is one or a graph is being captured."""
    torch = sys.modules["torch"]
    if device in _stocks or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if device not in _stocks:
            blocks = torch.zeros(_STOCK, MAX_TILES, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)  # a replay may run on any stream
            _stocks[device] = list(blocks)


def _captured(device: torch.device, stream: int) -> torch.Tensor:
    key = device.index, stream, capture_id(stream)
    with _lock:
        counters = _of_capture.get(key)
        if counters is None:
            stock = _stocks.get(device.index)
            if not stock:
                return _zeros(device)  # part of the graph
            counters = _of_capture[key] = stock.pop()
    return counters


def _zeros(device: torch.device) -> torch.Tensor:
    torch = sys.modules["torch"]
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
