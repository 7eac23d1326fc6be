"""The table of supported ops: op × dtype × backend. Each cell is found by lowering a minimal Func.

A cell is supported, or rejected with a reason: by the language, if the op's type rule does not accept the dtype, or by
a backend, whose lowering raises a `TilekernError` with the reason. Any other error is a bug, and is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from typing import Any

import jax
import numpy as np

from tilekern.errors import TilekernError, VerifyError
from tilekern.ir.compute import MONOIDS, Bitcast, Constant, Convert, Dot, Monoid, Reduce, Select
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Axis, Builder, Func, Op, Value, index_value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import ATOMICS, Atomic, AtomicKind, Load, Store, whole_access
from tilekern.ir.ordering import CUMULATIVE, ArgReduce, Cumulative, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DTYPES, I32, INDEX, DType, RefType, Role, TileType, kind_of
from tilekern.lower.backend import Backend
from tilekern.lower.target import BACKENDS

SHAPE = (2, 4)
"""The shape of the tiles of a sample."""


class Sketch(Builder):
    """A builder of the body of a Func of one program; it makes params on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.params: list[Value] = []

    def op(self, kind: Callable[..., Op], *operands: Value, **attributes: Any) -> Value:
        """Append an op; its result."""
        return self.one(kind(operands=operands, **attributes))

    def ref(self, dtype: DType, shape: tuple[int, ...], role: Role) -> Value:
        """A new param."""
        self.params.append(Value(RefType(shape, dtype, role), f"x{len(self.params)}"))
        return self.params[-1]

    def tile(self, dtype: DType, shape: tuple[int, ...] = SHAPE) -> Value:
        """A load of the whole of a new input."""
        return self.op(Load, self.ref(dtype, shape, "in"), access=whole_access(shape))

    def splat(self, number: Any, dtype: DType = I32) -> Value:
        """A constant scalar."""
        return self.op(Constant, array=np.asarray(number).astype(dtype), shape=())

    def func(self, name: str, body: Callable[[], Iterable[Value]]) -> Func:
        """The Func that stores each value of `body()` to an output of its own."""

        def stored() -> tuple[Value, ...]:
            for value in body():
                out = self.ref(value.tile.dtype, value.tile.shape, "out")
                self.add(Store(operands=(out, value), access=whole_access(value.tile.shape)))
            return ()

        block = self.block((), stored)
        params = sorted(self.params, key=lambda p: p.ref.role != "in")
        return Func(name, tuple(params), (), block)


Sample = Callable[[Sketch, DType], Value]
"""Appends one op on a dtype and returns its result."""


# --- the samples ----------------------------------------------------------------------------------------------------


def _elementwise(function: str, b: Sketch, d: DType) -> Value:
    return b.op(Elementwise, *(b.tile(d) for _ in range(TABLE[function].arity)), function=function)


def _reduce(monoid: Monoid, b: Sketch, d: DType) -> Value:
    return b.op(Reduce, b.tile(d), monoid=monoid, dims=(1,))


def _scan(monoid: Cumulative, b: Sketch, d: DType) -> Value:
    return b.op(Scan, b.tile(d), monoid=monoid, dim=1)


def _convert(dtype: DType, b: Sketch, d: DType) -> Value:
    return b.op(Convert, b.tile(d), dtype=dtype)


def _bitcast(b: Sketch, d: DType) -> Value:
    return b.op(Bitcast, b.tile(d), dtype=np.dtype(f"{'i' if kind_of(d) == 'unsigned' else 'u'}{d.itemsize}"))


def _pad(b: Sketch, d: DType) -> Value:
    return b.op(Pad, b.tile(d), b.tile(d, ()), low=(1, -1), high=(0, 2), interior=(1, 0))


def _atomic(kind: AtomicKind, b: Sketch, d: DType) -> Value:
    """An atomic update of a new param; the result is the tile that updates it."""
    whole = b.tile(d)
    b.add(Atomic(operands=(b.ref(d, SHAPE, "zeros"), whole), access=whole_access(SHAPE), kind=kind))
    return whole


