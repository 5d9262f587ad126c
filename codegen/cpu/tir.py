"""The vocabulary that CPU kernels are written in: TIR functions over raw pointers, 16-lane vectors, memory.

Three rules of TVM 0.27 shape it. A value that is used more than once must go through `let`: an expression tree, or
TVM's own binding, is analysed once per use and grows exponentially. A multiplication that feeds an addition is fused
by the code generator: `fma` where that is wanted, `product` where the rounding of the multiplication counts. Float8
casts of TVM are wrong (0 decodes to 2^-7): `numeric` has integer code for the formats.

Vectors are 16 lanes wide on every processor; LLVM splits them where registers are narrower. bf16 is `uint16` in
memory and f32 in registers. Every helper takes scalars and vectors alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

Expr = Any
Buffer = Any

LANES = 16
#: element type in memory by IR dtype
STORAGE = {
    "f32": "float32",
    "bf16": "uint16",
    "f8e4m3": "uint8",
    "f4e2m1": "uint8",
    "e8m0": "uint8",
    "i32": "int32",
    "i64": "int64",
    "bool": "uint8",
    "u8": "uint8",
}
#: multiply-adds below which a parallel loop is not worth its fork and join, about 1.3 us
PARALLEL_WORK = 1 << 15


# ---- functions and control flow --------------------------------------------------------------------------------------


class Function:
    """A TIR function under construction: pointer arguments as flat buffers and integer arguments, by name."""

    def __init__(self, symbol: str, pointers: Mapping[str, str], scalars: Sequence[str]) -> None:
        # every argument comes first: a buffer declaration opens a scope in which no argument may follow
        handles = {name: T.arg(name, T.handle(dtype)) for name, dtype in pointers.items()}
        self.symbol = symbol
        self.scalars = {name: T.arg(name, T.int64()) for name in scalars}
        self.buffers = {name: flat(handles[name], dtype) for name, dtype in pointers.items()}
        self.primfunc: Any = None


@contextlib.contextmanager
def function(symbol: str, pointers: Mapping[str, str], scalars: Sequence[str] = ()) -> Iterator[Function]:
    """Open a function: TIR dtypes of its pointers by name, names of its 64-bit integers; in call order.

    Its `primfunc` is there after the block.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name(symbol)
        result = Function(symbol, pointers, scalars)
        # names the device whose workspace `scratch` is taken from; tensors would carry it, pointers do not
        zero = tirx.IntImm("int32", 0)
        with T.attr(zero, "device_type", T.int32(1)), T.attr(zero, "device_id", zero):
            yield result
    result.primfunc = builder.get().with_attr("global_symbol", symbol)


def flat(data: Expr, dtype: str) -> Buffer:
    """A one-dimensional buffer at a pointer, aligned to one element.

    The extent is never checked; indices are 64 bit because stacks of experts pass 2^31 elements.
    """
    return T.decl_buffer((1 << 62,), dtype, data=data, align=itemsize(dtype))


def loop(extent: Expr) -> Any:
    """`with loop(n) as i`: a serial loop with a 64-bit index."""
    return T.serial(T.int64(0), i64(extent))


def parallel(extent: Expr, work: int = PARALLEL_WORK) -> Any:
    """`with parallel(n, work) as i`: a loop over threads if the total `work`, in multiply-adds, is worth a fork."""
    return T.parallel(T.int64(0), i64(extent)) if work >= PARALLEL_WORK else loop(extent)


def when(condition: Expr) -> Any:
    """`with when(c):` runs the block if the condition holds."""
    return _then(condition)


