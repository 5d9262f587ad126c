"""Operations on torch tensors through their CUDA kernels on a GPU, or on whatever stands in for its driver.

Kernels are launched as the runtime launches them: eight bytes per parameter, two null pointers after the last. Every
buffer of a call lies in one image, at an odd multiple of 64 bytes, which is the least that engines promise; around it
are red zones that read as NaN in f32 and bf16. Results are full of 0xFF before the call, the workspace of NaN, counters
of zeros. Afterwards the red zones, every operand that is no state, and the counters must be as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.harness import Array
from tests.codegen.sparse_harness import Operands, as_array, as_tensor, symbolic_types
from tools.gpu_launch import Code, Loader
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.errors import DeviceError
from v41c.runtime.cuda import Driver

#: bytes before and after every buffer: more than a block of any kernel writes at once of the narrowest examples
ZONE_BYTES = 4096
#: buffers begin at odd multiples of this
STEP_BYTES = 64
#: NaN as f32 and as bf16, and no bytes that a kernel would write
ZONE = (0xA5, 0xFF)


class Gpu:
    """Calls kernels on one driver. `code` gives what a kernel's launches need, by function."""

    def __init__(self, driver: Driver, code: Callable[[CudaKernel], Mapping[str, Code]]) -> None:
        self._driver = driver
        self._loader = Loader(driver, code)
        self._room = 0
        self._address = 0
        self._broken = ""

    def call(self, subject: Subject, operands: Operands) -> tuple[Tensor, ...]:
        """States, updated, then the other results. ValueError names what was written that must not be."""
        if self._broken:
            raise DeviceError(f"not run: {self._broken} left the GPU unusable for this process")
        op, kernel = subject.op, subject.kernel
        _, sizes = symbolic_types(op, operands)
        declared = zip(op.operands(), operands, strict=True)
        inputs = {name.name: as_array(operand) for name, operand in declared if operand is not None}
        kinds = [kind.bind(sizes) for kind in op.infer_results(subject.types)]
        image = Image(kernel.symbol)
        for name, array in inputs.items():
            image.add(name, array.reshape(-1).view(np.uint8), writable=name in op.states)
        for index, kind in enumerate(kinds[len(op.states) :]):
            image.add(f"result {index}", np.full(kind.size_bytes, 0xFF, np.uint8), writable=True)
        image.add("workspace", np.full(kernel.workspace_bytes, 0xFF, np.uint8), writable=True)
        image.add("counters", np.zeros(kernel.counter_bytes, np.uint8), writable=False)
        after = self._run(kernel, image, sizes)
        names = [*op.states, *(f"result {index}" for index in range(len(kinds) - len(op.states)))]
        return tuple(
            as_tensor(after[name].view(_numpy_type(kind.dtype)).reshape([int(dim) for dim in kind.shape]), kind)
            for name, kind in zip(names, kinds, strict=True)
        )

    def _run(self, kernel: CudaKernel, image: Image, dims: Mapping[str, int]) -> dict[str, Array]:
        before = image.bytes()
        if len(before) > self._room:
            self._room = 2 * len(before)
            self._address = self._driver.allocate(self._room, "buffers of a kernel")
        after = np.empty_like(before)
        try:
            self._driver.upload(self._address, before)
            places = {name: self._address + place for name, place in image.places.items()}
            self._loader.bind(kernel, places, dims)()
            self._driver.download(after, self._address)
        except DeviceError:
            self._broken = kernel.symbol
            raise
        return image.checked(after)


@dataclass
class _Part:
    content: Array
    writable: bool


class Image:
    """The memory of one call: buffers with red zones around them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._parts: dict[str, _Part] = {}
        self.places: dict[str, int] = {}
        self._end = ZONE_BYTES

    def add(self, name: str, content: Array, *, writable: bool) -> None:
        """Place a buffer after the others."""
        begin = -(-self._end // (2 * STEP_BYTES)) * 2 * STEP_BYTES + STEP_BYTES
        self._parts[name] = _Part(content, writable)
        self.places[name] = begin
        self._end = begin + len(content) + ZONE_BYTES

    def bytes(self) -> Array:
        """What the memory holds before the call."""
        image = np.resize(np.array(ZONE, np.uint8), -(-self._end // 2) * 2)
        for name, part in self._parts.items():
            begin = self.places[name]
            image[begin : begin + len(part.content)] = part.content
        return image

    def checked(self, after: Array) -> dict[str, Array]:
        """The buffers' contents after the call; ValueError where something was written that must not be."""
        changed = after != self.bytes()
        found: dict[str, Array] = {}
        for name, part in self._parts.items():
            begin = self.places[name]
            end = begin + len(part.content)
            found[name] = after[begin:end].copy()
            if part.writable:
                changed[begin:end] = False
        if changed.any():
            raise ValueError(f"{self._what}: {int(changed.sum())} bytes were written {self._where(changed)}")
        return found

    def _where(self, changed: Array) -> str:
        """The first byte that changed, by the buffer that it is nearest to."""
        at = int(np.flatnonzero(changed)[0])
        sizes = {name: len(part.content) for name, part in self._parts.items()}
        distance = {name: max(begin - at, at - begin - sizes[name], 0) for name, begin in self.places.items()}
        name = min(distance, key=lambda one: distance[one])
        place = at - self.places[name]
        if 0 <= place < sizes[name]:
            return f"in {name}, which must stay as it was, from byte {place} on"
        side = f"{-place} bytes before" if place < 0 else f"{place - sizes[name]} bytes after the end of"
        return f"outside of all buffers, the first {side} {name}"


def _numpy_type(dtype: str) -> str:
    return {"f32": "f4", "bf16": "u2", "i32": "i4", "i64": "i8"}.get(dtype, "u1")
