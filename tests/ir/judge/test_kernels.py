"""The same faults in kernels, in each way in which a kernel loads, stores and updates: found at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import marked_line
from tilekern.errors import InterpreterError, OrderDependenceError, UnwrittenError, WriteConflictError

ROWS, COLUMNS = 6, 8
ONES = jnp.ones(COLUMNS)


def store_index(out: tk.Ref, row: Any) -> None:
    out[row] = ONES  # <-


def store_block(out: tk.Ref, row: Any) -> None:
    out[tk.ds(row, 1)] = ONES[None]  # <-


def store_masked(out: tk.Ref, row: Any) -> None:
    out.store(row, ONES, mask=jnp.arange(COLUMNS) > 2)  # <-


def store_in_view(out: tk.Ref, row: Any) -> None:
    view = out.at[row]
    view[2:5] = ONES[:3]  # <-


def store_transposed(out: tk.Ref, row: Any) -> None:
    out.T[:, row] = ONES  # <-


def store_reshaped(out: tk.Ref, row: Any) -> None:
    out.reshape(-1)[tk.ds(row * COLUMNS, COLUMNS)] = ONES  # <-


def store_vector(out: tk.Ref, row: Any) -> None:
    out[row, jnp.array([7, -1, 2, 9])] = ONES[:4]  # <-


def store_points(out: tk.Ref, row: Any) -> None:
    out[tk.points(jnp.full(3, row), jnp.arange(3))] = ONES[:3]  # <-


def store_in_a_loop(out: tk.Ref, row: Any) -> None:
    def step(k: tk.Tile) -> None:
        out[row, k] = jnp.ones(3)  # <-

    tk.foreach(tk.serial(COLUMNS, 3), step)


def store_under_a_condition(out: tk.Ref, row: Any) -> None:
    @tk.when(row >= 0)
    def _() -> None:
        out[row] = ONES  # <-


def add(out: tk.Ref, row: Any) -> None:
    out.at[row].add(ONES, ordered=False)  # <-


def add_masked(out: tk.Ref, row: Any) -> None:
    out.at[row].add(ONES, mask=jnp.arange(COLUMNS) > 2, ordered=False)  # <-


def add_vector(out: tk.Ref, row: Any) -> None:
    out.at[row, jnp.array([7, -1, 2, 9])].add(ONES[:4], ordered=False)  # <-


def add_points(out: tk.Ref, row: Any) -> None:
    out.at[tk.points(jnp.full(3, row), jnp.arange(3))].add(ONES[:3], ordered=False)  # <-


def maximum(out: tk.Ref, row: Any) -> None:
    out.at[row].max(ONES)  # <-


def minimum_in_a_loop(out: tk.Ref, row: Any) -> None:
    tk.foreach(tk.serial(COLUMNS, 3), lambda k: out.at[row, k].min(jnp.ones(3)))  # <-


def load_index(out: tk.Ref, row: Any) -> jax.Array:
    return out[row]  # <-


def load_block(out: tk.Ref, row: Any) -> jax.Array:
    return out[tk.ds(row, 1)]  # <-


def load_masked(out: tk.Ref, row: Any) -> jax.Array:
    return out.load(row, mask=jnp.arange(COLUMNS) > 2, fill=3)  # <-


def load_reshaped(out: tk.Ref, row: Any) -> jax.Array:
    return out.reshape(-1)[tk.ds(row * COLUMNS, COLUMNS)]  # <-


def load_vector(out: tk.Ref, row: Any) -> jax.Array:
    return out[row, jnp.array([7, -1, 2, 9])]  # <-


def load_points(out: tk.Ref, row: Any) -> jax.Array:
    return out[tk.points(jnp.full(3, row), jnp.arange(3))]  # <-


def load_in_a_loop(out: tk.Ref, row: Any) -> jax.Array:
    def step(k: tk.Tile, total: jax.Array) -> jax.Array:
        return total + out[row, k].sum()  # <-

    return tk.fold(tk.serial(COLUMNS, 3), step, jnp.float32(0))


STORES = (store_index, store_block, store_masked, store_in_view, store_transposed, store_reshaped, store_vector)
STORES += (store_points, store_in_a_loop, store_under_a_condition)
UPDATES = (add, add_masked, add_vector, add_points, maximum, minimum_in_a_loop)
LOADS = (load_index, load_block, load_masked, load_reshaped, load_vector, load_points, load_in_a_loop)

type Way = Callable[[tk.Ref, Any], Any]


def keep(value: Any, seen: tk.Ref, i: Any) -> None:
    """Store what depends on a load, which would be dropped otherwise."""
    seen[i] = jnp.sum(value)


def two_programs_store(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    keep(0.0, seen, i)
    way(out, 0)


def updates_after_a_store(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    keep(0.0, seen, i)
    out[i] = ONES
    way(out, i)


def loads_what_is_stored_later(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    keep(way(out, i + 1), seen, i)
    out[i] = ONES


def loads_what_was_stored_before(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    out[i] = ONES
    keep(way(out, i - 1), seen, i)


def loads_what_is_updated(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    out.at[i].min(ONES)
    keep(way(out, i), seen, i)


def updates_what_was_loaded(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    keep(out[i], seen, i)
    way(out, i)


def loads_what_nobody_stores(out: tk.Ref, seen: tk.Ref, i: Any, way: Way) -> None:
    out[i] = ONES
    keep(way(out, ROWS - 1), seen, i)


FAULTS: dict[Any, tuple[type[InterpreterError], bool, tuple[Way, ...]]] = {
    two_programs_store: (WriteConflictError, False, STORES),
    updates_after_a_store: (WriteConflictError, True, UPDATES),
    loads_what_is_stored_later: (OrderDependenceError, True, LOADS),
    loads_what_was_stored_before: (OrderDependenceError, False, LOADS),
    loads_what_is_updated: (OrderDependenceError, True, LOADS),
    updates_what_was_loaded: (OrderDependenceError, True, UPDATES),
    loads_what_nobody_stores: (UnwrittenError, False, LOADS),
}
CASES = [(fault, way) for fault, (_, _, ways) in FAULTS.items() for way in ways]


@pytest.mark.parametrize(("fault", "way"), CASES, ids=lambda x: x.__name__)
def test_a_fault_of_a_kernel_is_found_at_its_line(monkeypatch: pytest.MonkeyPatch, fault: Any, way: Way) -> None:
    monkeypatch.setattr("tilekern.lang.trace.check_coverage", lambda func: None)  # what remains for the interpreter
    error, zeros, _ = FAULTS[fault]
    whole = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)

    @tk.kernel(out_type=lambda: (tk.Zeros(whole) if zeros else whole, jax.ShapeDtypeStruct((ROWS - 1,), jnp.float32)))
    def f(out, seen):
        fault(out, seen, tk.parallel(ROWS - 1), way)

    with pytest.raises(InterpreterError) as caught:
        tk.interpret(f.trace())()
    place = caught.value.loc
    assert (type(caught.value), place.file, place.line) == (error, __file__, marked_line(way.__code__)), caught.value


def test_lanes_of_a_tail_update_nothing() -> None:
    """Every way to write through a vector that is loaded with a tail, which is no index."""

    @tk.kernel(out_type=lambda x: tk.Zeros(jax.ShapeDtypeStruct((4, ROWS), jnp.float32)))
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        rows = x[i]
        out[0, rows] = jnp.ones(4)
        out.at[1, rows].add(jnp.ones(4), ordered=False)
        out[tk.points(jnp.full(4, 2), rows)] = jnp.ones(4)
        out.at[3].store(rows, jnp.ones(4), mask=jnp.ones(4, bool))

    found = tk.interpret(f.trace(jnp.arange(1, ROWS)))(jnp.arange(1, ROWS))
    assert (found == [[0] + [1] * (ROWS - 1)] * 4).all()
