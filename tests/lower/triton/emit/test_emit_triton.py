"""Each kind of statement: in Triton's interpreter, its text has the meaning of the Func."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.running import assert_kernel, assert_runs, entry, program_of

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

pytest.importorskip("triton", reason="needs triton")

X = np.arange(1, 13, dtype=np.float32)
LIKE = jax.ShapeDtypeStruct


def sums(out: Any = None) -> Any:
    """A kernel of one float32 input whose output is like it, or of the given type."""
    return tk.kernel(out_type=lambda x, *_: LIKE(x.shape, x.dtype) if out is None else out)


# --- loads and stores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("block", [1, 3, 4, 5, 16])
def test_ragged_tiles(block: int, chip: str) -> None:
    @sums()
    def scale(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 2 + 1

    assert_kernel(scale, X, chip=chip)


def test_masks_and_fills() -> None:
    @tk.kernel(out_type=lambda x, keep, fill: (LIKE(x.shape, x.dtype),) * 3)
    def masked(x: Any, keep: Any, fill: Any, a: Any, b: Any, c: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        a[i] = x.load(i + 2, mask=keep[i])
        b[i] = x.load(i, mask=keep[i], fill=-1.0)
        c[i] = x.load(i, mask=keep[i], fill=fill[()])
        a.store(i, x[i], mask=~keep[i])

    assert_kernel(masked, X, X.astype(int) % 3 == 0, np.float32(9).reshape(()))


def test_views_indices_and_halos() -> None:
    @sums()
    def halo(x: Any, out: Any) -> None:
        i, n = tk.parallel(x.shape[0], 4), tk.parallel(x.shape[1])
        view = x.at[:, n]
        out[i, n] = view[i + (-1)] + 10 * view[i] + 100 * view[i + 1]

    assert_kernel(halo, np.arange(30, dtype=np.float32).reshape(10, 3))


@pytest.mark.parametrize("rows", [[0, 3, 3, 1], [-1, 5, 2**31 - 1, -(2**31)], [4, 4, 4]])
def test_gathers(rows: list[int]) -> None:
    @tk.kernel(out_type=lambda x, n: LIKE((n.shape[0], x.shape[1]), x.dtype))
    def take(x: Any, n: Any, out: Any) -> None:
        i = tk.parallel(n.shape[0], 2)
        out[i, :] = x[n[i], :]

    assert_kernel(take, np.arange(15, dtype=np.float32).reshape(5, 3), np.array(rows, np.int32))


def test_a_gather_of_one_row_again_and_again() -> None:
    """Gathers whose indices are all equal, written in three ways."""

    @tk.kernel(out_type=lambda x, n: (LIKE((4, 3), x.dtype),) * 3)
    def take(x: Any, n: Any, a: Any, b: Any, c: Any) -> None:
        a[...] = x[n[...] * 0, :]
        b[...] = x[jnp.full(4, 2), :]
        c[...] = x[jnp.broadcast_to(n[1], (4,)), :]

    assert_kernel(take, np.arange(15, dtype=np.float32).reshape(5, 3), np.array([1, 3, 2, 0], np.int32))


def test_scatters() -> None:
    @tk.kernel(out_type=lambda x, n: tk.Zeros(LIKE((5, 3), x.dtype)))
    def put(x: Any, n: Any, out: Any) -> None:
        out[n[...], :] = x[...]

    assert_kernel(put, np.arange(9, dtype=np.float32).reshape(3, 3), np.array([4, 7, 0], np.int32))


def test_scalars_and_tiles_of_one_element() -> None:
    @tk.kernel(out_type=lambda x: (LIKE((), x.dtype), LIKE((1, 1), x.dtype), LIKE((1,), x.dtype)))
    def ones(x: Any, a: Any, b: Any, c: Any) -> None:
        a[()] = x[3] + 1
        b[...] = x[tk.ds(2, 1)][None] * 2
        c[...] = jnp.sum(x[...])[None]

    assert_kernel(ones, X)


def test_a_program_sees_what_it_stored() -> None:
    @tk.kernel(donate=("x",), out_type=lambda x: LIKE(x.shape, x.dtype))
    def turn(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        x[i] = x[i] + 1
        x[i] = x[i] * jnp.sum(x[i])
        out[i] = jnp.flip(x[i])
        out[i] = out[i] - 1

    program = assert_kernel(turn, X)
    text = program.text
    assert program.results[0].alias == 0 and "x_before" in text
    # A barrier precedes each access to an array that is both loaded and stored.
    assert text.count("tl.debug_barrier()") == text.count("tl.load(") + text.count("tl.store(") > 6


def test_an_array_that_is_only_loaded_or_only_stored_needs_no_barrier() -> None:
    @sums()
    def scale(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    assert "barrier" not in assert_kernel(scale, X).text


# --- atomics and sums -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["add", "max", "min"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32])
def test_atomics(kind: str, dtype: Any) -> None:
    @tk.kernel(donate=("total",), out_type=lambda x, total: ())
    def update(x: Any, total: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        options = {"ordered": False} if kind == "add" and dtype == np.float32 else {}
        getattr(total.at[tk.ds(0, 4)], kind)(x[i], **options)

    assert_kernel(update, X.astype(dtype), np.array([3, 1, 30, 0], dtype))


@pytest.mark.parametrize("kind", ["and", "or", "xor"])
def test_bitwise_atomics(kind: str) -> None:
    program = assert_runs(
        f"""
