"""Example Funcs built by hand, and a strategy of random ones."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.ir.custom import derived
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select, splat
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Axis, Block, Builder, Func, Op, Value, cdiv, index_value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Atomic, Dim, Load, Position, Store, Term
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32, INDEX, DType, RefType, TileType
from tilekern.source import Loc

FILE = "/home/user/kernels.py"


@dataclass
class Source(Builder):
    """A builder of ops as a kernel's lines would give them: the n-th op is at line n."""

    count: int = 0
    _ops: list[Op] = field(default_factory=list)

    def loc(self) -> Loc:
        self.count += 1
        return Loc(FILE, self.count, 4, 20, "kernel")

    def op(self, kind: type[Op], *operands: Value, **fields: Any) -> Value:
        return self.one(kind(operands=operands, loc=self.loc(), **fields))

    def ew(self, function: str, *operands: Value, **fields: Any) -> Value:
        return self.op(Elementwise, *operands, function=function, **fields)

    def const(self, value: Any, shape: tuple[int, ...] = (), dtype: DType = I32, hint: str = "") -> Value:
        return self.one(splat(value, TileType(shape, dtype), loc=self.loc(), hint=hint))

    def load(self, x: Value, *dims: "Lanes", mask: Value | None = None, fill: Value | None = None, **kw: Any) -> Value:
        access, positions = access_of(dims)
        operands = (x, *positions, *(v for v in (mask, fill) if v is not None))
        return self.op(Load, *operands, access=access, masked=mask is not None, filled=fill is not None, **kw)

    def store(self, ref: Value, value: Value, *dims: "Lanes", mask: Value | None = None) -> int:
        """Returns the line of the store."""
        access, positions = access_of(dims)
        operands = (ref, value, *positions, *(v for v in (mask,) if v is not None))
        self.add(Store(operands=operands, access=access, masked=mask is not None, loc=self.loc()))
        return self.count

    def fold(
        self,
        axis: Axis,
        start: Value,
        stop: Value,
        inits: tuple[Value, ...],
        body: Callable[..., tuple[Value, ...]],
        reverse: bool = False,
    ) -> tuple[Value, ...]:
        args = (index_value(axis.name), *(Value(v.type, "c") for v in inits))
        loc = self.loc()
        region = self.block(args, body)
        fields: dict[str, Any] = {"axis": axis, "reverse": reverse, "regions": (region,), "loc": loc, "hint": "state"}
        return self.add(Fold(operands=(start, stop, *inits), **fields))


@dataclass(frozen=True)
class Lanes:
    """A Dim with the values of its position: `stride * value + ...`."""

    kind: Any
    terms: tuple[tuple[Value, int], ...] = ()
    size: int = 1
    const: int = 0
    proved: bool = False

    @property
    def sure(self) -> "Lanes":
        return replace(self, proved=True)


def tile(index: Value, size: int, const: int = 0) -> Lanes:
    return Lanes("block", ((index, size),), size, const)


def whole(size: int) -> Lanes:
    return Lanes("block", (), size, 0, proved=True)


def at(value: Value, stride: int = 1, const: int = 0) -> Lanes:
    return Lanes("index", ((value, stride),), 1, const)


def gather(rows: Value) -> Lanes:
    return Lanes("gather", ((rows, 1),), rows.tile.shape[0])


def access_of(lanes: tuple[Lanes, ...]) -> tuple[Access, tuple[Value, ...]]:
    positions = tuple(dict.fromkeys(v for lane in lanes for v, _ in lane.terms))
    dims = (
        Dim(x.kind, Position(tuple(Term(positions.index(v), s) for v, s in x.terms), x.const), x.size, x.proved)
        for x in lanes
    )
    return Access(tuple(dims)), positions


def ref(name: str, shape: tuple[int, ...], role: Any = "in", dtype: DType = F32) -> Value:
    return Value(RefType(shape, dtype, role), name)


def func(name: str, params: tuple[Value, ...], axes: tuple[Axis, ...], body: Callable[..., Any]) -> Func:
    """`body(source, *indices)` appends the ops of one program."""
    source = Source()
    indices = tuple(index_value(a.name) for a in axes)

    def run(*args: Value) -> tuple[Value, ...]:
        body(source, *args)
        return ()

    return Func(name, params, axes, source.block(indices, run), Loc(FILE, 1000, function=name))