def _fold(b: Sketch, d: DType) -> Value:
    index, carry = index_value("t"), Value(TileType(SHAPE, d))

    def body(*_: Value) -> tuple[Value, ...]:
        return (b.op(Reverse, carry, dims=(1,)),)

    region = b.block((index, carry), body)
    return b.op(Fold, b.splat(0), b.splat(3), b.tile(d), axis=Axis("t", 3), regions=(region,))


def _while(b: Sketch, d: DType) -> Value:
    def condition(n: Value, _: Value) -> tuple[Value, ...]:
        return (b.op(Elementwise, n, b.splat(3), function="lt"),)

    def body(n: Value, x: Value) -> tuple[Value, ...]:
        return b.op(Elementwise, n, b.splat(1), function="add"), b.op(Reverse, x, dims=(1,))

    regions = tuple(b.block((Value(INDEX), Value(TileType(SHAPE, d))), block) for block in (condition, body))
    return b.add(While(operands=(b.splat(0), b.tile(d)), regions=regions))[1]


def _switch(b: Sketch, d: DType) -> Value:
    which, x = b.tile(I32, ()), b.tile(d)
    regions = (b.block((), lambda: (x,)), b.block((), lambda: (b.op(Reverse, x, dims=(0,)),)))
    return b.op(Switch, which, regions=regions)


def _hoist(b: Sketch, d: DType) -> Value:
    return b.op(Hoist, b.splat(0), regions=(b.block((), lambda: (b.tile(d),)),))


def _print(b: Sketch, d: DType) -> Value:
    x = b.tile(d)
    b.add(Print(operands=(x,), format="{}"))
    return x


def _assert(b: Sketch, d: DType) -> Value:
    x = b.tile(d)
    b.add(Assert(operands=(b.op(Elementwise, x, x, function="eq"),), message="x is a number"))
    return x


SAMPLES: dict[str, Sample] = {
    **{name: partial(_elementwise, name) for name in TABLE},
    "constant": lambda b, d: b.op(Constant, array=np.ones((), d), shape=SHAPE),
    "select": lambda b, d: b.op(Select, b.tile(BOOL), b.tile(d), b.tile(d)),
    **{f"convert to {name}": partial(_convert, dtype) for name, dtype in DTYPES.items()},
    "bitcast": _bitcast,
    "stop_gradient": lambda b, d: b.op(Stop, b.tile(d)),
    "custom_derivative": lambda b, d: b.op(Custom, b.tile(d), b.tile(d)),
    "dot": lambda b, d: b.op(Dot, b.tile(d), b.tile(d), contract=((1,), (1,))),
    **{f"reduce {monoid}": partial(_reduce, monoid) for monoid in MONOIDS},
    "arg_reduce max": lambda b, d: b.op(ArgReduce, b.tile(d), extreme="max", dim=1),
    "arg_reduce min": lambda b, d: b.op(ArgReduce, b.tile(d), extreme="min", dim=1),
    **{f"scan {monoid}": partial(_scan, monoid) for monoid in CUMULATIVE},
    "linear_scan": lambda b, d: b.op(LinearScan, b.tile(d), b.tile(d), dim=1),
    "sort": lambda b, d: b.op(Sort, b.tile(d), b.tile(I32), dim=1, pick=1),
    "top_k": lambda b, d: b.op(TopK, b.tile(d), dim=1, k=3),
    "broadcast": lambda b, d: b.op(Broadcast, b.tile(d), shape=(3, *SHAPE), dims=(1, 2)),
    "reshape": lambda b, d: b.op(Reshape, b.tile(d), shape=(4, 2)),
    "transpose": lambda b, d: b.op(Transpose, b.tile(d), permutation=(1, 0)),
    "iota": lambda b, d: b.op(Iota, shape=SHAPE, dtype=d, dim=1),
    "slice": lambda b, d: b.op(Slice, b.tile(d), start=(0, 1), stop=(2, 4), stride=(1, 2)),
    "concatenate": lambda b, d: b.op(Concatenate, b.tile(d), b.tile(d), dim=1),
    "pad": _pad,
    "reverse": lambda b, d: b.op(Reverse, b.tile(d), dims=(1,)),
    "dynamic_slice": lambda b, d: b.op(DynamicSlice, b.tile(d), b.tile(I32, ()), b.splat(1), sizes=(1, 2)),
    "dynamic_update_slice": lambda b, d: b.op(
        DynamicUpdateSlice, b.tile(d), b.tile(d, (1, 2)), b.tile(I32, ()), b.splat(1)
    ),
    "take": lambda b, d: b.op(Take, b.tile(d), b.tile(I32, (3,)), dim=1),
    "take along": lambda b, d: b.op(Take, b.tile(d), b.tile(I32, (2, 3)), dim=1, along=True),
    "load": lambda b, d: b.tile(d),
    "store": lambda b, d: b.tile(d),
    **{f"atomic {kind}": partial(_atomic, kind) for kind in ATOMICS["signed"]},
    "fold": _fold,
    "while": _while,
    "switch": _switch,
    "hoist": _hoist,
    "print": _print,
    "assert": _assert,
}
"""A minimal use of each op, by the name of its row: the op's name, and its attributes."""