@contextlib.contextmanager
def _then(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def i64(value: Expr) -> Expr:
    """A 64-bit integer expression."""
    if isinstance(value, int):
        return T.int64(value)
    return value if dtype_of(value) == "int64" else T.cast(value, "int64")


def itemsize(dtype: str) -> int:
    """Bytes of one element of a scalar TIR dtype."""
    return int("".join(c for c in dtype if c.isdigit())) // 8


def dtype_of(value: Expr) -> str:
    """TIR dtype of an expression: `float32`, `int32x16`, …"""
    return str(value.ty.dtype)


def lanes_of(value: Expr) -> int:
    """Lanes of an expression."""
    dtype = dtype_of(value)
    return int(dtype.split("x")[1]) if "x" in dtype else 1


def vec(dtype: str, lanes: int) -> str:
    """TIR dtype of a vector of scalars."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def at(index: Expr, lanes: int) -> Expr:
    """Buffer index of `lanes` consecutive elements."""
    return index if lanes == 1 else T.ramp(i64(index), T.int64(1), lanes)


# ---- values ----------------------------------------------------------------------------------------------------------


def splat(value: Expr, lanes: int) -> Expr:
    """A scalar in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def const(value: float, lanes: int = 1) -> Expr:
    """An f32 constant in every lane."""
    return splat(T.float32(value), lanes)


def iconst(value: int, lanes: int = 1, dtype: str = "int32") -> Expr:
    """An integer constant in every lane, given as the unsigned or signed value of its bits."""
    bits = itemsize(dtype) * 8
    signed = (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    return splat(tirx.IntImm(dtype, value % (1 << bits) if dtype.startswith("u") else signed), lanes)


class Local:
    """A register: a scalar or vector variable."""

    def __init__(self, dtype: str, lanes: int) -> None:
        # below 1 KiB in the default scope this is a stack slot, which LLVM turns into a register
        self._buffer = T.alloc_buffer((lanes,), dtype)
        self._index = at(0, lanes) if lanes > 1 else 0

    @property
    def value(self) -> Expr:
        """The current value."""
        return self._buffer[self._index]

    def set(self, value: Expr) -> None:
        """Assign."""
        T.buffer_store(self._buffer, value, [self._index])


def local(value: Expr) -> Local:
    """A register with an initial value."""
    dtype = dtype_of(value)
    register = Local(dtype.split("x")[0], lanes_of(value))
    register.set(value)
    return register


def let(value: Expr) -> Expr:
    """A value computed once, here, however often it is used."""
    return local(value).value


def cast(value: Expr, dtype: str) -> Expr:
    """Conversion to another scalar dtype, lane by lane."""
    return T.cast(value, vec(dtype, lanes_of(value)))


def bits(value: Expr) -> Expr:
    """The int32 bits of an f32."""
    return T.reinterpret(vec("int32", lanes_of(value)), value)


def from_bits(value: Expr) -> Expr:
    """The f32 of int32 or uint32 bits."""
    return T.reinterpret(vec("float32", lanes_of(value)), value)


def shl(value: Expr, count: int) -> Expr:
    """Shift left by a constant."""
    return T.shift_left(value, iconst(count, lanes_of(value), _scalar(value))) if count else value


def shr(value: Expr, count: int) -> Expr:
    """Shift right by a constant: arithmetic for signed, logical for unsigned integers."""
    return T.shift_right(value, iconst(count, lanes_of(value), _scalar(value))) if count else value


def mask(value: Expr, pattern: int) -> Expr:
    """Bitwise and with a constant."""
    return T.bitwise_and(value, iconst(pattern, lanes_of(value), _scalar(value)))


def _scalar(value: Expr) -> str:
    return dtype_of(value).split("x")[0]


def select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """`yes` where the condition holds, else `no`; both are computed."""
    return T.Select(condition, yes, no)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a · b + c, rounded once."""
    return T.call_llvm_pure_intrin(dtype_of(c), "llvm.fma", a, b, c)


def product(a: Expr, b: Expr) -> Expr:
    """a · b, rounded before it is added to anything."""
    return rounded(a * b)


def rounded(value: Expr) -> Expr:
    """`value` as f32 arithmetic gives it: keeps the code generator from fusing its last operation into the next."""
    return T.call_llvm_pure_intrin(dtype_of(value), "llvm.arithmetic.fence", value)


def absolute(value: Expr) -> Expr:
    """|value| of an f32."""
    return T.call_llvm_pure_intrin(dtype_of(value), "llvm.fabs", value)


def sqrt(value: Expr) -> Expr:
    """Square root of an f32, correctly rounded."""
    return T.call_llvm_pure_intrin(dtype_of(value), "llvm.sqrt", value)


def nearest(value: Expr) -> Expr:
    """Rounding of an f32 to an integer value, halves to even."""
    return T.call_llvm_pure_intrin(dtype_of(value), "llvm.roundeven", value)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger; a NaN in `b` stays, one in `a` gives `b`."""
    return select(a > b, a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller; a NaN in `b` stays, one in `a` gives `b`."""
    return select(a < b, a, b)


# ---- memory ----------------------------------------------------------------------------------------------------------


def load(buffer: Buffer, index: Expr, lanes: int = LANES) -> Expr:
    """f32 of `lanes` consecutive elements of an f32 or bf16 buffer, as an expression of one memory access."""
    value = buffer[at(index, lanes)]
    return widen(value) if _scalar(value) == "uint16" else value


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store f32 lanes to consecutive elements of an f32 or bf16 buffer, the latter rounded to nearest even."""
    if buffer.dtype == "uint16":
        value = narrow(value)
    T.buffer_store(buffer, value, [at(index, lanes_of(value))])


def put(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store lanes as they are, in the dtype of the buffer."""
    T.buffer_store(buffer, value, [at(index, lanes_of(value))])


def prefetch(buffer: Buffer, index: Expr) -> None:
    """Ask for the cache line of an element, which may lie past the end."""
    read, keep, data = T.int32(0), T.int32(3), T.int32(1)
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", T.address_of(buffer[index]), read, keep, data))


def scratch(elements: int, dtype: str = "float32") -> Buffer:
    """Memory of one loop iteration, uninitialised; a call of the runtime if it is 1 KiB or more."""
    return T.alloc_buffer((elements,), dtype)


def each(extent: int, body: Callable[[Expr, int], None]) -> None:
    """`body(index, lanes)` over 0 … extent − 1: 16 lanes at a time, then one at a time."""
    whole, rest = divmod(extent, LANES)
    if whole:
        with loop(whole) as i:
            body(i * LANES, LANES)
    if rest:
        with loop(rest) as i:
            body(i + whole * LANES, 1)


def copy_run(source: Buffer, begin: Expr, out: Buffer, end: Expr, extent: int) -> None:
    """out[end …] = source[begin …], `extent` elements of the same storage type."""
    each(extent, lambda i, lanes: put(out, end + i, source[at(begin + i, lanes)]))


def fold(
    extent: int,
    start: float,
    step: Callable[[Expr, Expr, int], Expr],
    join: Callable[[Expr, Expr], Expr],
    registers: int = 4,
) -> Expr:
    """A reduction over 0 … extent − 1 in a fixed order: `step(accumulator, index, lanes)`, partial results by `join`.

    `registers` vectors take 16 elements in turn; they are joined pairwise, their lanes pairwise, then the elements
    that fill no vector are folded in ascending order.
    """
    vectors, rest = divmod(extent, LANES)
    count = max(1, min(registers, vectors))
    partial = [local(const(start, LANES)) for _ in range(count)]
    rounds, extra = divmod(vectors, count)
    if rounds:
        with loop(rounds) as i:
            for j, register in enumerate(partial):
                register.set(step(register.value, (i * count + j) * LANES, LANES))
    for j in range(extra):
        partial[j].set(step(partial[j].value, T.int64((rounds * count + j) * LANES), LANES))
    values = [register.value for register in partial]
    while len(values) > 1:
        values = [let(join(a, b)) for a, b in zip(values[::2], values[1::2], strict=False)] + (
            [values[-1]] if len(values) % 2 else []
        )
    total = local(join_lanes(values[0], join))
    if rest:
        with loop(rest) as i:
            total.set(step(total.value, i + vectors * LANES, 1))
    return total.value


def join_lanes(value: Expr, join: Callable[[Expr, Expr], Expr]) -> Expr:
    """All lanes of a vector joined pairwise, halves first; a scalar."""
    value, lanes = let(value), lanes_of(value)
    while lanes > 1:
        lanes //= 2
        value = let(join(lanes_from(value, 0, lanes), lanes_from(value, lanes, lanes)))
    return value


def shuffle(vectors: Sequence[Expr], picked: Sequence[int]) -> Expr:
    """Lanes `picked` of the concatenated vectors, each a constant or the result of `let`."""
    # TVM wants no more lanes out than in: a repeated vector adds some
    copies = -(-len(picked) // sum(map(lanes_of, vectors)))
    return tirx.Shuffle(list(vectors) * copies, [tirx.IntImm("int32", lane) for lane in picked])


def integers(values: Sequence[int], dtype: str = "int32") -> Expr:
    """A vector of integers."""
    return shuffle([tirx.IntImm(dtype, value) for value in values], range(len(values)))


def constants(values: Sequence[float]) -> Expr:
    """A vector of f32 numbers."""
    return shuffle([T.float32(value) for value in values], range(len(values)))


def lanes_from(value: Expr, first: int, count: int) -> Expr:
    """Lanes first … first + count − 1 of a vector."""
    return shuffle([value], range(first, first + count))


def sum_squares(buffer: Buffer, base: Expr, extent: int) -> Expr:
    """Σ x² of `extent` consecutive elements, f32."""

    def step(total: Expr, index: Expr, lanes: int) -> Expr:
        x = let(load(buffer, base + index, lanes))
        return fma(x, x, total)

    return fold(extent, 0.0, step, lambda a, b: a + b)


def widen(value: Expr) -> Expr:
    """f32 of bf16 bits (uint16)."""
    return from_bits(shl(cast(value, "uint32"), 16))


def narrow(value: Expr) -> Expr:
    """bf16 bits (uint16) of an f32, rounded to nearest even; NaN stays NaN."""
    value = let(value)
    word = let(T.reinterpret(vec("uint32", lanes_of(value)), value))
    even = mask(shr(word, 16), 1)
    near = shr(word + (even + iconst(0x7FFF, lanes_of(value), "uint32")), 16)
    quiet = T.bitwise_or(shr(word, 16), iconst(0x40, lanes_of(value), "uint32"))
    return cast(select(value == value, near, quiet), "uint16")


def bf16(value: Expr) -> Expr:
    """An f32 rounded to the nearest bf16, as f32."""
    return widen(let(narrow(value)))
