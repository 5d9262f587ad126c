"""pack-activations: which boundaries pack, what that saves, and that no bit moves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.traced import context, traced
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.kernel import Kernel
from v41c.compile import CompileOptions, compile, pass_context
from v41c.errors import UsageError
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.interpreted import InterpretedSubject
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.op import Op
from v41c.ir.ops.add import Add
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.ops.pack_rows import PackRows
from v41c.ir.types import DType, TensorType, f32, i32
from v41c.passes import pack_activations, select_kernels
from v41c.passes.pipeline import choose_passes, pass_names, run_pipeline
from v41c.subject import Array
from v41c.targets import cuda, x86_64

WIDTH, COPIES, OUTPUTS = 64, 2, 8
FORMAT = "fp8_e8m0_32"
_BOUNDARY = (MhcBoundary, MhcEnter)


class Written:
    """A graph of one boundary, and readers of the round trip that it makes."""

    def __init__(self, dtype: DType = DType.BF16, format: str = FORMAT) -> None:
        self.builder = Builder("model")
        stream = self.builder.input("stream", TensorType(dtype, ("T", COPIES, WIDTH)))
        weights = [
            self.builder.weight(name, kind)
            for name, kind in (
                ("fn", f32(OUTPUTS, COPIES * WIDTH)),
                ("scale", f32(3)),
                ("base", f32(OUTPUTS)),
                ("norm", TensorType(dtype, (WIDTH,))),
            )
        ]
        pre = self.builder.input("pre", f32("T", COPIES))
        op = MhcEnter(1e-6, 1e-6, 2, format)
        self.u, *self.results = self.builder.apply(op, stream, pre, *weights)
        self.rounded = self.results[0]
        self.outputs: list[Value] = []

    def fp8(self, name: str, rows: int = 32, columns: int = WIDTH) -> tuple[Value, Value]:
        """A weight and its scales."""
        weight = self.builder.weight(name, TensorType(DType.F8E4M3, (rows, columns)))
        scale = self.builder.weight(f"{name}.scale", TensorType(DType.E8M0, (rows // 32, columns // 32)))
        return weight, scale

    def read(self, op: Op, *operands: Value | None) -> None:
        self.outputs += self.builder.apply(op, *operands)

    def product(self, x: Value, name: str = "w") -> None:
        self.read(Linear("bf16"), x, *self.fp8(name))

    def experts(self, x: Value, shared_x: Value) -> None:
        ids, weights = self.builder.input("ids", i32("T", 2)), self.builder.input("weights", f32("T", 2))
        stacks, scales = [], []
        for name, rows, columns in (("w1", 32, WIDTH), ("w3", 32, WIDTH), ("w2", WIDTH, 32)):
            stacks.append(self.builder.weight(name, TensorType(DType.F8E4M3, (4, rows, columns))))
            kind = TensorType(DType.E8M0, (4, rows // 32, columns // 32))
            scales.append(self.builder.weight(f"{name}.scale", kind))
        shared = [self.fp8(f"shared.{n}", *size) for n, size in zip("132", ((32, 64), (32, 64), (64, 32)), strict=True)]
        self.read(
            MoeLayer(2.0, FORMAT, FORMAT, "bf16"),
            *(x, ids, weights, *stacks, shared_x, *(weight for weight, _ in shared)),
            *(*scales, *(scale for _, scale in shared)),
        )

    def packs(self) -> bool:
        """Whether the boundary packs; a graph in which it does not is returned as it is."""
        module = Module((self.builder.finish(*self.outputs),))
        after = pack_activations.run(module, context("release"))
        after.verify()
        packed = bool(packing(after["model"]))
        assert packed or after is module
        return packed


def packing(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, PackRows) or node.op.attributes().get("packed")]


def test_products_alone_read_packed_rows() -> None:
    written = Written()
    written.product(written.rounded)
    written.product(written.rounded, "w.2")
    written.experts(written.rounded, written.rounded)
    written.read(Add("bf16"), written.u, written.u)
    assert written.packs()


def test_another_reader_keeps_the_floats() -> None:
    written = Written()
    written.product(written.rounded)
    written.read(Add("bf16"), written.rounded, written.u)
    assert not written.packs()


@pytest.mark.parametrize("first", [True, False])
def test_experts_that_share_no_input_keep_the_floats(first: bool) -> None:
    """Both inputs of a layer are packed, or none."""
    written = Written()
    written.experts(*((written.rounded, written.u) if first else (written.u, written.rounded)))
    assert not written.packs()


def test_an_output_and_what_nobody_reads_stay_floats() -> None:
    written = Written()
    written.product(written.rounded)
    written.outputs.append(written.rounded)
    assert not written.packs()
    unread = Written()
    unread.outputs.append(unread.u)
    assert not unread.packs()


def test_other_types_and_formats_stay_floats() -> None:
    """Packed rows stand for bf16, in the one format that products read; without a format there is nothing to pack."""
    for written in (Written(DType.F32), Written(format="fp4_e8m0_32")):
        written.product(written.rounded)
        assert not written.packs()
    plain = Written(format="none")
    plain.product(plain.u)
    assert not plain.packs()


def fused() -> Module:
    """The shipped model's graphs up to this pass, which is off unless asked for."""
    names = pass_names()
    assert pack_activations.NAME not in names
    chosen = names[: names.index(select_kernels.NAME)]
    *_, last = run_pipeline(traced("tiny-v41")[1], context("release"), chosen)
    return last.module


