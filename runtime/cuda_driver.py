"""The CUDA driver as the device uses it: memory, kernels, two streams, and recordings of what was launched on them."""

from __future__ import annotations

from typing import Any

from v41c.errors import DeviceError
from v41c.runtime.states import Array

#: dynamic shared memory that a kernel may use without asking
_FREE_SHARED_BYTES = 48 << 10


class CudaDriver:
    """One GPU: the first that CUDA shows, with streams of its own. Sizes in bytes, addresses as integers.

    What is launched `aside` runs on the second stream, beside all else; events put it in order with that.
    """

    def __init__(self) -> None:
        """DeviceError, one line, where there is no package, driver or GPU."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError("CUDA: expected the package cuda-bindings: pip install 'v41c[cuda]'") from error
        self._driver: Any = driver
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # what the bindings raise where the driver's library cannot be opened
            raise DeviceError(f"CUDA: expected a GPU and its driver, found none: {error}") from error
        if not self._call("cuDeviceGetCount"):
            raise DeviceError("CUDA: expected a GPU, found none")
        self._device = self._call("cuDeviceGet", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))
        self._stream = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._side = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._keep: list[object] = []

    @property
    def capability(self) -> int:
        """Compute capability times ten: 90 for sm_90."""
        kind = self._driver.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self._call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return int(major) * 10 + int(minor)

    @property
    def hardware(self) -> str:
        """The GPU's name and the driver's version."""
        name = bytes(self._call("cuDeviceGetName", 256, self._device)).partition(b"\0")[0].decode(errors="replace")
        return f"{name}, driver {self._call('cuDriverGetVersion')}"

    @property
    def free_bytes(self) -> int:
        """Memory of the GPU that is not taken."""
        return int(self._call("cuMemGetInfo")[0])

    def allocate(self, size: int, what: str) -> int:
        """Address of new memory; DeviceError naming `what` when there is not enough."""
        try:
            return int(self._call("cuMemAlloc", max(size, 1)))
        except DeviceError as error:
            raise DeviceError(f"{what}: {size} bytes cannot be had on the GPU: {error}") from error

    def register(self, array: Array) -> int:
        """The GPU's address of host memory, which it reads over the bus from now on; the memory is pinned."""
        flags = self._driver.CU_MEMHOSTREGISTER_DEVICEMAP | self._driver.CU_MEMHOSTREGISTER_READ_ONLY
        self._call("cuMemHostRegister", array.ctypes.data, array.nbytes, flags)
        self._keep.append(array)
        return int(self._call("cuMemHostGetDevicePointer", array.ctypes.data, 0))

    def fill(self, address: int, value: int, size: int) -> None:
        """Set every byte."""
        if size:
            self._call("cuMemsetD8Async", address, value, size, self._stream)

    def upload(self, address: int, array: Array) -> None:
        """Copy a contiguous array to the GPU; done when this returns."""
        if array.nbytes:
            self._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)
            self.synchronize()

    def download(self, array: Array, address: int) -> None:
        """Copy from the GPU into a contiguous array, after everything launched before; done when this returns."""
        if array.nbytes:
            self._call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self._stream)
            self.synchronize()

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the GPU, in the order of launches."""
        if size:
            self._call("cuMemcpyDtoDAsync", target, source, size, self._stream)

    def kernel(self, cubin: bytes, function: str, shared_bytes: int) -> Any:
        """A kernel of a cubin, allowed to use so much dynamic shared memory."""
        library = self._call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        kernel = self._call("cuLibraryGetKernel", library, function.encode())
        if shared_bytes > _FREE_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuKernelSetAttribute", attribute, shared_bytes, kernel, self._device)
        return self._call("cuKernelGetFunction", kernel)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        parameters: int,
        *,
        aside: bool = False,
    ) -> None:
        """Launch on a stream; `parameters` is the address of an array of the parameters' addresses."""
        stream = self._side if aside else self._stream
        self._call("cuLaunchKernel", kernel, *grid, threads, 1, 1, shared_bytes, stream, parameters, 0)

    def event(self) -> Any:
        """Something to wait for, once it is marked."""
        return self._call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def mark(self, event: Any, *, aside: bool) -> None:
        """The event happens when everything launched so far, aside or not, is done."""
        self._call("cuEventRecord", event, self._side if aside else self._stream)

    def wait(self, event: Any, *, aside: bool) -> None:
        """What is launched from now on, aside or not, begins after the event that was marked last."""
        self._call("cuStreamWaitEvent", self._side if aside else self._stream, event, 0)

    def begin_recording(self) -> None:
        """From now on launches are recorded, not made; those aside, once they wait for a mark among the recorded."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)

    def end_recording(self) -> Any:
        """What was recorded, ready to be replayed with the same parameters."""
        graph = self._call("cuStreamEndCapture", self._stream)
        return self._call("cuGraphInstantiate", graph, 0)

    def replay(self, recording: Any) -> None:
        """Launch everything recorded, by one call."""
        self._call("cuGraphLaunch", recording, self._stream)

    def synchronize(self) -> None:
        """Wait for the stream; DeviceError when something on it failed."""
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: object) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"CUDA: {name}: {status.name}")
        return results[0] if len(results) == 1 else results