func @f(%x: ref<i32[12], in>, %o: ref<i32[4], inout>) {{
  grid %i in i[12 by 4]
  %0 = load %x[4*%i +: 4!] : i32[4]
  atomic %0 to %o[0 +: 4!] {{kind="{kind}"}}
}}""",
        X.astype(np.int32),
        np.array([1, 2, -1, 0], np.int32),
    )
    assert f"tl.atomic_{kind}(" in program.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sums_of_all_programs(dtype: str) -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(LIKE((x.shape[1],), x.dtype)))
    def columns(x: Any, out: Any) -> None:
        i, j = tk.parallel(x.shape[0], 4), tk.parallel(x.shape[1], 2)
        out.at[j].add(jnp.sum(x[i, j], 0, dtype=x.dtype))

    x = np.arange(36, dtype=np.float32).reshape(12, 3) % 5
    program = assert_kernel(columns, np.asarray(jnp.asarray(x, dtype)))
    (result,) = program.results
    assert result.partial_sums and result.shape == (3, 3)  # a partial sum for every tile of rows
    assert not result.zeroed and "tl.store(out_slot" in program.text  # whose elements get one summand each


@pytest.mark.parametrize("masked", [False, True])
def test_sums_into_rows_that_come_twice(masked: bool) -> None:
    @tk.kernel(out_type=lambda x, n: tk.Sum(LIKE((5, 3), x.dtype)))
    def scatter(x: Any, n: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        mask = (x[i, :] > 3) if masked else None
        out.at[n[i], :].add(x[i, :], mask=mask) if masked else out.at[n[i], :].add(x[i, :])

    rows = np.array([0, 0, 3, 0, 9, 3, -1, 3, 4, 4, 4, 4], np.int32)
    assert_kernel(scatter, np.arange(36, dtype=np.float32).reshape(12, 3), rows)


def test_sums_over_a_loop() -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(LIKE((4,), x.dtype)))
    def total(x: Any, out: Any) -> None:
        i = tk.parallel(2)

        def step(k: Any) -> None:
            out.at[tk.ds(0, 4)].add(x[k] * (i + 1))

        tk.foreach(tk.serial(x.shape[0], 4), step)

    assert_kernel(total, X)


# --- folds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 12), (5, 9), (4, 4), (9, 3), (-7, 99), (-(2**31), 2**31 - 1)])
def test_folds_with_bounds_that_a_program_computes(start: int, stop: int, reverse: bool) -> None:
    @tk.kernel(out_type=lambda x, n: LIKE((), x.dtype))
    def horner(x: Any, n: Any, out: Any) -> None:
        axis = tk.serial(x.shape[0], 5, start=n[0], stop=n[1], reverse=reverse)
        out[()] = tk.fold(axis, lambda k, c: (c * 3 + jnp.sum(x[k])) % 1000, jnp.float32(1))

    assert_kernel(horner, X, np.array([start, stop], np.int32))


@pytest.mark.parametrize("reverse", [False, True])
def test_folds_with_known_bounds(reverse: bool) -> None:
    @tk.kernel(out_type=lambda x: (LIKE((), x.dtype), LIKE((), np.int32)))
    def horner(x: Any, out: Any, last: Any) -> None:
        axis = tk.serial(x.shape[0], 2, start=3, stop=9, reverse=reverse)
        total, place = tk.fold(axis, lambda k, c: (c[0] * 3 + jnp.sum(x[k]), k.index), (jnp.float32(1), jnp.int32(-1)))
        out[()] = total
        last[()] = place

    assert_kernel(horner, X)


def test_nested_folds_with_bounds_of_the_outer_index() -> None:
    @sums()
    def triangle(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4)

        def inner(row: Any, total: Any) -> Any:
            axis = tk.serial(x.shape[0], 3, stop=row.start + i.start)
            return tk.fold(axis, lambda k, c: c + jnp.sum(x[k]) * (k.index + 1), total)

        total = tk.fold(tk.serial(x.shape[0], 5), inner, jnp.float32(0))
        out[i] = x[i] + total

    assert_kernel(triangle, X)


def test_carries_that_swap() -> None:
    @tk.kernel(out_type=lambda x: (LIKE((4,), x.dtype),) * 3)
    def rotate(x: Any, a: Any, b: Any, c: Any) -> None:
        first = (x[tk.ds(0, 4)], x[tk.ds(4, 4)], x[tk.ds(8, 4)])
        a[...], b[...], c[...] = tk.fold(tk.serial(7), lambda k, s: (s[1], s[2] + s[0], s[0]), first)

    assert_kernel(rotate, X)


def test_a_carry_that_the_others_read_keeps_its_old_value() -> None:
    """The last statement computes the first carry, while the second carry takes the first one's old value."""
    assert_runs(
        """
func @f(%x: ref<f32[12], in>, %o: ref<f32[8], out>, %p: ref<f32[], out>) {
  %z = constant 0 : i32[]
  %n = constant 12 : i32[]
  %s = constant 1.0 : f32[]
  %t = constant 0.0 : f32[8]
  %a, %b = fold %k in k[12 by 1] from %z to %n with %c = %s, %d = %t do {
    %old = broadcast(%c) {dims=[]} : f32[8]
    %v = load %x[%k] : f32[]
    %w = add(%c, %v) : f32[]
    yield %w, %old
  } : f32[], f32[8]
  store %a to %p[]
  store %b to %o[0 +: 8!]
}""",
        X,
    )


