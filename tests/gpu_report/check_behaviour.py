"""How calls get along: threads and streams, several devices, and memory that runs out."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import torch

from sdpa_cutlass import PhiloxState, attention, attention_varlen, quantize_kv, unfused_attention
from tests.gpu_report.context import Context, check

_THREADS = 8
_STREAMS = 8
_CALLS = 40  # of each stream
Call = Callable[[], list[torch.Tensor]]


def _random(device: str, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(device)


def calls(device: str, *, seqlen: int) -> list[Call]:
    """One call of every kind, each on tensors of its own; they return (out, softmax_lse)."""
    q, k, v = (_random(device, seed, 2, 4, seqlen, 64) for seed in range(3))
    grouped = _random(device, 4, 2, 2, seqlen + 3, 64)
    packed = _random(device, 5, 2 * seqlen, 4, 64)
    starts = torch.tensor([0, seqlen // 3, 2 * seqlen], dtype=torch.int32, device=device)
    lengths = torch.tensor([seqlen - 5, seqlen // 2], dtype=torch.int32, device=device)
    mask = _random(device, 6, seqlen, seqlen) > 0
    bias = _random(device, 7, 2, 1, seqlen, seqlen)
    philox = PhiloxState(3, 4)
    held = quantize_kv(k, v)
    return [
        lambda: list(attention(q, k, v, return_lse=True)),
        lambda: list(attention(q, k, v, causal="top_left", return_lse=True)),
        lambda: list(attention(q, grouped, grouped, causal="bottom_right", enable_gqa=True, return_lse=True)),
        lambda: list(attention(q, k, v, attn_mask=mask, return_lse=True)),
        lambda: list(attention(q, k, v, attn_mask=bias, p_dropout=0.3, philox=philox, return_lse=True)),
        lambda: list(attention(q, k, v, seqlens_q=lengths, seqlens_k=lengths, return_lse=True)),
        lambda: [attention_varlen(packed, packed, packed, starts, starts, 2 * seqlen, 2 * seqlen)],
        lambda: list(unfused_attention(q, k, v, return_lse=True)),
        lambda: list(attention(q, k, v, precision="int8", return_lse=True)),
        lambda: list(attention(q, k, v, attn_mask=mask, precision="int8_qk", return_lse=True)),
        lambda: list(attention(q, held, causal="bottom_right", return_lse=True)),
    ]


@check
def threads(context: Context) -> None:
    """8 threads with 8 streams each, every kind of call in turn: the bits of a call that ran alone.

    The first calls are made by all threads at once, so plans are made and kernels loaded in a race too.
    """
    if context.kernels != "*":
        context.skipped = "calls choose their kernels themselves: not with --kernels"
        return
    on_gpu = context.device == "cuda"
    all_calls = calls(context.device, seqlen=129 if on_gpu else 40)
    results: list[list[tuple[int, list[torch.Tensor]]]] = [[] for _ in range(_THREADS)]
    errors: list[str] = []
    if on_gpu:
        torch.cuda.synchronize()  # the inputs were written on another stream
    barrier = threading.Barrier(_THREADS)

    def work(number: int) -> None:
        try:
            barrier.wait()
            streams = [torch.cuda.Stream() for _ in range(_STREAMS)] if on_gpu else [None]
            for turn in range(_CALLS if on_gpu else 2):
                for at, stream in enumerate(streams):
                    which = (number + turn + 3 * at) % len(all_calls)
                    with torch.cuda.stream(stream):
                        results[number].append((which, all_calls[which]()))
            for stream in streams:
                if stream is not None:
                    stream.synchronize()
        except BaseException:
            errors.append(f"thread {number}: {traceback.format_exc()[-1500:]}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for error in errors:
        context.fail(error)
    alone = [call() for call in all_calls]
    for number, done in enumerate(results):
        for which, tensors in done:
            context.numbers["calls"] += 1
            if not all(map(torch.equal, tensors, alone[which])):
                context.fail(f"thread {number}, call {which}: not the bits of the same call alone")
    context.numbers["threads"] += _THREADS
    context.numbers["streams"] += _THREADS * _STREAMS if on_gpu else 0


@check
def devices(context: Context) -> None:
    """The current device stays the same, also when a call fails; all devices give the same bits."""
    count = torch.cuda.device_count()
    row = context.rows()[0]
    context.at("a launch on a device that is not there")
    try:
        context.library.prepare(row.index, count + 5)
    except Exception as error:
        if f"cudaSetDevice({count + 5})" not in str(error):
            context.fail(f"a device that is not there gave {error!r}, which does not name it")
    else:
        context.fail("a device that is not there was accepted")
    context.at("calls on every device, the current one being another")
    expected = [[t.cpu() for t in call()] for call in calls("cuda:0", seqlen=129)]
    for current in range(count):
        torch.cuda.set_device(current)
        for index in range(count):
            for which, call in enumerate(calls(f"cuda:{index}", seqlen=129)):
                found = [tensor.cpu() for tensor in call()]
                context.numbers["calls"] += 1
                if not all(map(torch.equal, found, expected[which])):
                    context.fail(f"call {which} on device {index}: other bits than on device 0")
                if _current_device() != current:
                    context.fail(f"call {which} on device {index} left device {_current_device()} current")
                    torch.cuda.set_device(current)
    context.numbers["devices"] += count
    if count == 1 and not context.numbers["failures"]:
        context.skipped = "one GPU only: several devices in one process were not tried"


def _current_device() -> int:
    """As the CUDA runtime and the driver know it, not as torch remembers it."""
    from cuda.bindings import driver

    from tests.gpu_report.memory import checked

    return int(checked(driver.cuCtxGetDevice()))


@check
def out_of_memory(context: Context) -> None:
    """An output, then a workspace, that does not fit: an error that says so, and the next call is right."""
    small = _random("cuda", 1, 1, 4, 129, 64)
    long = _random("cuda", 2, 1, 16, 16384, 64)
    room = torch.empty_like(long)
    good = [attention(small, small, small), unfused_attention(small, small, small)]
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 4 * 2**20) / total)
    requests: dict[str, Callable[[], torch.Tensor]] = {
        "an output": lambda: attention(long, long, long),
        "a workspace": lambda: unfused_attention(long, long, long, out=room),
    }
    for what, request in requests.items():
        context.at(f"{what} that does not fit")
        try:
            request()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            if "out of memory" not in str(error):
                context.fail(f"{context.progress}: the message is {error}")
        else:
            context.fail(f"{context.progress} was not refused")
        context.numbers["refused"] += 1
        again = [attention(small, small, small), unfused_attention(small, small, small)]
        if not all(map(torch.equal, again, good)):
            context.fail(f"after {context.progress}: the next call gives other bits")