# --- examples --------------------------------------------------------------------------------------------------------


def matmul(m: int = 50, n: int = 35, k: int = 70, dtype: DType = BF16) -> Func:
    """out[m, n] = x[m, k] @ w[k, n] in ragged tiles of 16 × 8 × 32."""
    x, w, out = ref("x", (m, k), dtype=dtype), ref("w", (k, n), dtype=dtype), ref("out", (m, n), "out", dtype)

    def body(b: Source, i: Value, j: Value) -> None:
        def step(t: Value, acc: Value) -> tuple[Value, ...]:
            product = b.op(Dot, b.load(x, tile(i, 16), tile(t, 32)), b.load(w, tile(t, 32), tile(j, 8)), **contract)
            return (b.ew("add", acc, product),)

        contract = {"contract": ((1,), (0,))}
        zero = b.const(0.0, (16, 8), F32, hint="zero")
        (acc,) = b.fold(Axis("k", k, 32), b.const(0, hint="start"), b.const(k, hint="stop"), (zero,), step)
        b.store(out, b.op(Convert, acc, dtype=dtype), tile(i, 16), tile(j, 8))

    return func("matmul", (x, w, out), (Axis("i", m, 16), Axis("j", n, 8)), body)


def softmax(rows: int = 21, columns: int = 50) -> Func:
    """Softmax over each row; a mask and a fill of -inf keep the tail of a row out."""
    x, out = ref("x", (rows, columns)), ref("out", (rows, columns), "out")
    width = 64

    def body(b: Source, i: Value) -> None:
        lane = b.op(Iota, shape=(8, width), dtype=I32, dim=1, hint="lane")
        valid = b.ew("lt", lane, b.const(columns, (8, width)))
        lanes = (tile(i, 8), Lanes("block", (), width))
        s = b.load(x, *lanes, mask=valid, fill=b.const(-np.inf, (), F32, hint="fill"), hint="s")
        top = b.op(Reduce, s, monoid="max", dims=(1,), hint="top")
        p = b.ew("exp", b.ew("sub", s, b.op(Broadcast, top, shape=(8, width), dims=(0,))), hint="p")
        total = b.op(Reduce, p, monoid="sum", dims=(1,))
        b.store(out, b.ew("div", p, b.op(Broadcast, total, shape=(8, width), dims=(0,))), *lanes, mask=valid)

    return func("softmax", (x, out), (Axis("i", rows, 8),), body)


def causal(length: int = 45, block: int = 16) -> Func:
    """out[q] = sum of x[k] over k <= q: the fold stops at the end of the program's own tile."""
    x, out = ref("x", (length,)), ref("out", (length,), "out")

    def body(b: Source, i: Value) -> None:
        first = b.ew("mul", i, b.const(block), hint="first")
        stop = b.ew("add", first, b.const(block), hint="stop")
        row = b.ew("add", b.op(Iota, shape=(block, block), dtype=I32, dim=0), b.op(Broadcast, first, **square))
        lane = b.op(Iota, shape=(block, block), dtype=I32, dim=1)

        def step(t: Value, acc: Value) -> tuple[Value, ...]:
            begin = b.ew("mul", t, b.const(block))
            seen = b.ew("ge", row, b.ew("add", lane, b.op(Broadcast, begin, **square)))
            a = b.op(Broadcast, b.load(x, tile(t, block)), shape=(block, block), dims=(1,))
            kept = b.op(Select, seen, a, b.const(0.0, (block, block), F32))
            return (b.ew("add", acc, b.op(Reduce, kept, monoid="sum", dims=(1,))),)

        (acc,) = b.fold(Axis("k", length, block), b.const(0), stop, (b.const(0.0, (block,), F32),), step)
        b.store(out, acc, tile(i, block))

    square: dict[str, Any] = {"shape": (block, block), "dims": ()}
    return func("causal", (x, out), (Axis("i", length, block),), body)


