"""ONNX models under ONNX Runtime, with torch tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from tests.played import Run
from v41c.codegen.onnx.body import ELEMENT
from v41c.ir.graph import Graph
from v41c.ir.torch_types import type_of

_TORCH = {
    "tensor(float)": torch.float32,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
    "tensor(uint8)": torch.uint8,
}
_ERRORS = 3


class Session:
    """A model, from its bytes or from a file with its weights perhaps beside it, as ONNX Runtime runs it by default."""

    def __init__(self, model: bytes | Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = _ERRORS
        source = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every output by name. Inputs that the model does not have are left aside."""
        wanted = {declared.name for declared in self._session.get_inputs()}
        given = {name: _given(tensor) for name, tensor in inputs.items() if name in wanted}
        values = self._session.run_with_ort_values(None, given)
        names = (declared.name for declared in self._session.get_outputs())
        return {name: _taken(value) for name, value in zip(names, values, strict=True)}


def by_session(sessions: Mapping[str, Session]) -> Run:
    """Graphs run by their sessions, by name."""

    def run(
        graph: Graph, values: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given = {f"state.{name}": state for name, state in states.items()}
        outputs = sessions[graph.name].run(given | dict(values))
        written = {name: outputs.pop(f"state.{name}:out") for name in graph.finals if f"state.{name}:out" in outputs}
        return outputs, written

    return run


def _given(tensor: Tensor) -> onnxruntime.OrtValue:
    element = ELEMENT[type_of(tensor).dtype]
    bits = {2: torch.int16, 1: torch.uint8}.get(tensor.element_size(), tensor.dtype)
    array = tensor.contiguous().view(bits).numpy()
    array = array.view(np.bool_) if tensor.dtype == torch.bool else array
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)


def _taken(value: onnxruntime.OrtValue) -> Tensor:
    """A copy; numpy has no bf16, so the bytes are read where they lie."""
    size = value.tensor_size_in_bytes()
    tensor = torch.empty(value.shape(), dtype=_TORCH[value.data_type()])
    if size:
        ctypes.memmove(tensor.data_ptr(), value.data_ptr(), size)
    return tensor
