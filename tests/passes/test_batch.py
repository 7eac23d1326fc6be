"""The batch as a parallel axis: golden text, and the interpreter before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import EXAMPLES, assert_same
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import I32, kind_of
from tilekern.ir.verify import verify
from tilekern.passes import pipeline
from tilekern.passes.batch import batch, places

BEFORE = """
func @f(%x: ref<f32[20, 6], in>, %rows: ref<i32[8], in>, %state: ref<f32[6], inout>,
        %out: ref<f32[8, 6], out>, %count: ref<i32[], sum>) {
  grid %i in i[8 by 4]
  %which = load %rows[4*%i +: 4!] : i32[4]
  %fill = constant 1.0 : f32[]
  %mask = constant true : bool[4, 6]
  %a = load %x[gather(%which, 4), 0 +: 6!] mask %mask fill %fill : f32[4, 6]
  store %a to %out[4*%i +: 4!, 0 +: 6!]
  %zero = constant 0 : i32[]
  %three = constant 3 : i32[]
  fold %k in k[6 by 1] from %zero to %three do {
    %s = load %state[%k!] : f32[]
    store %s to %state[%k!]
  }
  atomic %three to %count[] {kind="add"}
}
"""
AFTER = """
func @f(%x: ref<f32[20, 6], in>, %rows: ref<i32[8, 3], in>, %state: ref<f32[3, 6], inout>,
        %out: ref<f32[3, 8, 6], out>, %count: ref<i32[3], sum>) {
  grid %batch in batch[3 by 1], %i in i[8 by 4]
  %which = load %rows[4*%i +: 4!, %batch!] : i32[4]
  %fill = constant 1.0 : f32[]
  %mask = constant true : bool[4, 6]
  %a = load %x[gather(%which, 4), 0 +: 6!] mask %mask fill %fill : f32[4, 6]
  store %a to %out[%batch!, 4*%i +: 4!, 0 +: 6!]
  %zero = constant 0 : i32[]
  %three = constant 3 : i32[]
  fold %k in k[6 by 1] from %zero to %three do {
    %s = load %state[%batch!, %k!] : f32[]
    store %s to %state[%batch!, %k!]
  }
  atomic %three to %count[%batch!] {kind="add"}
}
"""


def test_every_access_of_a_stacked_array_gets_the_index_of_the_batch() -> None:
    func = batch(parse(BEFORE), 3, [None, 1, 0])
    verify(func)
    assert to_text(func) == to_text(parse(AFTER))


def test_twice() -> None:
    func = batch(batch(parse(BEFORE), 3, [None, 1, 0]), 2, [0, None, 0])
    verify(func)
    assert [str(p.ref) for p in func.params] == [
        "ref<f32[2, 20, 6], in>",
        "ref<i32[8, 3], in>",
        "ref<f32[2, 3, 6], inout>",
        "ref<f32[2, 3, 8, 6], out>",
        "ref<i32[2, 3], sum>",
    ]
    assert func.grid == (2, 3, 2)
    assert to_text(parse(to_text(func))) == to_text(func)


# --- any Func is run once for each slice -----------------------------------------------------------------------------


@tk.kernel(
    out_type=lambda x, order, state: (
        x,
        tk.Zeros(jax.ShapeDtypeStruct((4,), np.int32)),
        tk.Sum(jax.ShapeDtypeStruct((), np.float32)),
    ),
    donate=("state",),
)
def every_role(x, order, state, out, seen, total):
    """Loops with bounds from data, branches, views, updates, and what the body closes over."""
    i = tk.parallel(x.shape[0], 2)
    stop = tk.hoist(lambda: order[i.index])
    tile = tk.fold(tk.serial(x.shape[1], stop=stop), lambda k, acc: acc + x[i, k], jnp.zeros(2))
    out[i] = tile[:, None] + TABLE[: x.shape[1]] * x.load(i, fill=jnp.float32(order[0]))

    @tk.when(stop > 1)
    def _():
        row = state.at[i.index]
        row[...] = row[...] + 1

    seen.at[order[i]].add(1)
    total.at[()].add(jnp.where(i.valid[:, None], x[i], 0).sum())


TABLE = np.arange(4, dtype=np.float32)
ROLES = every_role.trace(np.zeros((5, 3), np.float32), np.zeros(5, np.int32), np.zeros((3, 2), np.float32)).ir
FUNCS: dict[str, Func] = {name: make() for name, make in EXAMPLES.items()} | {"every_role": ROLES}


def values(func: Func, sizes: Sequence[int | None], dims: Sequence[int | None], seed: int) -> list[np.ndarray]:
    """Small whole numbers for each input, stacked where `dims` says so."""
    random, found = np.random.default_rng(seed), list[Any]()
    for param, size, dim in zip(func.inputs, sizes, dims, strict=True):
        shape = list(param.ref.shape)
        if dim is not None:
            shape.insert(dim, size or 0)
        low = 0 if kind_of(param.ref.dtype) in ("unsigned", "bool") else -2
        found.append(random.integers(low, 4, shape).astype(param.ref.dtype))
    return found


@pytest.mark.parametrize("name", FUNCS)
def test_a_batched_func_runs_once_for_each_slice(name: str) -> None:
    func = FUNCS[name]

    @settings(max_examples=4 if name == "matmul" else 10)
    @given(st.data(), st.sampled_from([0, 1, 3]), st.booleans(), st.integers(0, 99))
    def property(data: st.DataObject, size: int, improved: bool, seed: int) -> None:
        dims = [
            data.draw(st.integers(0, len(p.ref.shape)) if p.ref.role == "inout" else _dims(p.ref.shape))
            for p in func.inputs
        ]
        dims = list(places(func, dims))
        arrays = values(func, [size] * len(dims), dims, seed)
        batched = batch(func, size, dims)
        verify(batched)
        found = interpret(pipeline.run(batched, check=True) if improved else batched, *arrays)
        for n in range(size):
            slices = [x if d is None else np.take(x, n, axis=d) for x, d in zip(arrays, dims, strict=True)]
            for got, expected, param in zip(found, interpret(func, *slices), func.outputs, strict=True):
                place = dims[func.inputs.index(param)] if param in func.inputs else 0
                assert_same(np.take(got, n, axis=place), expected)

    property()


def _dims(shape: tuple[int, ...]) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, len(shape))


def test_shared_inputs_keep_their_type() -> None:
    func = FUNCS["matmul"]
    batched = batch(func, 7, [0, None])
    (x, w, out), (stacked, shared, outs) = func.params, batched.params
    assert shared is w
    assert (stacked.ref.shape, outs.ref.shape) == ((7, *x.ref.shape), (7, *out.ref.shape))
    assert all(op.ref.ref.dtype != I32 for op in batched.walk() if op.name in ("load", "store"))