def test_a_while_whose_carry_the_others_read_keeps_its_old_value() -> None:
    assert_runs(
        """
func @f(%n: ref<i32[], in>, %o: ref<i32[8], out>) {
  %s = load %n[] : i32[]
  %t = constant 0 : i32[8]
  %a, %b = while(%s, %t) do (%c: i32[], %d: i32[8]) {
    %z = constant 0 : i32[]
    %go = gt(%c, %z) : bool[]
    yield %go
  } do (%e: i32[], %f: i32[8]) {
    %old = broadcast(%e) {dims=[]} : i32[8]
    %one = constant 1 : i32[]
    %w = sub(%e, %one) : i32[]
    yield %w, %old
  } : i32[], i32[8]
  store %b to %o[0 +: 8!]
}""",
        np.asarray(3, np.int32),
    )


FOLD = """
  %{result} = fold %{k} in k[12 by 1] from %z to %n with %c{k} = %{init} do {{
    %v{k} = load %x[%{k}] : f32[]
    %w{k} = add(%c{k}, %v{k}) : f32[]
    yield %w{k}
  }} : f32[]
"""
FIRST = """
func @f(%x: ref<f32[12], in>, %o: ref<f32[3], out>) {
  %z = constant 0 : i32[]
  %n = constant 12 : i32[]
  %m = constant 3 : i32[]
  %s = constant 0.0 : f32[]
""" + FOLD.format(result="a", k="k", init="s")