def test_all_fp8_inputs_of_the_shipped_model_are_packed_for_33_64_of_the_bytes() -> None:
    """What is written once, and read by every product; nothing else of the ledger's traffic moves."""
    before = fused()
    after = pack_activations.run(before, context("release"))
    after.verify()
    dims = {"S": 1, "T": 3, "R": 3, "C1": 64, "C2": 32, "C4": 16}
    kinds = set()
    for old, new in zip(before, after, strict=True):
        found = packing(new)
        kinds |= {node.op.name() for node in found}
        saved = 0
        for node in found:
            (rows,) = (value for value in node.results if value.type.dtype == DType.U8)
            assert rows.name.endswith(".packed")
            size = rows.type.bind(dims).size_bytes
            saved += (size * 64 // 33 - size) * (
                1 + sum(value is rows for reader in new.nodes for value in reader.operands)
            )
        ours, theirs = new.cost(dims), old.cost(dims)
        assert ours.activation_bytes == theirs.activation_bytes - saved
        for node in new.nodes:
            x = dict(zip((operand.name for operand in node.op.operands()), node.operands, strict=True)).get("x")
            if node.op.packable and any(v is not None and v.type.dtype == DType.F8E4M3 for v in node.operands):
                assert x is not None
                assert x.type.dtype == DType.U8, node.origin
        assert (ours.weight_bytes, ours.state_bytes) == (theirs.weight_bytes, theirs.state_bytes)
        assert ours.launches == theirs.launches


def test_no_bit_of_the_shipped_model_moves() -> None:
    """Every value but the packed ones, logits and states, over chunks and a single step."""
    source, _ = traced("tiny-v41")
    before = fused()
    tokens = np.random.default_rng(11).integers(5, 500, 31)
    seen: list[dict[str, list[Array]]] = []
    subjects = []
    for module in (before, pack_activations.run(before, context("release"))):
        subject = InterpretedSubject(source, module, "release")
        values: dict[str, list[Array]] = defaultdict(list)

        def look(name: str, first: int, array: Array, values: dict[str, list[Array]] = values) -> None:
            values[name].append(array)

        subject.start(len(tokens))
        for begin, end in ((0, 13), (13, 14), (14, 31)):
            values["fed"].append(subject.feed(tokens[begin:end], look))
        seen.append(values)
        subjects.append(subject)
    plain, packed = seen
    assert {name.removesuffix(".packed") for name in packed} == set(plain)
    assert sum(name.endswith(".packed") for name in packed) == 52
    for name in plain.keys() & packed.keys():
        assert all(a.tobytes() == b.tobytes() for a, b in zip(plain[name], packed[name], strict=True)), name
    for name, state in subjects[0].states.items():
        assert state.view(torch.uint8).equal(subjects[1].states[name].view(torch.uint8)), name


def test_a_cpu_refuses(tmp_path: Path) -> None:
    options = CompileOptions(target=x86_64.V3.name, passes="+pack-activations")
    message = (
        r"^--passes: pack-activations: expected a target whose products read packed activations, got cpu:x86-64-v3$"
    )
    with pytest.raises(UsageError, match=message):
        compile(TRAINED_CHECKPOINT, tmp_path / "engine", options)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("target", cuda.TARGETS, ids=lambda target: target.name)
def test_gpus_have_kernels_for_all_of_it(target: cuda.CudaTarget) -> None:
    """A boundary that packs is one launch, as one that does not."""
    source, module = traced("tiny-v41")
    kernels: dict[str, Kernel] = {}
    options = CompileOptions(passes="+pack-activations", max_context=512)
    chosen = choose_passes(options.passes)
    *_, last = run_pipeline(module, pass_context(source.config, options, target, kernels), chosen)
    packed = [node for graph in last.module for node in packing(graph)]
    assert len(packed) == 60 * len(target.variants)
    for node in packed:
        assert node.kernel is not None
        kernel = kernels[node.kernel.symbol]
        assert isinstance(kernel, CudaKernel)
        assert len(kernel.launches) == 1 or not isinstance(node.op, _BOUNDARY)