def switched(length: int = 6) -> Func:
    """out[i] = x[i] negated, doubled or kept, by i - 1 clamped to 0, 1, 2."""
    x, out = ref("x", (length,)), ref("out", (length,), "out")

    def body(b: Source, i: Value) -> None:
        a = b.load(x, at(i).sure, hint="a")
        branches = (lambda: (b.ew("neg", a),), lambda: (b.ew("add", a, a),), lambda: (a,))
        regions = tuple(b.block((), branch) for branch in branches)
        b.store(out, b.op(Switch, b.ew("sub", i, b.const(1)), regions=regions, hint="a"), at(i).sure)

    return func("switched", (x, out), (Axis("i", length),), body)


def collatz(length: int = 12) -> Func:
    """out[i] = how many steps i + 1 takes to 1: a While of two carries."""
    out = ref("out", (length,), "out", I32)

    def body(b: Source, i: Value) -> None:
        one, two, three = b.const(1), b.const(2), b.const(3)

        def more(n: Value, _: Value) -> tuple[Value, ...]:
            return (b.ew("gt", n, one),)

        def step(n: Value, count: Value) -> tuple[Value, ...]:
            odd = b.ew("eq", b.ew("rem", n, two), one)
            grown = b.ew("add", b.ew("mul", n, three), one)
            return b.op(Select, odd, grown, b.ew("div", n, two)), b.ew("add", count, one)

        args = [tuple(Value(INDEX, name) for name in ("n", "count")) for _ in range(2)]
        regions = (b.block(args[0], more), b.block(args[1], step))
        inits = (b.ew("add", i, one), b.const(0))
        _, count = b.add(While(operands=inits, regions=regions, loc=b.loc(), hint="n"))
        b.store(out, count, at(i))

    return func("collatz", (out,), (Axis("i", length),), body)


def take_rows(rows: int = 10, columns: int = 6, picked: int = 14) -> Func:
    """out[i] = x[which[i]]; a row out of bounds is 0."""
    x, which = ref("x", (rows, columns)), ref("which", (picked,), dtype=I32)
    out = ref("out", (picked, columns), "out")

    def body(b: Source, i: Value) -> None:
        chosen = b.load(which, tile(i, 4), hint="chosen")
        b.store(out, b.load(x, gather(chosen), whole(columns)), tile(i, 4), whole(columns))

    return func("take_rows", (x, which, out), (Axis("i", picked, 4),), body)


