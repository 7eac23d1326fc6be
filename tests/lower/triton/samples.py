"""Programs written by hand, as the emitter would write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilekern.ir.types import BF16, F32, DType
from tilekern.lower.triton.program import Argument, Descriptor, Program
from tilekern.source import Loc

USER = Path(__file__)
"""User's lines of all samples: the first line of a program's body comes from line 1, and so on."""

_HEAD = """import triton
import triton.language as tl


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def {name}({parameters}):
"""
BODY = _HEAD.count("\n") + 1
"""The line where a sample's body begins."""


def program(name: str, arguments: Sequence[Argument], body: str, *, num_warps: int = 4, num_stages: int = 3) -> Program:
    """A program of `arguments` whose line `BODY + i` comes from line 1 + i of this file."""
    lines = body.strip("\n").splitlines()
    head = _HEAD.format(name=name, parameters=", ".join(argument.name for argument in arguments))
    return Program(
        name=name,
        text=head + "\n".join(f"    {line}" for line in lines) + "\n",
        arguments=tuple(arguments),
        operands=tuple(range(len(arguments) - 1)),
        constants=(),
        results=(),
        programs=1,
        num_warps=num_warps,
        num_stages=num_stages,
        lines={BODY + i: Loc(str(USER), 1 + i) for i in range(len(lines))},
        loc=Loc(str(USER), 100),
    )


def pointers(*names: str, dtype: DType = F32) -> list[Argument]:
    """Pointers to arrays of one dtype."""
    return [Argument(name, dtype) for name in names]


def add(count: int = 128, **launch: int) -> Program:
    """The sum of two vectors."""
    body = f"""
i = tl.program_id(0) * {count} + tl.arange(0, {count})
x = tl.load(x_ptr + i)
tl.store(out_ptr + i, x + tl.load(y_ptr + i))
"""
    return program("add", pointers("x_ptr", "y_ptr", "out_ptr"), body, **launch)


def copy(dtype: DType) -> Program:
    """A vector of any dtype."""
    body = """
i = tl.arange(0, 128)
tl.store(out_ptr + i, tl.load(x_ptr + i))
"""
    return program("copy", pointers("x_ptr", "out_ptr", dtype=dtype), body)


def spill() -> Program:
    """One warp whose tile needs more registers than its threads have."""
    body = """
i = tl.arange(0, 32)[:, None] * 256 + tl.arange(0, 256)[None, :]
e = tl.exp(tl.load(x_ptr + i))
tl.store(out_ptr + i, e / tl.sum(e, 1)[:, None] - tl.max(e, 1)[:, None])
"""
    return program("spill", pointers("x_ptr", "out_ptr"), body, num_warps=1, num_stages=1)


def matmul(block: int = 128, depth: int = 64, **launch: int) -> Program:
    """A block of rows times one block of columns, through TMA descriptors."""
    size = 4096
    body = f"""
i = tl.program_id(0) * {block}
acc = tl.zeros(({block}, {block}), tl.float32)
for k in range(0, {size}, {depth}):
    a = x.load([i, k])
    b = w.load([k, 0])
    acc = tl.dot(a, b, acc, max_num_imprecise_acc=0)
out.store([i, 0], half(acc).to(tl.bfloat16))
"""
    blocks = {"x": (block, depth), "w": (depth, block), "out": (block, block)}
    boxes = {name: Descriptor((size, size), (size, 1), box) for name, box in blocks.items()}
    arguments = [Argument(name, BF16, box) for name, box in boxes.items()]
    return program("matmul", arguments, body, **launch)


def failing(statement: str) -> Program:
    """A program whose second line is `statement`, which may use `i`, `x_ptr` and `out_ptr`."""
    return program("failing", pointers("x_ptr", "out_ptr"), f"i = tl.arange(0, 128)\n{statement}\n")


def sine() -> Program:
    """Large arguments of a sine take a slow path that has a local array."""
    body = """
i = tl.arange(0, 128)
tl.store(out_ptr + i, tl.sin(tl.load(x_ptr + i)))
"""
    return program("sine", pointers("x_ptr", "out_ptr"), body)