def test_a_loop_goes_on_with_the_variables_of_the_one_before() -> None:
    program = assert_runs(
        f"""{FIRST}{FOLD.format(result="b", k="l", init="a")}
  %c = broadcast(%b) {{dims=[]}} : f32[3]
  store %c to %o[0 +: 3!]
}}""",
        X,
    )
    names = {n.id for n in ast.walk(entry(program)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert len([n for n in names if n.startswith("c")]) == 1


def test_an_inner_loop_starts_again_from_what_a_loop_outside_gave() -> None:
    assert_runs(
        f"""{FIRST}
  fold %j in j[3 by 1] from %z to %m do {{{FOLD.format(result="b", k="l", init="a")}
    store %b to %o[%j]
  }}
}}""",
        X,
    )


def test_a_branch_goes_on_from_what_a_loop_outside_gave() -> None:
    assert_runs(
        f"""{FIRST}
  fold %j in j[3 by 1] from %z to %m do {{
    %r = switch(%j) do {{
      yield %s
    }} do {{{FOLD.format(result="b", k="l", init="a")}
      yield %b
    }} : f32[]
    store %r to %o[%j]
  }}
}}""",
        X,
    )


# --- while, switch, hoist -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 0, 1, 27])
def test_while(number: int) -> None:
    @tk.kernel(out_type=lambda n: (LIKE((), np.int32), LIKE((), np.int32)))
    def collatz(n: Any, steps: Any, highest: Any) -> None:
        def step(state: Any) -> Any:
            n, count, high = state
            n = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
            return n, count + 1, jnp.maximum(high, n)

        _, count, high = jax.lax.while_loop(lambda s: s[0] > 1, step, (n[()], jnp.int32(0), n[()]))
        steps[()] = count
        highest[()] = high

    assert_kernel(collatz, np.asarray(number, np.int32))


@pytest.mark.parametrize("branches", [1, 2, 3, 4])
def test_switch(branches: int) -> None:
    @tk.kernel(out_type=lambda x, n: (LIKE((5, 4), x.dtype), tk.Zeros(LIKE((5, 4), x.dtype))))
    def choose(x: Any, n: Any, out: Any, some: Any) -> None:
        i = tk.parallel(5)
        tile = x[tk.ds(0, 4)]

        def branch(k: int) -> Any:
            def run() -> Any:
                if k % 2:
                    some[i, :] = tile * k
                return tile + 10 * k, jnp.sum(tile) * k

            return run

        y, total = jax.lax.switch(n[i], [branch(k) for k in range(branches)])
        out[i, :] = y * total

    assert_kernel(choose, X, np.array([-3, 0, 1, 2, 9], np.int32))


def test_cond_in_a_loop() -> None:
    @tk.kernel(out_type=lambda x: LIKE((), x.dtype))
    def alternate(x: Any, out: Any) -> None:
        def step(k: Any, c: Any) -> Any:
            return jax.lax.cond(k.index % 2 == 0, lambda: c + jnp.sum(x[k]), lambda: c * 2)

        out[()] = tk.fold(tk.serial(x.shape[0], 3), step, jnp.float32(1))

    assert_kernel(alternate, X)


def test_hoist() -> None:
    @tk.kernel(out_type=lambda x, n: LIKE(x.shape, x.dtype))
    def spans(x: Any, n: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        stop = tk.hoist(lambda: jnp.sum(jnp.where(n[...] <= i.start, n[...], 0)))
        out[i] = x[i] + tk.fold(tk.serial(x.shape[0], 4, stop=stop), lambda k, c: c + jnp.sum(x[k]), jnp.float32(0))

    assert_kernel(spans, X, np.array([1, 4, 2, 8], np.int32))


# --- the text -------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_user() -> None:
    @tk.kernel(out_type=lambda x: LIKE(x.shape, x.dtype))
    def normalise(x: Any, out: Any) -> None:
        rows = tk.parallel(x.shape[0], 4)
        tile = x[rows, :]
        largest = jnp.max(tile, 1)
        shifted = jnp.exp(tile - largest[:, None])
        total = jnp.sum(shifted, 1)
        out[rows, :] = shifted / total[:, None]

    text = program_of(normalise.trace(np.ones((12, 8), np.float32)).ir).text
    for name in ("tile", "largest", "shifted", "total"):
        assert f"\n    {name} = " in text


def test_lines_say_where_they_come_from() -> None:
    @sums()
    def scale(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4)
        tile = x[i] * 2
        out[i] = tile

    program = program_of(scale.trace(X).ir)
    lines = program.text.splitlines()
    comments = {n: line.strip() for n, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    assert comments
    for number, text in comments.items():
        assert text == f"# {Path(__file__).name}:{program.lines[number].line}"
    (store,) = (n for n, line in enumerate(lines, 1) if "tl.store" in line)
    place = program.lines[store]
    assert linecache.getline(place.file, place.line).strip() == "out[i] = tile"


def test_the_last_statement_of_a_body_may_set_the_carry() -> None:
    @tk.kernel(out_type=lambda x, w: LIKE((16, 16), np.float32))
    def matmul(x: Any, w: Any, out: Any) -> None:
        acc = tk.fold(tk.serial(64, 16), lambda k, acc: tk.dot(x[:, k], w[k, :], acc), jnp.zeros((16, 16)))
        out[...] = acc

    x = np.ones((16, 64), np.float32)
    text = program_of(matmul.trace(x, x.T).ir).text
    assert "        acc = tl.dot(" in text and ", acc, " in text