def every_op() -> Func:
    """One of each class of op, with attributes other than the defaults, under awkward names."""
    x, out, tally = ref("x", (7, 9)), ref("an output", (7,), "out"), ref("tally", (7,), "zeros", I32)

    def body(b: Source, i: Value) -> None:
        a = b.load(x, Lanes("block", ((i, 8), (i, -3)), 8, -5), Lanes("index", ((i, -1),), 1, 2, True), hint="a")
        grid = b.op(Broadcast, a, shape=(3, 8), dims=(1,), hint="a")
        flat = b.op(Reshape, b.op(Transpose, grid, permutation=(1, 0)), shape=(24,), hint="a_1")
        part = b.op(Slice, flat, start=(1,), stop=(23,), stride=(2,), hint="0")
        long = b.op(Concatenate, part, b.op(Reverse, part, dims=(0,)), dim=0)
        padded = b.op(Pad, long, b.const(-0.0, (), F32), low=(-1,), high=(2,), interior=(1,))
        lanes = b.op(Iota, shape=padded.tile.shape, dtype=I32, dim=0)
        mask = b.ew("lt", lanes, b.const(3, lanes.tile.shape), hint="mask")
        table = b.one(Constant(array=np.linspace(0, 1, padded.tile.size, dtype=np.float32), shape=padded.tile.shape))
        small = b.one(Constant(array=np.array([[np.inf, -np.inf, np.nan, -0.0]], np.float16), shape=(1, 4)))
        dotted = b.op(Dot, small, small, contract=((1,), (1,)), batch=((0,), (0,)), precision="bf16x3")
        total = b.op(Reduce, b.op(Select, mask, padded, table), monoid="sum", dims=(0,))
        kept = derived(b, b.op(Convert, b.op(Reshape, dotted, shape=()), dtype=F32))

        def more(c: Value, _: Value) -> tuple[Value, ...]:
            return (b.ew("lt", c, c),)

        args = [tuple(Value(v.type, "") for v in (total, kept)) for _ in range(2)]
        regions = (b.block(args[0], more), b.block(args[1], lambda *c: c))
        first, _ = b.add(While(operands=(total, kept), regions=regions, loc=b.loc(), hint="x"))
        pick = b.op(Switch, i, regions=(b.block((), lambda: (first,)), b.block((), lambda: (kept,))))
        stop, axis = b.const(9), Axis("an axis", 9, 4)
        folded = b.fold(axis, i, stop, (pick, kept), lambda _, c, d: (d, c), reverse=True)
        b.fold(axis, i, stop, (), lambda _: ())
        eight = b.op(Broadcast, folded[1], shape=(8,), dims=())
        true = b.const(True, (8,), BOOL)
        b.store(out, eight, tile(i, 8), mask=true)
        scanned = b.op(Scan, table, monoid="logsumexp", dim=0, reverse=True)
        scanned = b.op(LinearScan, scanned, table, dim=0, reverse=True)
        at = b.op(ArgReduce, b.op(Sort, lanes, scanned, dim=0, num_keys=2, pick=1), extreme="min", dim=0)
        b.op(TopK, scanned, dim=0, k=5)
        piece = b.op(DynamicSlice, scanned, at, sizes=(2,))
        taken = b.op(Take, piece, b.op(Iota, shape=(2,), dtype=I32, dim=0), dim=0)
        moved = b.op(DynamicUpdateSlice, scanned, taken, at)
        b.op(Take, moved, b.op(Bitcast, moved, dtype=I32), dim=0, along=True)
        access, positions = access_of((tile(i, 8),))
        hoisted = b.op(Hoist, i, regions=(b.block((), lambda: (b.const(1, (8,)),)),))
        b.add(Atomic(operands=(tally, hoisted, *positions, true), access=access, masked=True, kind="max", loc=b.loc()))
        b.add(Print(operands=(kept, hoisted), format="{} {}", loc=b.loc()))
        b.add(Assert(operands=(true,), message='"true"', loc=b.loc()))
        rows = b.op(Iota, shape=(2,), dtype=I32, dim=0)
        b.load(x, gather(rows).sure, gather(rows), mask=b.const(True, (2, 2), BOOL), fill=kept)
        together, vectors = access_of((whole(3), gather(rows), replace(gather(rows), kind="along")))
        b.op(Load, x, *vectors, access=replace(together, extents=(3, 3, 7)))

    return func("<lambda>", (x, out, tally), (Axis("i", 7, 8),), body)


EXAMPLES: dict[str, Callable[[], Func]] = {
    f.__name__: f for f in (matmul, softmax, causal, switched, collatz, take_rows, every_op)
}


# --- random Funcs ----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["", "a", "a_1", "b", "0", "a b", "ä", "fold"])
LOCS = st.builds(
    Loc,
    st.sampled_from(["m.py", 'C:\\a "b".py']),
    st.integers(1, 99),
    st.integers(0, 9),
    st.integers(0, 30),
    st.sampled_from(["", "f", "<lambda>"]),
)
TILES = st.builds(TileType, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from(list(DTYPES.values())))


@st.composite
def constants(draw: Any, tile: TileType | None = None) -> Constant:
    """A splat or a whole array of any bits, those of each NaN among them."""
    tile = tile or draw(TILES)
    whole = draw(st.booleans())
    size = tile.size if whole else 1
    if tile.dtype == BOOL:
        array = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    else:
        length = size * tile.dtype.itemsize
        array = np.frombuffer(draw(st.binary(min_size=length, max_size=length)), tile.dtype)
    array = array.reshape(tile.shape if whole else ())
    return Constant(array=array, shape=tile.shape, hint=draw(NAMES), loc=draw(LOCS))


