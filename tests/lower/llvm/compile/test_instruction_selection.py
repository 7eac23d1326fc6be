"""LLVM has instructions for what the backend writes: where it has none, it ends the process.

So random programs are compiled in a child, which says what it is at.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.lower.llvm.machines import ALL
from tests.lower.llvm.tasks import process
from tilekern.errors import TilekernError
from tilekern.ir.compute import MONOIDS, Bitcast, Convert, Dot, Reduce, Select
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.ordering import CUMULATIVE, ArgReduce, LinearScan, Scan, Sort
from tilekern.ir.shape import Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DTYPES
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.ffi_handler import with_handler
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.passes import pipeline
from tilekern.testing import support

pytest.importorskip("llvmlite", reason="needs llvmlite")

_AVX512 = ",".join(f"+avx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))
_MORE = (
    Machine("x86_64-unknown-linux-gnu", "sapphirerapids", f"{_AVX512},+avx512fp16,+avx512bf16,+amx-tile", 64, 32),
    Machine(
        "x86_64-unknown-linux-gnu",
        "znver4",
        f"{_AVX512},+avx512bf16",
        64,
        32,
        has_bfloat16_dots=True,
        has_int16_pairs=True,
    ),
    Machine("aarch64-unknown-linux-gnu", "neoverse-v1", "+neon,+sve,+bf16,+fullfp16", 16, 32),
    Machine("arm64-apple-darwin", "apple-m1", "+neon,+fullfp16", 16, 32),
)
MACHINES = (*ALL, *_MORE)
SIZES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    12,
    16,
    17,
    24,
    31,
    32,
    33,
    64,
)  # fewer lanes than a vector has, odd numbers, whole vectors
BITS = [dtype for dtype in DTYPES.values() if dtype.itemsize]


def _op(rng: random.Random, b: support.Sketch, pool: list[Value]) -> Value:
    """One more op on what there is; a `TilekernError` or an `IndexError` if nothing fits."""
    x = rng.choice(pool[-4:])
    tile, dim = x.tile, rng.randrange(max(1, len(x.tile.shape)))
    same = [v for v in pool if v.tile == tile]
    masks = [v for v in pool if v.tile.dtype == BOOL and v.tile.shape == tile.shape]
    function = rng.choice(list(TABLE))
    like: Callable[[], Value] = lambda: rng.choice(same)  # noqa: E731 -- one of many
    makers: list[Callable[[], Value]] = [
        *[lambda: b.op(Elementwise, x, *(like() for _ in range(TABLE[function].arity - 1)), function=function)] * 6,
        *[lambda: b.op(Convert, x, dtype=rng.choice(BITS))] * 4,
        *[lambda: b.op(Reduce, x, monoid=rng.choice(MONOIDS), dims=(dim,))] * 2,
        lambda: b.op(Select, rng.choice(masks), x, like()),
        lambda: b.op(Bitcast, x, dtype=rng.choice([d for d in BITS if d.itemsize == tile.dtype.itemsize])),
        lambda: b.op(Scan, x, monoid=rng.choice(CUMULATIVE), dim=dim),
        lambda: b.op(LinearScan, x, like(), dim=dim),
        lambda: b.op(ArgReduce, x, extreme="max", dim=dim),
        lambda: b.op(Sort, x, like(), dim=dim, pick=rng.choice([0, 1])),
        lambda: b.op(Reverse, x, dims=(dim,)),
        lambda: b.op(Transpose, x, permutation=(1, 0)),
        lambda: b.op(Dot, x, like(), contract=((1,), (1,))),
        lambda: b.op(Slice, x, start=(0,) * len(tile.shape), stop=tile.shape, stride=(2,) * len(tile.shape)),
    ]
    return rng.choice(makers)()


def program(rng: random.Random) -> Func:
    """Up to 8 ops on tiles of one shape, the last of which are stored."""
    b = support.Sketch()
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice([1, 1, 2, 2, 3])))

    def body() -> list[Value]:
        pool = [b.tile(dtype, shape) for dtype in (*rng.choices(BITS, k=rng.randint(1, 3)), BOOL)]
        for _ in range(rng.randint(2, 8)):
            try:
                pool.append(_op(rng, b, pool))
            except (TilekernError, IndexError):
                continue
        return pool[-3:]

    return b.func("f", body)


def compile_all(first: int, count: int) -> None:
    """The child: machine code for the programs of so many seeds, for one machine after the other."""
    for seed in range(first, first + count):
        sys.stderr.write(f"seed {seed}\n")
        rng = random.Random(seed)
        func, machine = program(rng), MACHINES[seed % len(MACHINES)]
        compile_for(pipeline.run(func) if rng.random() < 0.7 else func, machine)
    sys.stdout.write("done\n")


def compile_cells(machine: Machine) -> None:
    """The child: machine code for each op and dtype that the backend has."""
    for op in support.SAMPLES:
        for name, dtype in DTYPES.items():
            sys.stderr.write(f"{op} {name}\n")
            try:
                func = support.sample(op, dtype)
            except TilekernError:
                continue
            compile_for(func, machine)
    sys.stdout.write("done\n")


def compile_for(func: Func, machine: Machine) -> None:
    try:
        lowered = LlvmLowering(func, machine)
    except TilekernError:  # refused, with a reason
        return
    toolchain._Codegen(with_handler(lowered.program).text, machine).object()


def child(call: str) -> str:
    return process(f"from tests.lower.llvm.compile import test_instruction_selection as module\nmodule.{call}")


def test_random_programs() -> None:
    assert child("compile_all(0, 40)") == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_programs(part: int) -> None:
    assert child(f"compile_all({1000 + 300 * part}, 300)") == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MACHINES)))
def test_each_op_and_dtype(number: int) -> None:
    assert child(f"compile_cells(module.MACHINES[{number}])") == "done\n"


def test_the_programs_have_ops() -> None:
    """Else the tests above would show little."""
    ops: list[Op] = [op for seed in range(40) for op in program(random.Random(seed)).walk()]
    kinds: set[Any] = {type(op) for op in ops}
    assert {Elementwise, Convert, Reduce, Select, Bitcast, Scan, Sort, ArgReduce, Dot} <= kinds
