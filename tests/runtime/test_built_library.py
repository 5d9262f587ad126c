"""The CPU device calls what code generation builds: a real kernel in both variants, through a program."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.runtime.fake_engine import entry
from v41c.codegen.cpu import kernel_for
from v41c.codegen.cpu.build import build_library
from v41c.codegen.cpu.layouts import pack
from v41c.ir.ops.linear import Linear
from v41c.ir.types import DType, TensorType
from v41c.manifest import FORMAT_VERSION, KERNELS_FILE, Argument, BufferEntry, Command, Manifest, Program, WeightEntry
from v41c.runtime.artifact import Engine
from v41c.runtime.cpu import CpuDevice, Library
from v41c.runtime.states import States
from v41c.targets import x86_64

K, M, MOST = 24, 21, 40
WEIGHT = np.random.default_rng(3).standard_normal((M, K)).astype(np.float32)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    """An engine whose only graph multiplies f32 [T, K] with a weight, for 1 and for 40 tokens."""
    folder = tmp_path_factory.mktemp("engine")
    x, y = TensorType(DType.F32, ("T", K)), TensorType(DType.F32, ("T", M))
    weight = TensorType(DType.F32, (M, K))
    target = x86_64.host()
    kernels = {
        tokens: kernel_for(Linear(out="f32"), (x, weight, None), (y,), target, {"T": tokens}) for tokens in (1, MOST)
    }
    (folder / KERNELS_FILE).parent.mkdir()
    build_library(list(kernels.values()), target, folder / KERNELS_FILE)
    layout = kernels[1].layouts[1]
    packed = pack(layout, WEIGHT, DType.F32)
    programs = []
    for tokens, kernel in kernels.items():
        places = [0, 64 * -(-tokens * K * 4 // 64)]
        workspace = places[1] + 64 * -(-tokens * M * 4 // 64)
        arguments = [Argument("arena", places[0]), Argument("weight", 0), Argument("arena", places[1])]
        arguments += [Argument("arena", workspace)] if kernel.workspace_bytes else []
        arguments += [Argument("dim", ["T", "R"].index(dim)) for dim in kernel.dims]
        programs.append(
            Program(
                graph="model",
                max_tokens=tokens,
                max_rows=tokens,
                arena_bytes=workspace + kernel.workspace_bytes,
                values=[BufferEntry("x", "f32", ["T", K], places[0]), BufferEntry("y", "f32", ["T", M], places[1])],
                inputs=[0],
                outputs=[1],
                commands=[Command(kernel.symbol, "linear", arguments, [1], "layers.0.attn.wq")],
            )
        )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        v41c_version="0",
        target=target.name,
        cpu_features=list(target.features),
        arithmetic="exact",
        config={},
        max_context=16,
        slots=1,
        dims=["T", "R"],
        files={KERNELS_FILE: entry(folder / KERNELS_FILE)},
        weights=[WeightEntry("layers.0.attn.wq.weight", layout, 0, packed.nbytes)],
        states=[],
        programs=programs,
        passes=[],
        has_weights=True,
        window=4,
        causal_encoder_decoder=False,
        why_not_ced="",
        vocabulary=M,
        eos_tokens=[],
        bos_token=None,
        draft_block=0,
    )
    weights = np.memmap(folder / "weights.bin", np.uint8, "w+", shape=(packed.nbytes,))
    weights[:] = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
    return CpuDevice(Engine(folder, manifest, weights), States.allocate(manifest, 1, 16))


def test_every_number_of_tokens_gives_the_same_rows(device: CpuDevice) -> None:
    x = np.random.default_rng(4).standard_normal((MOST, K)).astype(np.float32)

    def multiply(rows: np.ndarray) -> np.ndarray:
        return device.execute("model", {"x": rows, "positions": np.arange(len(rows), dtype=np.int32)})["y"].copy()

    whole = multiply(x)
    # 24 products and sums in f32, each off by at most half a unit in the last place of a sum below 64.
    np.testing.assert_allclose(whole, x.astype(np.float64) @ WEIGHT.T.astype(np.float64), atol=24 * 64 * 2**-24)
    for tokens in (0, 1, 2, 17, 39):
        np.testing.assert_array_equal(multiply(x[:tokens]), whole[:tokens])


def test_observing_a_built_kernel(device: CpuDevice) -> None:
    x = np.random.default_rng(5).standard_normal((3, K)).astype(np.float32)
    seen: list[np.ndarray] = []
    inputs = {"x": x, "positions": np.arange(3, dtype=np.int32)}
    y = device.execute("model", inputs, observe=lambda observation: seen.append(observation.array))["y"]
    np.testing.assert_array_equal(seen[0], y)


def test_a_library_built_anew_in_its_old_place_is_the_new_one(tmp_path: Path) -> None:
    """The process still holds the first library under that path when the second is opened."""
    opened = []
    for rows in (M, M + 1):
        types = (TensorType(DType.F32, ("T", K)), TensorType(DType.F32, (rows, K)), None)
        kernel = kernel_for(Linear(out="f32"), types, (TensorType(DType.F32, ("T", rows)),), x86_64.host(), {"T": 1})
        (tmp_path / KERNELS_FILE).parent.mkdir(exist_ok=True)
        (tmp_path / KERNELS_FILE).unlink(missing_ok=True)
        build_library([kernel], x86_64.host(), tmp_path / KERNELS_FILE)
        opened.append(Library(SimpleNamespace(kernels_path=tmp_path / KERNELS_FILE)))  # type: ignore[arg-type]
        assert opened[-1].address(kernel.symbol)