@st.composite
def funcs(draw: Any) -> Func:
    """A well-formed Func of random ops, nested to a depth of two; it may be run only where it has no outputs."""
    b = Source()
    refs = tuple(ref(draw(NAMES), (4, 6)) for _ in range(draw(st.integers(0, 2))))
    axes = tuple(Axis(draw(NAMES), draw(st.integers(0, 9)), draw(st.integers(1, 4))) for _ in range(2))
    indices = tuple(index_value(draw(NAMES)) for _ in axes)

    def fields() -> dict[str, Any]:
        return {"hint": draw(NAMES), "loc": draw(LOCS)}

    def lanes(scalars: list[Value]) -> Lanes:
        terms = draw(st.lists(st.tuples(st.sampled_from(scalars), st.integers(-9, 9)), max_size=2, unique_by=id))
        kind = draw(st.sampled_from(["block", "index"]))
        size = draw(st.integers(0, 4)) if kind == "block" else 1
        return Lanes(kind, tuple(terms), size, draw(st.integers(-9, 9)), draw(st.booleans()))

    def one(values: list[Value], depth: int) -> tuple[Value, ...]:
        value = draw(st.sampled_from(values))
        scalars = [v for v in values if v.type == INDEX]
        number = value.tile.dtype != BOOL
        match draw(st.sampled_from(["constant", "ew", "convert", "reduce", "broadcast", "load", "fold", "switch"])):
            case "ew" if number:
                return b.add(
                    Elementwise(operands=(value, value), function=draw(st.sampled_from(["add", "lt"])), **fields())
                )
            case "convert":
                dtype = draw(st.sampled_from(list(DTYPES.values())))
                return b.add(Convert(operands=(value,), dtype=dtype, **fields()))
            case "reduce":
                dims = draw(st.sets(st.integers(0, len(value.tile.shape) - 1))) if value.tile.shape else ()
                return b.add(Reduce(operands=(value,), monoid="max", dims=tuple(dims), **fields()))
            case "broadcast":
                rank = len(value.tile.shape)
                op = Broadcast(
                    operands=(value,), shape=(2, *value.tile.shape), dims=tuple(range(1, rank + 1)), **fields()
                )
                return b.add(op)
            case "load" if refs:
                access, positions = access_of((lanes(scalars), lanes(scalars)))
                return b.add(Load(operands=(draw(st.sampled_from(refs)), *positions), access=access, **fields()))
            case "fold" if depth:
                carries = tuple(draw(st.lists(st.sampled_from(values), max_size=2)))
                args = (index_value(draw(NAMES)), *(Value(v.type, draw(NAMES)) for v in carries))
                region = b.block(args, lambda *_: (many([*values, *args], depth - 1), args[1:])[1])
                axis = Axis(draw(NAMES), draw(st.integers(0, 9)), draw(st.integers(1, 4)))
                bounds = (draw(st.sampled_from(scalars)), draw(st.sampled_from(scalars)))
                more = {"axis": axis, "reverse": draw(st.booleans()), "regions": (region,), **fields()}
                return b.add(Fold(operands=(*bounds, *carries), **more))
            case "switch" if depth:
                yields = tuple(draw(st.lists(st.sampled_from(values), max_size=2)))
                count = draw(st.integers(1, 2))
                regions = tuple(b.block((), lambda: (many(values, depth - 1), yields)[1]) for _ in range(count))
                return b.add(Switch(operands=(draw(st.sampled_from(scalars)),), regions=regions, **fields()))
            case _:
                return b.add(draw(constants()))

    def many(values: list[Value], depth: int) -> None:
        values = list(values)
        for _ in range(draw(st.integers(0, 4))):
            values += one(values, depth)

    def body(*args: Value) -> tuple[Value, ...]:
        many(list(args), 2)
        return ()

    return Func(draw(st.sampled_from(["f", "<lambda>"])), refs, axes, b.block(indices, body), draw(LOCS))


def programs(func: Func) -> int:
    """The number of programs of a Func."""
    return int(np.prod([cdiv(a.extent, a.block) for a in func.axes]))


def block_of(func: Func, ops: tuple[Op, ...]) -> Func:
    """`func` with other ops."""
    return replace(func, body=Block(func.body.args, ops, ()))


# --- numbers ---------------------------------------------------------------------------------------------------------


def evaluate(kind: type[Op], *arrays: np.ndarray, **fields: Any) -> np.ndarray:
    """The result of an op on arrays, checked against the type that its rule gives."""
    op = kind(operands=tuple(Value(TileType(x.shape, x.dtype)) for x in arrays), **fields)
    result = np.asarray(op.evaluate(*arrays))
    assert op.result.type == TileType(result.shape, result.dtype)
    return result


