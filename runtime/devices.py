"""The device that an engine was compiled for."""

from __future__ import annotations

from v41c.runtime.artifact import Engine, kind_of
from v41c.runtime.cpu import CpuDevice
from v41c.runtime.cuda import CudaDevice
from v41c.runtime.cuda_driver import CudaDriver
from v41c.runtime.device import Device
from v41c.runtime.states import States


def open_device(
    engine: Engine, slots: int, max_context: int, *, threads: int | None, poison: bool, saved_tokens: int
) -> Device:
    """The device with memory for `slots` sequences of up to `max_context` tokens, to `save` up to `saved_tokens`.

    `threads` as `CpuDevice` takes them. With `poison`, memory that no token has written is full of NaN. DeviceError
    where the hardware is missing or another one, ContextError where its memory does not suffice.
    """
    if kind_of(engine.manifest.target) == "cuda":
        return CudaDevice(engine, CudaDriver(), slots, max_context, poison=poison, saved_tokens=saved_tokens)
    states = States.allocate(engine.manifest, slots, max_context, poison=poison)
    return CpuDevice(engine, states, threads=threads, saved_tokens=saved_tokens)
