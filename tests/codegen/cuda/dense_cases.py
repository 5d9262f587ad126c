"""Dense operations at the shapes of a release, compiled for one architecture or all, and what their code must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from v41c.codegen.cuda import kernel_for
from v41c.codegen.cuda.build import Cubin, build_cubins
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.ir.op import Op
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import LinearGroup
from v41c.ir.ops.markov_chain import MarkovChain
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget

COPIES, WIDTH, OUTPUTS, VOCABULARY = 4, 5120, 24, 129_280
_STREAM = TensorType(DType.BF16, ("T", COPIES, WIDTH))
_X = TensorType(DType.BF16, ("T", WIDTH))
_PACKED = TensorType(DType.U8, ("T", WIDTH + WIDTH // 32))
_SHARES = TensorType(DType.F32, ("T", COPIES))
_MIXES = TensorType(DType.F32, ("T", COPIES, COPIES))
_WEIGHTS = (
    TensorType(DType.F32, (OUTPUTS, COPIES * WIDTH)),
    TensorType(DType.F32, (3,)),
    TensorType(DType.F32, (OUTPUTS,)),
)
_NORM = TensorType(DType.BF16, (WIDTH,))


@dataclass(frozen=True)
class Case:
    """An operation, its operands' types, and whether many tokens are for the tensor cores."""

    op: Op
    types: tuple[TensorType | None, ...]
    matrix: bool


def _fp8(rows: int, columns: int) -> tuple[TensorType, TensorType]:
    scales = TensorType(DType.E8M0, (-(-rows // 32), -(-columns // 32)))
    return TensorType(DType.F8E4M3, (rows, columns)), scales


def _group(*rows: int) -> tuple[TensorType | None, ...]:
    pairs = [_fp8(count, WIDTH) for count in rows]
    missing = (None,) * (4 - len(rows))
    return (_X, *(weight for weight, _ in pairs), *missing, *(scale for _, scale in pairs), *missing)


def _drafts() -> tuple[TensorType, ...]:
    table = TensorType(DType.BF16, (VOCABULARY, 256))
    tokens = TensorType(DType.I32, ("T",))
    return TensorType(DType.F32, ("T", VOCABULARY)), tokens, tokens, table, table


def _latents() -> tuple[TensorType, ...]:
    rows = [(TensorType(DType.BF16, ("T", size)), TensorType(DType.BF16, (size,))) for size in (1280, 512)]
    return (*rows[0], *rows[1], *(TensorType(DType.F32, ("T", 32)),) * 2)


CASES = {
    "boundary": Case(
        MhcBoundary(1e-20, 1e-6, 20, "fp8_e8m0_32"), (_STREAM, _X, _SHARES, _MIXES, _SHARES, *_WEIGHTS, _NORM), True
    ),
    "packed boundary": Case(
        MhcBoundary(1e-20, 1e-6, 20, "fp8_e8m0_32", packed=True),
        (_STREAM, _X, _SHARES, _MIXES, _SHARES, *_WEIGHTS, _NORM),
        True,
    ),
    "enter": Case(MhcEnter(1e-20, 1e-6, 20, "fp8_e8m0_32"), (_STREAM, _SHARES, *_WEIGHTS, _NORM), True),
    "coefficients": Case(HcCoefficients(1e-20, 1e-6, 20), (_STREAM, *_WEIGHTS), True),
    "fp8": Case(Linear("bf16"), (_X, *_fp8(1280, WIDTH)), True),
    "packed fp8": Case(Linear("bf16"), (_PACKED, *_fp8(1280, WIDTH)), True),
    "packed group": Case(LinearGroup("bf16"), (_PACKED, *_group(1280, 512)[1:]), True),
    "bf16": Case(Linear("f32"), (_X, TensorType(DType.BF16, (VOCABULARY, WIDTH)), None), True),
    "f32": Case(Linear("f32"), (_X, TensorType(DType.F32, (512, WIDTH)), None), False),
    "group": Case(LinearGroup("bf16"), _group(1280, 512), True),
    "groups of heads": Case(
        GroupedLinearQuantized("fp8_e8m0_32"), (TensorType(DType.BF16, ("T", 8, 4096)), *_fp8(8192, 4096)), True
    ),
    "packed groups of heads": Case(
        GroupedLinearQuantized("fp8_e8m0_32", packed=True),
        (TensorType(DType.BF16, ("T", 8, 4096)), *_fp8(8192, 4096)),
        True,
    ),
    "latents": Case(LatentNorms(1e-20, "fp8_e8m0_32", "fp8_e8m0_32"), _latents(), False),
    "packed latents": Case(LatentNorms(1e-20, "fp8_e8m0_32", "fp8_e8m0_32", packed=True), _latents(), False),
    "drafts": Case(MarkovChain(), _drafts(), False),
}


def kernel_of(name: str, tokens: int, target: CudaTarget) -> CudaKernel:
    """The kernel of a case at up to `tokens` tokens."""
    case = CASES[name]
    return kernel_for(case.op, case.types, case.op.infer_results(case.types), target, {"T": tokens})


def check_code(name: str, tokens: int, target: CudaTarget, folder: Path) -> dict[str, Cubin]:
    """Compile a case: nothing spilled, 16 bytes at a time, tensor cores for many tokens, sums of one order."""
    made = build_cubins([kernel_of(name, tokens, target)], target, folder, folder / "cache")
    for cubin in made.values():
        code = cubin.instructions
        assert cubin.spill_bytes == 0
        assert "atomic_float" not in code
        assert code.get("load_16_bytes", 0) + code.get("async_copy_16_bytes", 0) > 0
        if CASES[name].matrix and tokens > 16:
            assert {"wgmma", "tcgen05", "mma"} & code.keys()
        scaled = target.has_block_scaled_mma and tokens > 1 and name in ("packed fp8", "packed group")
        assert ("block_scaled" in code) == scaled
    return made


def tensor_cores(target: CudaTarget) -> str:
    """What products of 64 rows and more run on."""
    if target.has_wgmma:
        return "wgmma"
    return "tcgen05" if target.has_tcgen05 else "mma"
