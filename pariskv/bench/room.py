"""Whether a measurement fits into memory, and in a few words why it did not."""

from __future__ import annotations

import gc

import torch

from pariskv.binding import LayerPipeline
from pariskv.errors import CapacityError
from pariskv.memory import available_bytes, gigabytes
from pariskv.planner import estimate_layer
from pariskv.types import LayerInfo
from pariskv.window import Window

TOO_LARGE = (CapacityError, MemoryError, torch.OutOfMemoryError)
"""What is raised where there is no room: a row says so, and the next one is measured."""


def reason(error: BaseException) -> str:
    """An error of `TOO_LARGE` in a few words; torch's goes on about the allocator."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].partition(" GPU ")[0]


def refuse(need: int, device: torch.device, what: str) -> None:
    """Raise CapacityError where the device, or this machine, has less memory free."""
    from pariskv_kernels.memory import available_memory

    # The allocator's own answer for host memory: it knows of machines whose memory grows as it is used.
    free = available_memory() if device.type == "cpu" else available_bytes(device)
    if free is not None and need > free:
        raise CapacityError(f"{what} needs {gigabytes(need)} in {device.type} memory, {gigabytes(free)} are free")


def refuse_layers(
    info: LayerInfo,
    pipeline: LayerPipeline,
    window: Window,
    tokens: int,
    layers: int,
    in_host: bool,
    codes_in_host: bool = False,
) -> None:
    """Raise CapacityError where so many filled layers do not fit; one layer's prompt is on the device meanwhile.

    in_host, codes_in_host  the store, the codes are in host memory
    """
    one = estimate_layer(info, pipeline, window, tokens, window.update)
    host = layers * (one.store * in_host + one.codes * codes_in_host)
    device = one.prompt + layers * (one.rows + one.codes + one.store) - host
    what = f"{layers} layers of {info.batch} x {tokens} tokens"
    refuse(device, info.device, what)
    refuse(host, torch.device("cpu"), what)


def release(device: torch.device) -> None:
    """Give back what the last measurement held, so that the next one finds it free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
