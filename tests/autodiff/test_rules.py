"""The rules of pure ops: tangents against those of JAX, and each linear op against its transposition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ir.funcs import assert_near
from tilekern.autodiff.cotangents import cotangents
from tilekern.autodiff.elementwise import ROWS
from tilekern.autodiff.tangents import FLAT, RULES, tangents, wide
from tilekern.errors import NotDifferentiableError
from tilekern.ir.compute import Bitcast, Convert, Dot, Reduce, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.parse import OPS
from tilekern.ir.shape import Broadcast, Concatenate, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, DTYPES, F16, F32, F64, I32, TileType, accumulator, dtype_name, kind_of
from tilekern.ir.verify import verify
from tilekern.source import Loc
from tilekern.testing.support import Sketch

INF, NAN = math.inf, math.nan
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Derived:
    """Arrays that the rules of one op give: its result, the tangent of that, and cotangents of the operands."""

    result: Array
    tangent: Array | None
    cotangents: list[Array | None]


def derive(kind: type[Op], arrays: Sequence[Array], moving: Sequence[Array | None], **fields: Any) -> Derived:
    """The tangent of an op, and its transposition on a cotangent that is all of random numbers."""
    sketch = Sketch()
    inputs = [*arrays, *(t for t in moving if t is not None)]
    state: dict[str, Any] = {}

    def body() -> list[Value]:
        known = [sketch.tile(x.dtype, x.shape) for x in arrays]
        given = [None if t is None else sketch.tile(t.dtype, t.shape) for t in moving]
        op = kind(operands=tuple(known), loc=Loc("kernel.py", 7), **fields)
        before = [*sketch._ops, op]
        sketch.add(op)
        (tangent,) = tangents(op, known, op.results, given, Make(sketch, op))
        state["zero"] = tangent is None
        if tangent is None:
            return [op.result]
        assert tangent.type == wide(op.result.tile), tangent.type
        weights = weights_of(tangent.tile)
        cotangent = sketch.tile(weights.dtype, weights.shape)
        inputs.append(weights)
        emitted = [o for o in sketch._ops if o not in before]
        found = pull(sketch, emitted, [g for g in given if g is not None], tangent, cotangent)
        state["moved"] = [None if g is None else found.get(g) for g in given]
        return [op.result, tangent, *(c for c in state["moved"] if c is not None)]

    func = sketch.func("f", body)
    verify(func)
    outputs = list(interpret(func, *inputs))
    result, tangent = outputs.pop(0), None if state["zero"] else outputs.pop(0)
    moved = [None if c is None else outputs.pop(0) for c in state.get("moved", [])]
    return Derived(result, tangent, moved)


def weights_of(tile: TileType) -> Array:
    """The cotangent that `derive` pulls back."""
    return np.random.default_rng(5).standard_normal(tile.shape).astype(tile.dtype)


def pull(sketch: Sketch, ops: Sequence[Op], moving: Sequence[Value], result: Value, c: Value) -> dict[Value, Value]:
    """Cotangents of values of straight-line code, by the transposition of each op that depends on `moving`."""
    linear, found = set(moving), {result: c}
    for op in ops:
        if not linear.isdisjoint(op.operands):
            linear.update(op.results)
    defined = {r: op for op in sketch._ops for r in op.results}
    for op in reversed(ops):
        if op.result not in linear or op.result not in found:
            continue
        which = [v in linear for v in op.operands]
        known = [None if is_linear else v for v, is_linear in zip(op.operands, which, strict=True)]
        make = Make(sketch, op)
        parts = cotangents(op, known, which, found[op.result], make, defined.get)
        assert [part is not None for part in parts] == which
        for value, part in zip(op.operands, parts, strict=True):
            if part is not None:
                assert part.type == wide(value.tile), (op.name, part.type, value.type)
                found[value] = make.of("add", found[value], part) if value in found else part
    return found


def check_transposition(derived: Derived, moving: Sequence[Array | None]) -> None:
    """⟨Jv, w⟩ = ⟨v, Jᵀw⟩."""
    tangent = derived.tangent
    assert tangent is not None
    w = weights_of(TileType(tangent.shape, tangent.dtype))
    pairs = [(t, c) for t, c in zip(moving, derived.cotangents, strict=True) if t is not None and c is not None]
    left = np.sum(tangent * w)
    right = sum(np.sum(t * c) for t, c in pairs)
    size = np.sum(np.abs(tangent * w)) + sum(np.sum(np.abs(t * c)) for t, c in pairs)
    assert_near(np.asarray(right), np.asarray(left), float(size))


def against_jax(
    kind: type[Op], function: Callable[..., Any], arrays: Sequence[Array], least: float = 0, /, **fields: Any
) -> None:
    """Compare tangents with those of JAX in float64, of each float operand alone and of all, and transpose them."""
    rng = np.random.default_rng(3)
    floats = [n for n, x in enumerate(arrays) if kind_of(x.dtype) == "float"]
    given = {n: rng.standard_normal(arrays[n].shape) for n in floats}
    expected: dict[int, Array] = {}
    for n in floats:
        with jax.enable_x64(True):

            def of_one(x: Any, n: int = n) -> Any:
                return function(*(x if m == n else other for m, other in enumerate(arrays)))

            expected[n] = np.asarray(jax.jvp(of_one, [arrays[n]], [given[n]])[1])
    for moved in {(n,) for n in floats} | {tuple(floats)}:
        moving = [given[n] if n in moved else None for n in range(len(arrays))]
        derived = derive(kind, arrays, moving, **fields)
        with np.errstate(invalid="ignore"):
            total = sum(expected[n] for n in moved)
        if derived.tangent is None:
            assert not np.any(total)
            continue
        assert_near(derived.tangent, np.asarray(total), least)
        if np.isfinite(derived.tangent).all():
            check_transposition(derived, moving)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


# --- decisions -------------------------------------------------------------------------------------------------------


def test_every_class_of_op_is_decided() -> None:
    pure = {kind for kind in OPS.values() if kind.pure}
    assert set(RULES) | set(FLAT) == pure
    assert set(RULES).isdisjoint(FLAT)


def test_every_function_of_floats_is_decided() -> None:
    floats = {name for name, row in TABLE.items() if "float" in row.accepts}
    assert floats - set(ROWS) == {"lgamma"}
    assert all(len(ROWS[name]) == TABLE[name].arity for name in ROWS)


def test_a_function_without_a_rule_is_an_error_at_its_line() -> None:
    x = np.ones(3)
    with pytest.raises(NotDifferentiableError, match="lgamma has no derivative rule") as error:
        derive(Elementwise, [x], [x], function="lgamma")
    assert error.value.loc.line == 7
    assert "stop_gradient" in str(error.value)
    assert derive(Elementwise, [x], [None], function="lgamma").tangent is None


@pytest.mark.parametrize(
    "kind, fields",
    [
        (Bitcast, {"dtype": np.dtype(np.uint64)}),
        (Convert, {"dtype": I32}),
        (ArgReduce, {"extreme": "max", "dim": 0}),
        (TopK, {"dim": 0, "k": 2}),
        *((Elementwise, {"function": f}) for f in ("sign", "floor", "ceil", "round_even", "round_away", "is_finite")),
    ],
)
def test_the_tangent_of_a_step_is_zero(kind: type[Op], fields: dict[str, Any]) -> None:
    x = normal(4)
    assert derive(kind, [x], [x], **fields).tangent is None


@pytest.mark.parametrize("function", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_the_tangent_of_a_comparison_is_zero(function: str) -> None:
    assert derive(Elementwise, [normal(4), normal(4)], [normal(4), normal(4)], function=function).tangent is None


# --- elementwise -----------------------------------------------------------------------------------------------------

_ANY = np.array([0.0, -0.0, 1.0, -1.0, 0.3, -0.7, 2.5, -3.25, 17.0, -20.0, INF, -INF, NAN])
_EDGES = {"tan": _ANY[:10], "sin": _ANY[:10], "cos": _ANY[:10], "sinh": _ANY[:10], "cosh": _ANY[:10]}
_INSIDE = np.array([0.2, 0.5, 0.9])
_DOMAIN = {"acosh": 1 + _INSIDE}
_LARGE = np.array([1e-300, 1e154, 1e200, -1e300])


@pytest.mark.sweep(1)  # each function has a rule of its own
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if any(row) and len(row) == 1])
def test_functions_of_one_operand(name: str) -> None:
    x = _EDGES.get(name, _ANY)
    x = np.concatenate([x, _LARGE]) if name == "asinh" else x
    function = getattr(lax, TABLE[name].lax)
    against_jax(Elementwise, function, [x], 1.0, function=name)
    against_jax(Elementwise, function, [_DOMAIN.get(name, _INSIDE)], 1.0, function=name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if any(row) and len(row) == 2])
def test_functions_of_two_operands(name: str) -> None:
    numbers = np.array([0.0, 1.0, -1.0, 0.3, -0.7, 2.0, 5.5, -3.0])
    numbers = np.append(numbers, [INF, -INF, NAN]) if name in ("add", "sub", "max", "min") else numbers
    x, y = (v.ravel() for v in np.meshgrid(numbers, numbers))
    if name == "pow":  # JAX has NaN for the derivative of 0^y at y = 0, and 0 if y is an integer: the latter is ours
        keep = (x != 0) | (y != 0)
        x, y = x[keep], y[keep]
    against_jax(Elementwise, getattr(lax, name), [x, y], 10.0, function=name)
    against_jax(Elementwise, getattr(lax, name), [np.abs(normal(5)), normal(5, seed=1)], 10.0, function=name)


def test_a_power_with_exponent_0_is_constant_at_0() -> None:
    x, y = np.zeros(1), np.zeros(1)
    assert derive(Elementwise, [x, y], [np.ones(1), None], function="pow").tangent == 0


@pytest.mark.parametrize("dtype", [BF16, F16, F32, DTYPES["f8e5m2"]], ids=dtype_name)
def test_factors_of_narrow_floats_are_wide(dtype: Any) -> None:
    x = normal(64).astype(dtype)
    derived = derive(Elementwise, [x], [np.ones(64, np.float32)], function="tanh")
    assert derived.result.dtype == dtype and derived.tangent is not None and derived.tangent.dtype == F32
    assert_near(derived.tangent, (1 - np.tanh(x.astype(F64)) ** 2), 1.0)


# --- compute ---------------------------------------------------------------------------------------------------------


def test_select() -> None:
    which = np.array([True, False, True])
    against_jax(Select, jnp.where, [which, normal(3), normal(3, seed=1)])


@pytest.mark.parametrize("source, target", [(F32, BF16), (BF16, F32), (F32, F64), (F64, F16)])
def test_convert(source: Any, target: Any) -> None:
    x = normal(5).astype(source)
    moving = [normal(5, seed=1).astype(accumulator(source))]
    derived = derive(Convert, [x], moving, dtype=target)
    assert derived.tangent is not None and derived.tangent.dtype == accumulator(target)
    np.testing.assert_array_equal(derived.tangent, moving[0].astype(accumulator(target)))
    weights = weights_of(TileType((5,), derived.tangent.dtype))
    np.testing.assert_array_equal(derived.cotangents[0], weights.astype(accumulator(source)))


_DOTS: list[tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = [
    ((3, 4), (4, 5), ((1,), (0,)), ((), ())),
    ((4, 3), (5, 4), ((0,), (1,)), ((), ())),
    ((2, 3, 4), (4, 2, 5), ((2,), (0,)), ((0,), (1,))),
    ((6, 2, 3, 7), (3, 5, 7, 6), ((2, 0), (0, 3)), ((3,), (2,))),
    ((3,), (3,), ((0,), (0,)), ((), ())),
    ((3,), (2,), ((), ()), ((), ())),
]


@pytest.mark.parametrize("left, right, contract, batch", _DOTS)
def test_dot(left: tuple[int, ...], right: tuple[int, ...], contract: Any, batch: Any) -> None:
    def function(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (contract, batch))

    against_jax(Dot, function, [normal(*left), normal(*right, seed=1)], 50.0, contract=contract, batch=batch)


@pytest.mark.parametrize("dtype, factor", [(BF16, BF16), (F16, F16), (DTYPES["f8e4m3fn"], BF16), (F32, F32)])
def test_dots_of_tangents_have_the_dtype_of_the_other_operand(dtype: Any, factor: Any) -> None:
    sketch = Sketch()
    x, y = (sketch.tile(dtype, (4, 4)) for _ in range(2))
    tangent = sketch.tile(F32, (4, 4))
    op = Dot(operands=(x, y), contract=((1,), (0,)), precision="tf32")
    start = len(sketch._ops)
    (result,) = tangents(op, op.operands, op.results, [tangent, None], Make(sketch, op))
    assert result is not None and result.type == TileType((4, 4), F32)
    cotangents(op, [None, y], [True, False], tangent, Make(sketch, op), lambda _: None)
    dots = [o for o in sketch._ops[start:] if isinstance(o, Dot)]
    assert [(o.operands[0].tile.dtype, o.precision) for o in dots] == [(factor, "tf32")] * 2


_REDUCTIONS = [((3, 4), (1,)), ((2, 3, 2), (0, 2)), ((5,), (0,)), ((2, 3), ()), ((1, 4), (0,))]


@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("shape, dims", _REDUCTIONS)
def test_reduce(monoid: Any, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    function = getattr(jnp, monoid)
    tied = np.random.default_rng(1).integers(-1, 2, shape).astype(np.float64)  # with zeros and ties
    for x in (normal(*shape), tied, np.zeros(shape)):
        against_jax(Reduce, lambda x: function(x, axis=dims), [x], 10.0, monoid=monoid, dims=dims)


# --- movement --------------------------------------------------------------------------------------------------------

_MOVES: list[tuple[type[Op], Callable[..., Any], list[Array], dict[str, Any]]] = [
    (
        Broadcast,
        lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)),
        [normal(1, 4)],
        {"shape": (2, 3, 4), "dims": (0, 2)},
    ),
    (Broadcast, lambda x: lax.broadcast_in_dim(x, (1, 3), (1,)), [normal(3)], {"shape": (1, 3), "dims": (1,)}),
    (Broadcast, lambda x: lax.broadcast_in_dim(x, (3,), ()), [normal()], {"shape": (3,), "dims": ()}),
    (Reshape, lambda x: x.reshape(3, 4), [normal(2, 6)], {"shape": (3, 4)}),
    (Transpose, lambda x: x.transpose(2, 0, 1), [normal(2, 3, 4)], {"permutation": (2, 0, 1)}),
    (Reverse, lambda x: lax.rev(x, (1,)), [normal(2, 3)], {"dims": (1,)}),
    (Slice, lambda x: x[1:7:3, 0:2], [normal(8, 3)], {"start": (1, 0), "stop": (7, 2), "stride": (3, 1)}),
    (Slice, lambda x: x[::2], [normal(7)], {"start": (0,), "stop": (7,), "stride": (2,)}),
    (
        Concatenate,
        lambda *xs: lax.concatenate(xs, 1),
        [normal(2, 3), normal(2, 0), normal(2, 1, seed=1)],
        {"dim": 1},
    ),
    *(
        (
            Pad,
            lambda x, v, config=config: lax.pad(x, v, config),
            [normal(4, 5), normal()],
            dict(zip(("low", "high", "interior"), map(tuple, zip(*config, strict=True)), strict=True)),
        )
        for config in (
            [(1, 2, 0), (0, 0, 1)],
            [(-1, 2, 1), (2, -3, 2)],
            [(-1, -1, 0), (0, -1, 0)],
            [(0, 0, 3), (-2, 4, 0)],
        )
    ),
]


@pytest.mark.parametrize("kind, function, arrays, fields", _MOVES)
def test_movement_to_fixed_places(kind: Any, function: Any, arrays: list[Array], fields: dict[str, Any]) -> None:
    against_jax(kind, function, arrays, 20.0, **fields)


def test_an_empty_slice_is_transposed_to_zeros() -> None:
    derived = derive(Slice, [normal(4)], [normal(4)], start=(2,), stop=(2,), stride=(3,))
    np.testing.assert_array_equal(derived.cotangents[0], np.zeros(4))


_STARTS = [np.asarray(n, np.int32) for n in (-3, 2, 9)]


@pytest.mark.parametrize("start", _STARTS)
def test_dynamic_slices(start: Array) -> None:
    x, part, zero = normal(6, 3), normal(2, 3, seed=1), np.asarray(0, np.int32)

    def at(x: Any) -> tuple[Any, ...]:
        return (np.clip(start, 0, 4), zero)

    against_jax(DynamicSlice, lambda x, *_: lax.dynamic_slice(x, at(x), (2, 3)), [x, start, zero], sizes=(2, 3))
    against_jax(
        DynamicUpdateSlice,
        lambda x, y, *_: lax.dynamic_update_slice(x, y, at(x)),
        [x, part, start, zero],
    )


@pytest.mark.parametrize(
    "shape, indices, dim",
    [
        ((5,), [1, 1, 4, -7, 99], 0),
        ((3, 4), [[1, 1, 3], [0, 2, 2]], 1),
        ((3, 4, 2), [2, 2, 0], 0),
        ((3, 4, 2), 3, 1),
        ((4,), -1, 0),
    ],
)
def test_take_from_a_table(shape: tuple[int, ...], indices: Any, dim: int) -> None:
    places = np.asarray(indices, np.int32)
    clamped = np.clip(places, 0, shape[dim] - 1)
    against_jax(Take, lambda x, _: jnp.take(x, clamped, axis=dim), [normal(*shape), places], 10.0, dim=dim)


@pytest.mark.parametrize(
    "shape, picked, dim", [((4, 3), (5, 3), 0), ((3, 4), (3, 1), 1), ((3, 4), (3, 4), 1), ((2, 5), (2, 0), 1)]
)
def test_take_along_a_dim(shape: tuple[int, ...], picked: tuple[int, ...], dim: int) -> None:
    places = np.random.default_rng(2).integers(-1, shape[dim] + 1, picked).astype(np.int32)
    clamped = np.clip(places, 0, shape[dim] - 1)
    function = lambda x, _: jnp.take_along_axis(x, clamped, dim)  # noqa: E731 -- an argument
    against_jax(Take, function, [normal(*shape), places], 10.0, dim=dim, along=True)


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "monoid, function", [(m, getattr(lax, f"cum{m}")) for m in ("sum", "prod", "max", "min", "logsumexp")]
)
@pytest.mark.parametrize("size, reverse", [(0, False), (1, False), (2, True), (8, False), (13, True)])
def test_scan(monoid: Any, function: Any, size: int, reverse: bool) -> None:
    tied = np.random.default_rng(1).integers(-1, 2, (3, size)).astype(np.float64)
    x = np.concatenate([normal(3, size), tied])
    fields = {"monoid": monoid, "dim": 1, "reverse": reverse}
    against_jax(Scan, lambda x: function(x, axis=1, reverse=reverse), [x], 10.0, **fields)


@pytest.mark.parametrize("size, reverse", [(0, False), (1, False), (2, True), (8, False), (13, True)])
def test_linear_scan(size: int, reverse: bool) -> None:
    factors, terms = normal(3, size), normal(3, size, seed=1)
    factors[:, size // 2 :: 4] = 0

    def function(a: Any, b: Any) -> Any:
        after = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])  # noqa: E731 -- an argument
        return lax.associative_scan(after, (a, b), axis=1, reverse=reverse)[1]

    against_jax(LinearScan, function, [factors, terms], 10.0, dim=1, reverse=reverse)


@pytest.mark.parametrize("dim", [0, 1])
def test_sort(dim: int) -> None:
    x = np.random.default_rng(1).integers(0, 3, (5, 6)).astype(np.float64)
    against_jax(Sort, lambda x: lax.sort(x, dimension=dim), [x], dim=dim)
    keys, picked = np.random.default_rng(2).integers(0, 3, (5, 6)).astype(np.int32), normal(5, 6)
    against_jax(
        Sort, lambda k, x: lax.sort((k, x), dimension=dim, num_keys=1)[1], [keys, picked], dim=dim, num_keys=1, pick=1
    )


def test_a_sort_is_transposed_by_sorting_back() -> None:
    sketch = Sketch()
    x, tangent = sketch.tile(F32), sketch.tile(F32)
    op = Sort(operands=(x,), dim=1)
    (moved,) = tangents(op, op.operands, op.results, [tangent], Make(sketch, op))
    take = sketch._ops[-1]
    assert isinstance(take, Take) and take.result is moved
    start = len(sketch._ops)
    defined = {r: o for o in sketch._ops for r in o.results}
    cotangents(take, [None, take.operands[1]], [True, False], tangent, Make(sketch, op), defined.get)
    assert [type(o) for o in sketch._ops[start:]] == [Sort]
