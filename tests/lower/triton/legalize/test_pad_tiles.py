"""Sizes that are powers of two: nothing of what stands in added lanes is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import Source, edges
from tests.lower.triton.legalize.meaning import assert_keeps, counting, hardware, one, several, shapes
from tests.lower.triton.legalize.promises import assert_padded, ops_of
from tilekern.errors import DeviceAssertionError
from tilekern.ir.compute import Dot, Monoid, Reduce, Select
from tilekern.ir.core import Func, Value
from tilekern.ir.debug import Assert
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Load, Store
from tilekern.ir.ordering import ArgReduce, Cumulative, LinearScan, Scan, Sort, TopK
from tilekern.ir.parse import parse
from tilekern.ir.types import DTYPES, F32, I32
from tilekern.lower.triton.legalize.pad_tiles import pad_tiles, padded, padded_size


def pad(func: Func) -> Func:
    result = pad_tiles(func)
    assert_padded(result)
    return result


@given(size=st.integers(0, 2**20))
def test_padded_sizes(size: int) -> None:
    found = padded_size(size)
    assert found.bit_count() == 1 and found >= size and (found // 2 < max(size, 1))
    assert padded((size, 3)) == (found, 4)


# --- along dims -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min", "and", "or", "xor"])
@given(data=st.data())
def test_reductions(monoid: Monoid, data: st.DataObject) -> None:
    """Of integers, of which every number counts."""
    shape = data.draw(shapes())
    dims = data.draw(st.sets(st.sampled_from(range(len(shape))))) if shape else set[int]()
    x = counting(shape, I32) - 5
    assert_keeps(pad, *one(Reduce, x, monoid=monoid, dims=tuple(dims)))


@pytest.mark.parametrize("name", DTYPES)
def test_no_identity_is_seen(name: str) -> None:
    """Whatever the elements are, extremes are among them."""
    x = np.resize(edges(DTYPES[name], 32), (40, 5))
    for extreme in ("max", "min"):
        assert_keeps(pad, *one(Reduce, x, monoid=extreme, dims=(1,)))
        assert_keeps(pad, *one(ArgReduce, x, extreme=extreme, dim=1))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_reductions_of_no_element(dims: tuple[int, ...]) -> None:
    x = np.zeros((0, 0), np.float32)
    for monoid in ("sum", "prod", "max", "min"):
        assert_keeps(pad, *one(Reduce, x, monoid=monoid, dims=dims))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min", "logsumexp"])
@given(data=st.data())
def test_scans(monoid: Cumulative, reverse: bool, data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    x = counting(shape, I32 if monoid != "logsumexp" else F32) - 5
    assert_keeps(pad, *one(Scan, x, monoid=monoid, dim=data.draw(st.integers(0, len(shape) - 1)), reverse=reverse))


def test_added_lanes_come_first_in_no_scan() -> None:
    x = counting((3, 5), F32) - 5
    for reverse in (False, True):
        for monoid in ("sum", "prod", "max", "min", "logsumexp"):
            for dim in (0, 1):
                assert_keeps(pad, *one(Scan, x, monoid=monoid, dim=dim, reverse=reverse))


@pytest.mark.parametrize("reverse", [False, True])
@given(data=st.data())
def test_linear_scans(reverse: bool, data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    terms = counting(shape, F32)
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert_keeps(pad, *one(LinearScan, terms % 3 - 1, terms, dim=dim, reverse=reverse))


@given(data=st.data())
def test_sorts_and_top_k_of_keys(data: st.DataObject) -> None:
    """Integer keys, the largest among them; in which added lanes stay behind."""
    shape = data.draw(shapes(1))
    dim, keys = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [rng.choice(np.array([2**31 - 1, -(2**31), 0, 1], np.int32), shape) for _ in range(keys)]
    lanes = np.indices(shape, np.int32)[dim]
    assert_keeps(pad, *one(Sort, *arrays, lanes, dim=dim, num_keys=keys, pick=keys))
    assert_keeps(pad, *one(TopK, arrays[0], dim=dim, k=data.draw(st.integers(0, shape[dim]))))


# --- dots -----------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_dots(data: st.DataObject) -> None:
    m, n, k, j = (data.draw(st.sampled_from([1, 3, 4, 5, 12])) for _ in range(4))
    x, y = counting((m, k, j), F32), counting((k, n, j), F32)
    assert_keeps(pad, *one(Dot, x, y, contract=((1, 2), (0, 2))))


def test_a_dot_of_no_product_is_zero() -> None:
    assert_keeps(pad, *one(Dot, np.zeros((3, 0), F32), np.zeros((0, 5), F32), contract=((1,), (0,))))


@pytest.mark.parametrize("chain", ["load", "transpose", "convert", "filled", "computed"])
def test_zeros_of_a_contraction_come_from_the_load_where_that_goes(chain: str) -> None:
    source = {
        "load": "%a = load %x[0 +: 8!, 0 +: 40!] : f32[8, 40]",
        "transpose": """
          %t = load %y[0 +: 40!, 0 +: 8!] : f32[40, 8]
          %a = transpose(%t) {permutation=[1, 0]} : f32[8, 40]""",
        "convert": "%h = load %z[0 +: 8!, 0 +: 40!] : bf16[8, 40]\n%a = convert(%h) : f32[8, 40]",
        "filled": "%f = constant 3.0 : f32[]\n%a = load %x[0 +: 8!, 0 +: 40!] fill %f : f32[8, 40]",
        "computed": "%l = load %x[0 +: 8!, 0 +: 40!] : f32[8, 40]\n%a = exp(%l) : f32[8, 40]",
    }[chain]
    func = parse(f"""
