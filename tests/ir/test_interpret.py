import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import (
    FILE,
    Lanes,
    Source,
    at,
    causal,
    collatz,
    func,
    gather,
    matmul,
    ref,
    softmax,
    switched,
    take_rows,
    tile,
    whole,
)
from tilekern.errors import (
    ArgumentError,
    InterpreterError,
    OrderDependenceError,
    OutOfBoundsError,
    UnwrittenError,
    WriteConflictError,
)
from tilekern.ir.core import Array, Axis, Func, Op, Value, cdiv
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import BOOL, DTYPES, F32, I32, TileType, kind_of
from tilekern.ir.verify import verify

RNG = np.random.default_rng(0)
DRAWN = st.integers(0, 2**32 - 1)


def run(func: Func, *arrays: Array, **options: Any) -> Array:
    verify(func)
    (out,) = interpret(func, *arrays, **options)
    return out


# --- the examples against NumPy --------------------------------------------------------------------------------------


@given(*[st.integers(1, 70)] * 3)
def test_ragged_matmul(m: int, n: int, k: int) -> None:
    x, w = (RNG.integers(-4, 5, s).astype(np.float32) for s in ((m, k), (k, n)))
    np.testing.assert_array_equal(run(matmul(m, n, k, F32), x, w), x @ w, "integers: every sum is exact")


@given(st.integers(1, 30), st.integers(1, 64))
def test_masked_softmax(rows: int, columns: int) -> None:
    x = RNG.standard_normal((rows, columns), np.float32)
    wide = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    # exp, subtract and divide round once each, the sum log2(64) + 1 times.
    tolerance = 10 * np.finfo(np.float32).eps
    np.testing.assert_allclose(run(softmax(rows, columns), x), wide / wide.sum(1, keepdims=True), rtol=tolerance)


@given(st.integers(0, 40), st.integers(2, 16))
def test_causal_fold_has_dynamic_bounds(length: int, block: int) -> None:
    x = RNG.integers(-4, 5, length).astype(np.float32)
    np.testing.assert_array_equal(run(causal(length, block), x), np.cumsum(x))


def test_switch_clamps() -> None:
    x = np.arange(1, 7, dtype=np.float32)
    np.testing.assert_array_equal(run(switched(), x), [-1, -2, 6, 4, 5, 6])


def test_while() -> None:
    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    np.testing.assert_array_equal(run(collatz(40)), [steps(n) for n in range(1, 41)])


def test_gather() -> None:
    x = RNG.standard_normal((10, 6), np.float32)
    which = np.array([3, 0, 9, 10, -1, 3, -(2**31), 2**31 - 1, 5, 5, 5, 1, 2, 8], np.int32)
    expected = [x[i] if 0 <= i < 10 else np.zeros(6) for i in which]
    np.testing.assert_array_equal(run(take_rows(), x, which), expected)