def sample(name: str, dtype: DType) -> Func:
    """A Func of one program whose last output is the result of one op.

    Raises:
      VerifyError: the op does not accept the dtype.
    """
    b = Sketch()
    return b.func(name, lambda: [SAMPLES[name](b, dtype)])


# --- the table ------------------------------------------------------------------------------------------------------


def _zeros(func: Func) -> Iterator[Any]:
    return (np.zeros(p.ref.shape, p.ref.dtype) for p in func.inputs)


def _interpret(func: Func) -> None:
    with redirect_stdout(StringIO()):
        interpret(func, *_zeros(func))


def _lower(backend: Backend, func: Func) -> None:
    with jax.enable_x64(True):
        assert backend.lower(func, backend.checked, {}).text


def attempts() -> dict[str, Callable[[Func], None]]:
    """For the interpreter and each backend, the function that lowers a Func; it raises a `TilekernError` to refuse."""
    return {"interpreter": _interpret} | {name: partial(_lower, backend) for name, backend in BACKENDS.items()}


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
      op: the name of the row.
      dtype: the short name of the dtype.
      backend: the backend; "" for the language itself.
      reason: why the cell is rejected; "" if it is supported.
    """

    op: str
    dtype: str
    backend: str
    reason: str = ""


@cache
def table() -> tuple[Cell, ...]:
    """All cells: one for each backend, or one of the language if the op does not accept the dtype."""
    return tuple(cell for op in SAMPLES for dtype in DTYPES for cell in _cells(op, dtype))


def _cells(op: str, dtype: str) -> Iterator[Cell]:
    try:
        func = sample(op, DTYPES[dtype])
    except VerifyError as error:
        yield Cell(op, dtype, "", error.summary)
        return
    for backend, attempt in attempts().items():
        try:
            attempt(func)
        except TilekernError as error:
            yield Cell(op, dtype, backend, error.summary)
        else:
            yield Cell(op, dtype, backend)


def markdown() -> str:
    """The table for the documentation: ✓ if all backends have the op, – if the language has not, else notes."""
    notes: dict[str, int] = {}
    marks: dict[tuple[str, str], str] = {}
    for cell in table():
        at = (cell.op, cell.dtype)
        if not cell.backend:
            marks[at] = "–"
        elif cell.reason:
            reason = re.sub(rf"\b{cell.dtype}\b", "this dtype", cell.reason)
            number = notes.setdefault(f"{cell.backend}: {reason}", len(notes) + 1)
            listed = marks.get(at, "").strip("✓")
            marks[at] = f"{listed}, [{number}]" if listed else f"[{number}]"
        else:
            marks.setdefault(at, "✓")
    lines = [f"| op | {' | '.join(DTYPES)} |", f"|:---|{':---:|' * len(DTYPES)}"]
    lines += [f"| {op} | {' | '.join(marks[op, dtype] for dtype in DTYPES)} |" for op in SAMPLES]
    lines += ["", f"✓: on every backend ({', '.join(attempts())}). –: the op does not accept the dtype, on none."]
    lines += [f"\n[{number}] {reason}." for reason, number in notes.items()]
    return "\n".join(lines) + "\n"