func @f(%x: ref<f32[8, 41], in>, %y: ref<f32[41, 8], in>, %z: ref<bf16[8, 41], in>, %o: ref<f32[8, 8], out>) {{
  {source}
  %b = load %y[0 +: 40!, 0 +: 8!] : f32[40, 8]
  %c = dot(%a, %b) {{contract=[[1], [0]]}} : f32[8, 8]
  store %c to %o[0 +: 8!, 0 +: 8!]
}}""")
    x, z = np.full((8, 41), 2, np.float32), np.full((8, 41), 2, DTYPES["bf16"])
    x[:, 40] = z[:, 40] = np.nan
    result = assert_keeps(pad, func, [x, x.T.copy(), z])
    assert bool(ops_of(result, Select)) == (chain in ("filled", "computed"))


# --- memory ---------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_a_tile_in_the_midst_of_an_array(data: st.DataObject) -> None:
    """Masked, filled, partly outside; next to the tiles of other programs."""
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    block, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    start = data.draw(st.integers(-3, 9))
    masked, filled = data.draw(st.booleans()), data.draw(st.booleans())
    func = parse(
        f"""
func @f(%x: ref<i32[{rows}, {columns}], in>, %m: ref<bool[{block}, {width}], in>, %o: ref<i32[{rows}, {columns}], out>,
        %p: ref<i32[{4 * block}, {width}], zeros>) {{
  grid %i in i[{rows} by {block}], %j in j[{columns} by {width}]
  %mask = load %m[0 +: {block}, 0 +: {width}] : bool[{block}, {width}]
  %fill = constant 7 : i32[]
  %a = load %x[{block}*%i +: {block}, {width}*%j +: {width}] : i32[{block}, {width}]
  %b = load %x[{block}*%i {start:+d} +: {block}, {width}*%j {-start:+d} +: {width}]
    {"mask %mask" if masked else ""} {"fill %fill" if filled else ""} : i32[{block}, {width}]
  %c = add(%a, %b) : i32[{block}, {width}]
  store %c to %o[{block}*%i +: {block}, {width}*%j +: {width}]
  atomic %b to %p[{block}*(%i % 4) +: {block}, 0 +: {width}] mask %mask {{kind="add"}}
}}""".replace("\n    ", " ")
    )
    x, m = counting((rows, columns), I32), np.resize([True, False, True], (block, width))
    assert_keeps(pad, func, [x, m])


def test_no_mask_where_added_lanes_are_behind_the_end() -> None:
    func, arrays = one(Reduce, counting((5, 3), F32), monoid="sum", dims=(1,))
    (store,) = ops_of(assert_keeps(pad, func, arrays), Store)
    assert store.masked  # of 5 rows next to others
    whole = parse("""
func @f(%x: ref<f32[5, 3], in>, %o: ref<f32[5, 3], out>) {
  %a = load %x[0 +: 5!, 0 +: 3!] : f32[5, 3]
  store %a to %o[0 +: 5!, 0 +: 3!]
}""")
    (store,) = ops_of(assert_keeps(pad, whole, [counting((5, 3), F32)]), Store)
    assert not store.masked and not store.access.in_bounds and store.access.shape == (8, 4)


def test_loads_of_what_the_program_wrote_do_not_touch_added_lanes() -> None:
    """They belong to other programs."""
    func = parse("""
func @f(%x: ref<f32[6], in>, %o: ref<f32[6], out>, %p: ref<f32[6], out>) {
  grid %i in i[6 by 3]
  %a = load %x[3*%i +: 3] : f32[3]
  store %a to %o[3*%i +: 3]
  %b = load %o[3*%i +: 3] : f32[3]
  store %b to %p[3*%i +: 3]
}""")
    assert_keeps(pad, func, [counting((6,), F32)])


def test_added_lanes_fail_no_assertion() -> None:
    def body(b: Source, x: Value) -> list[Value]:
        b.add(Assert(operands=(b.ew("lt", x, b.const(9, (5,), F32)),), message="small", loc=b.loc()))
        return [x]

    x = counting((5,), F32)
    func, arrays = several(body, x)
    assert_keeps(pad, func, arrays)
    with pytest.raises(DeviceAssertionError, match="small"), hardware():
        interpret(pad(func), *several(body, x + 7)[1])


def test_names_stay() -> None:
    func = parse("""
func @f(%x: ref<f32[6], in>, %o: ref<f32[6], out>) {
  grid %i in i[6 by 3]
  %tile = load %x[3*%i +: 3] : f32[3]
  store %tile to %o[3*%i +: 3]
}""")
    result = pad(func)
    (load,) = ops_of(result, Load)
    assert load.hint == "tile" and result.body.args[0].name == "i" and result.axes == func.axes


def test_what_is_padded_already_stays() -> None:
    func = parse("""
func @f(%x: ref<f32[8], in>, %o: ref<f32[8], out>) {
  grid %i in i[8 by 4]
  %0 = load %x[4*%i +: 4!] : f32[4]
  %1 = exp(%0) : f32[4]
  store %1 to %o[4*%i +: 4!]
}""")
    assert str(pad(func)) == str(func)