# --- accesses and loops against a naive definition -------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 12), st.integers(-20, 60), st.integers(-20, 60), st.booleans())
def test_fold_runs_the_tiles_of_its_rule(extent: int, block: int, start: int, stop: int, reverse: bool) -> None:
    out = ref("out", (50,), "out", I32)

    def body(b: Source) -> None:
        b.store(out, b.const(-1, (50,)), whole(50))

        def step(t: Value, n: Value) -> tuple[Value, ...]:
            b.store(out, t, at(n))
            return (b.ew("add", n, b.const(1)),)

        b.fold(Axis("k", extent, block), b.const(start), b.const(stop), (b.const(0),), step, reverse)

    first, last = min(max(start, 0), extent), min(max(stop, 0), extent)
    tiles = [t for t in range(50) if first // block <= t < cdiv(last, block)]
    expected = np.full(50, -1)
    expected[: len(tiles)] = tiles[::-1] if reverse else tiles
    np.testing.assert_array_equal(run(func("f", (out,), (), body)), expected)


@st.composite
def dims(draw: Any, values: tuple[Value, Value]) -> tuple[Lanes, Callable[[int, Array], int]]:
    """Lanes over values (an int32 scalar, and a vector of 3), and the index of lane n given the vector."""
    scalar, vector = values
    stride, const, size = draw(st.integers(-3, 3)), draw(st.integers(-4, 6)), draw(st.integers(0, 5))
    terms = ((scalar, stride),)
    match draw(st.sampled_from(["block", "index", "gather"])):
        case "block":
            return Lanes("block", terms, size, const), lambda n, _: 2 * stride + const + n
        case "index":
            return Lanes("index", terms, 1, const), lambda n, _: 2 * stride + const
        case _:
            return Lanes("gather", (*terms, (vector, 1)), 3, const), lambda n, rows: 2 * stride + const + rows[n]


SCALAR, ROWS = Value(TileType((), I32), "two"), Value(TileType((3,), I32), "rows")


@given(st.data(), dims((SCALAR, ROWS)), dims((SCALAR, ROWS)), st.booleans(), st.booleans(), st.booleans(), DRAWN)
def test_accesses_touch_what_a_naive_loop_touches(
    data: Any, first: Any, second: Any, masked: bool, filled: bool, storing: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lanes, index = tuple(zip(first, second, strict=True))
    sizes = [x.size for x in lanes]
    shape = tuple(x.size for x in lanes if x.kind != "index")
    # Different rows, so that no element is stored twice; some are out of bounds.
    x, rows = rng.integers(1, 99, (4, 5)).astype(np.float32), rng.permutation(9)[:3].astype(np.int32) - 2
    mask, value = rng.integers(0, 2, shape).astype(bool), rng.integers(100, 199, shape).astype(np.float32)
    touched = {
        ij: xy
        for ij in np.ndindex(*sizes)
        if 0 <= (xy := tuple(f(n, rows) for f, n in zip(index, ij, strict=True)))[0] < 4 and 0 <= xy[1] < 5
        if not masked or mask.reshape(sizes)[ij]
    }
    given_mask, given_value = ref("mask", shape, dtype=BOOL), ref("value", shape)
    params = (ref("x", (4, 5)), ref("rows", (3,), dtype=I32), given_mask, given_value)
    out = ref("out", (4, 5) if storing else shape, "out")

    def body(b: Source) -> None:
        values = {SCALAR: b.const(2), ROWS: b.load(params[1], whole(3))}
        own = [Lanes(x.kind, tuple((values[v], s) for v, s in x.terms), x.size, x.const) for x in lanes]
        every = [whole(n) for n in shape]
        keep = b.load(given_mask, *every) if masked else None
        if storing:
            b.store(out, b.load(params[0], whole(4), whole(5)), whole(4), whole(5))
            b.store(out, b.load(given_value, *every), *own, mask=keep)
        else:
            fill = b.const(7, (), F32) if filled else None
            b.store(out, b.load(params[0], *own, mask=keep, fill=fill), *every)

    expected = x.copy() if storing else np.full(sizes, 7.0 if filled else 0.0, np.float32)
    for ij, xy in touched.items():
        if storing:
            expected[xy] = value.reshape(sizes)[ij]
        else:
            expected[ij] = x[xy]
    got = run(func("f", (*params, out), (), body), x, rows, mask, value)
    np.testing.assert_array_equal(got, expected.reshape(out.ref.shape))


def test_positions_do_not_wrap() -> None:
    x, out = ref("x", (2, 2**20), dtype=I32), ref("out", (4,), "out", I32)

    def body(b: Source) -> None:
        b.store(out, b.const(1, (4,)), whole(4))
        big = b.const(2**30)
        b.store(out, b.const(5), Lanes("index", ((big, 4),)))  # 2^32 is 0 in int32
        b.load(x, at(big, 2**30), at(big))  # nor is 2^60 * 2^30 a place in x, or worth a warning
        b.store(out, b.const(6), Lanes("index", ((big, 4), (big, -4)), 1, 3))

    with warnings.catch_warnings(action="error"):
        got = run(func("f", (x, out), (), body), np.zeros(x.ref.shape, np.int32))
    np.testing.assert_array_equal(got, [1, 1, 1, 6])


def test_scalars_and_empty_arrays() -> None:
    x, y, out, none = ref("x", ()), ref("y", (0, 3)), ref("out", (), "out"), ref("none", (0,), "out")

    def body(b: Source) -> None:
        b.store(out, b.load(x))
        b.store(none, b.load(y, Lanes("block", (), 2), at(b.const(1))), Lanes("block", (), 2))

    kernel = func("f", (x, y, out, none), (), body)
    first, second = interpret(kernel, np.float32(3), np.zeros((0, 3), np.float32))
    assert first == 3 and first.shape == () and second.shape == (0,)


# --- the checks ------------------------------------------------------------------------------------------------------


def fault(error: type[InterpreterError], kernel: Func, line: int, *arrays: Array, **options: Any) -> str:
    """The message of the error, which must point at `line`."""
    verify(kernel)
    with pytest.raises(error) as caught:
        interpret(kernel, *arrays, **options)
    assert type(caught.value) is error
    assert (caught.value.loc.file, caught.value.loc.line) == (FILE, line), caught.value
    assert f"at {FILE}:{line}" in str(caught.value)
    return str(caught.value)


def kernel_of(body: Callable[..., int], shape: tuple[int, ...] = (4,), grid: int = 4) -> tuple[Func, int]:
    """A kernel with one output, run by `grid` programs; `body(source, out, i)` returns the line that is at fault."""
    out, lines = ref("out", shape, "out"), []
    kernel = func("f", (out,), (Axis("i", grid),), lambda b, i: lines.append(body(b, out, i)))
    return kernel, lines[0]


@pytest.mark.parametrize("storing", [False, True])
@pytest.mark.parametrize(("position", "index"), [(3, 5), (-1, -1), (7, 7)])
def test_a_planted_proof_of_bounds_is_found_wrong(storing: bool, position: int, index: int) -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.store(out, b.const(0, (3, 5), F32), whole(3), whole(5))
        lanes = (at(b.const(1)), Lanes("block", ((b.const(position), 1),), 3, 0, proved=True))
        off = b.const(False, (3,), BOOL)  # a proof holds for masked lanes too
        if storing:
            return b.store(out, b.const(0, (3,), F32), *lanes, mask=off)
        b.load(out, *lanes, mask=off)
        return b.count

    message = fault(OutOfBoundsError, *kernel_of(body, (3, 5), 1))
    for part in ("dim 1 of out", "0 <= index < 5", f"index={index}"):
        assert part in message


def test_an_element_that_nobody_stores() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.store(out, b.const(0, (), F32), at(i), at(b.const(0)))
        return 1000  # of the kernel: there is no access to blame

    message = fault(UnwrittenError, *kernel_of(body, (4, 2)))
    assert "out[0, 1] is never stored" in message and "4 of 8 elements" in message


def test_a_load_of_what_nobody_stores() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.store(out, b.load(out, at(i)), at(i, const=99))
        return b.count - 1

    assert "out[0] is loaded and never stored" in fault(UnwrittenError, *kernel_of(body))


def test_a_load_before_the_programs_own_store() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.store(out, b.load(out, at(i)), at(i))
        return b.count - 1

    assert "out[0] is loaded before it is stored" in fault(UnwrittenError, *kernel_of(body))


def test_masked_lanes_are_not_loaded() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        none = b.const(False, (), BOOL)
        b.store(out, b.load(out, at(i), mask=none), at(i))
        return 0

    np.testing.assert_array_equal(run(kernel_of(body)[0]), np.zeros(4))


def test_a_program_may_load_and_store_again_its_own_elements() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.store(out, b.const(2, (), F32), at(i))
        b.store(out, b.ew("add", b.load(out, at(i)), b.const(1, (), F32)), at(i))
        return 0

    np.testing.assert_array_equal(run(kernel_of(body)[0], orders=4), np.full(4, 3))


@pytest.mark.parametrize("shift", [1, -1])
def test_two_programs_store_one_element(shift: int) -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        line = b.store(out, b.const(0, (), F32), at(i))
        last = b.store(out, b.const(0, (), F32), at(i, const=shift))
        return last if shift == -1 else line

    message = fault(WriteConflictError, *kernel_of(body))
    assert "two programs store out[" in message


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("store_first", [False, True])
def test_a_load_of_what_another_program_stores(shift: int, store_first: bool) -> None:
    """In natural order the neighbour stores later for shift = 1, earlier for -1."""

    def body(b: Source, out: Value, i: Value) -> int:
        if store_first:
            b.store(out, b.const(0, (), F32), at(i))
        b.load(out, at(i, const=shift))
        line = b.count
        if not store_first:
            b.store(out, b.const(0, (), F32), at(i))
        return line

    message = fault(OrderDependenceError, *kernel_of(body), orders=1)
    assert "loads out[" in message and "which another program stores" in message


def test_a_load_between_two_stores_by_others_is_the_readers_fault() -> None:
    """Program 0 loads out[3], which program 3 loads too before it stores it: an order, not a missing store."""

    def body(b: Source, out: Value, i: Value) -> int:
        b.load(out, at(b.const(3)))
        line = b.count
        b.store(out, b.const(0, (), F32), at(i))
        return line

    fault(OrderDependenceError, *kernel_of(body))


@record(eq=False, kw_only=True)
class Spy(Op):
    """Calls a Python function on its operand."""

    name: ClassVar[str] = "spy"
    see: Callable[[Array], Array]

    def infer(self) -> tuple[TileType, ...]:
        return self.tiles(1)

    def evaluate(self, *operands: Array) -> Array:
        return self.see(*operands)


@pytest.mark.parametrize("order", [1, 2])
def test_results_that_differ_between_orders(order: int) -> None:
    calls: list[Array] = []

    def body(b: Source, out: Value, i: Value) -> int:
        x = b.op(Spy, b.const(1, (), F32), see=lambda x: x * (-0.0 if calls.append(x) or len(calls) > 4 else 0.0))
        b.store(out, x, at(i))
        return 1000

    kernel, line = kernel_of(body)
    if order == 1:
        np.testing.assert_array_equal(run(kernel, orders=1), np.zeros(4))
    else:
        assert "%out depends on the order" in fault(OrderDependenceError, kernel, line)


def test_the_orders_are_shuffled_by_the_seed() -> None:
    def seen(**options: int) -> list[list[int]]:
        calls: list[int] = []

        def body(b: Source, i: Value) -> None:
            b.store(out, b.op(Spy, i, see=lambda x: calls.append(int(x)) or x), at(i))

        run(func("f", (out,), (Axis("i", 9),), body), **options)
        return [calls[n : n + 9] for n in range(0, len(calls), 9)]

    out = ref("out", (9,), "out", I32)
    natural = list(range(9))
    assert seen(orders=1) == [natural]
    first, second, third = seen(orders=3)
    assert first == natural and sorted(second) == sorted(third) == natural
    assert natural != second != third != natural
    assert seen(orders=3) == [first, second, third] != seen(orders=3, seed=1)


@pytest.mark.parametrize("name", DTYPES)
def test_poison(name: str) -> None:
    found: list[Array] = []
    out = ref("out", (2,), "out", DTYPES[name])

    def body(b: Source) -> None:
        b.op(Spy, b.load(out, whole(2)), see=lambda x: found.append(x) or x)

    with pytest.raises(UnwrittenError):
        interpret(func("f", (out,), (), body))
    (x,) = found
    if kind_of(x.dtype) == "float":
        assert np.isnan(x).all()
    else:
        assert (x != 0).all() and (name == "bool" or set(x.tobytes()) == {0xA5})


def test_an_evaluation_of_the_wrong_type_is_a_bug() -> None:
    def body(b: Source, out: Value, i: Value) -> int:
        b.op(Spy, b.const(0, (), F32), see=lambda x: x.astype(np.float64))
        return 0

    with pytest.raises(AssertionError, match=r"spy evaluates to f64\[\], its type is f32\[\]"):
        interpret(kernel_of(body)[0])


# --- arguments -------------------------------------------------------------------------------------------------------

X = np.zeros(6, np.float32)


@pytest.mark.parametrize(
    ("arrays", "expected", "got"),
    [
        ((), "(x)", "0 arrays"),
        ((X, X), "(x)", "2 arrays"),
        ((X[:5],), "f32[6]", "x=f32[5]"),
        ((X[:, None],), "f32[6]", "x=f32[6, 1]"),
        ((X.astype(np.float64),), "f32[6]", "x=f64[6]"),
    ],
)
def test_arguments_are_checked(arrays: tuple[Array, ...], expected: str, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        interpret(switched(), *arrays)
    assert (caught.value.expected, caught.value.got) == (expected, got)
    assert "takes 1 arrays" in caught.value.summary or "an argument of switched" in caught.value.summary
    assert caught.value.loc.file == __file__, "the caller's line"


def test_arguments_are_left_as_they_were_and_may_be_strided() -> None:
    x = np.arange(12, dtype=np.float32)[::-2]
    before = x.copy()
    expected = [-before[0], -before[1], 2 * before[2], *before[3:]]
    np.testing.assert_array_equal(run(switched(), x), expected)
    np.testing.assert_array_equal(x, before)


def test_several_outputs_come_in_the_order_of_the_params() -> None:
    first, second = ref("a", (2,), "out"), ref("b", (3,), "out", I32)

    def body(b: Source) -> None:
        b.store(second, b.one(Broadcast(operands=(b.const(7),), shape=(3,), dims=())), whole(3))
        b.store(first, b.const(1, (2,), F32), whole(2))

    a, b = interpret(func("f", (first, second), (), body))
    assert a.tolist() == [1, 1] and b.tolist() == [7, 7, 7]


def test_tail_lanes_are_ordinary_values() -> None:
    """Out-of-bounds lanes of a load read 0, and are computed on like any other."""
    x, out = ref("x", (3,)), ref("out", (4,), "out")

    def body(b: Source, i: Value) -> None:
        one = b.const(1, (4,), F32)
        b.store(out, b.one(Elementwise(operands=(b.load(x, tile(i, 4)), one), function="add")), tile(i, 4))

    np.testing.assert_array_equal(run(func("f", (x, out), (Axis("i", 4, 4),), body), X[:3]), np.ones(4))


def test_gather_store_of_rows() -> None:
    out = ref("out", (3, 2), "out", I32)

    def body(b: Source, i: Value) -> None:
        rows = b.ew("sub", b.const(2, (1,)), b.one(Broadcast(operands=(i,), shape=(1,), dims=())))
        b.store(out, b.one(Broadcast(operands=(i,), shape=(1, 2), dims=())), gather(rows), whole(2))

    np.testing.assert_array_equal(run(func("f", (out,), (Axis("i", 3),), body)), [[2, 2], [1, 1], [0, 0]])


GATHERED = """
func @f(%x: ref<i32[6], in>, %o: ref<i32[9], zeros>) {
  grid %i in i[6 by 4]
  %one = constant 1 : i32[4]
  %v = load %x[4*%i +: 4] : i32[4]
  atomic %one to %o[gather(%v, 4)] {kind="add"}
}
"""


def test_one_lane_from_outside_of_an_array_is_an_error() -> None:
    """The tile of the second program has two lanes inside of x, and two behind its end."""
    with pytest.raises(OutOfBoundsError, match=r"dim 0 of o .* read outside of an array\n.*\n +got: lane=\[2\]"):
        interpret(parse(GATHERED), np.arange(6, dtype=np.int32))


@pytest.mark.parametrize(
    "index",
    [
        "%p = eq(%v, %zero) : bool[4] %w = select(%p, %lanes, %nowhere) : i32[4]",
        "%p = ne(%v, %zero) : bool[4] %s = select(%p, %v, %nowhere) : i32[4] %w = add(%s, %one) : i32[4]",
    ],
    ids=["data from outside choose a lane", "-1 becomes an index"],
)
def test_a_select_by_data_from_outside_is_an_error(index: str) -> None:
    """Unlike the select of a guard, whose condition compares positions, and whose result is the index itself."""
    constants = "%zero = constant 0 : i32[4] %nowhere = constant -1 : i32[4] %lanes = iota() {dim=0} : i32[4]"
    text = GATHERED.replace("  atomic", f"  {constants} {index}\n  atomic").replace("gather(%v, 4)", "gather(%w, 4)")
    with pytest.raises(OutOfBoundsError, match="read outside of an array"):
        interpret(parse(text), np.arange(6, dtype=np.int32))