def edges(dtype: DType, count: int = 256) -> np.ndarray:
    """Values where things go wrong, and arbitrary bit patterns (all there are, for 8 bits)."""
    if dtype == BOOL:
        return np.array([False, True])
    bits = dtype.itemsize * 8
    unsigned = np.dtype(f"u{dtype.itemsize}")
    random = np.random.default_rng(bits).integers(0, 2**bits, count, unsigned, endpoint=False)
    patterns = (np.arange(256, dtype=np.uint8) if bits == 8 else random).view(dtype)
    if dtype.kind in "iu":
        limits, zero = np.iinfo(dtype), np.zeros((), dtype)
        near = [limits.min, limits.min + 1, limits.max - 1, limits.max, *range(9), bits - 1, bits, bits + 1]
        return np.concatenate([np.array(near, dtype), zero - np.arange(9).astype(dtype), patterns])
    largest = float(patterns[np.isfinite(patterns)].max())
    powers = [2.0**k for k in (7, 8, 15, 16, 31, 32, 63, 64)]
    near = [
        0.0,
        0.1,
        0.3,
        0.499999,
        0.5,
        0.9,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        7.25,
        20.0,
        300.0,
        1e-5,
        1e-40,
        largest,
        np.inf,
        *powers,
    ]
    with np.errstate(all="ignore"):
        return np.concatenate([np.array([*near, *(-x for x in near), np.nan]).astype(dtype), patterns])


def nearest(x: np.ndarray, dtype: DType) -> np.ndarray:
    """float64 numbers rounded to the nearest of all values of a float dtype, ties to the even bit pattern."""
    with np.errstate(all="ignore"):
        if dtype.itemsize >= 4:
            return x.astype(dtype)
        every = np.arange(2 ** (8 * dtype.itemsize - 1)).astype(f"u{dtype.itemsize}").view(dtype)
        values = every.astype(np.float64)
        values = values[np.isfinite(values)]
        # What would come behind the largest value, were there one more exponent, stands for overflow.
        values = np.append(values, 2 * values[-1] - values[-2])
        high = np.clip(np.searchsorted(values, np.abs(x)), 1, len(values) - 1)
        below, above = np.abs(x) - values[high - 1], values[high] - np.abs(x)
        index = np.where((below < above) | ((below == above) & (high % 2 == 1)), high - 1, high)
        overflow = np.asarray(np.inf).astype(dtype)
        magnitude = np.where(index < len(values) - 1, every[np.minimum(index, len(every) - 1)], overflow)
        magnitude = np.where(np.isnan(x), np.asarray(np.nan, dtype), magnitude)
        return np.where(np.signbit(x), -magnitude, magnitude).astype(dtype)


def assert_same(got: np.ndarray, expected: np.ndarray, zeros: bool = True) -> None:
    """Equal values, NaN equal to NaN; `zeros`: with equal signs of zero."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    same = (got == expected) | ((got != got) & (expected != expected))
    if zeros and got.dtype.kind not in "iub":
        same &= (np.signbit(got) == np.signbit(expected)) | (got != got)
    assert same.all(), f"at {np.argwhere(~same)[0]}: {got[~same][0]!r}, expected {expected[~same][0]!r}"


def assert_near(got: np.ndarray, expected: np.ndarray, least: float = 0) -> None:
    """`got` is float64 `expected` up to what one rounding to its dtype can do (16 in float64).

    `least`: the size of the terms of which a small result is the difference.
    """
    dtype = got.dtype
    info = ml_dtypes.finfo(dtype)
    units = 16 if dtype == np.float64 else 1
    rounded, wide = nearest(expected, dtype).astype(np.float64), got.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(wide - expected)
        allowed = units * (float(info.eps) * np.maximum(np.abs(expected), least) + float(info.smallest_subnormal))
    near = (error <= allowed) | (wide == rounded) | (np.isnan(wide) & np.isnan(rounded))
    assert near.all(), f"at {np.argwhere(~near)[0]}: {wide[~near][0]!r}, expected {expected[~near][0]!r}"
