from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.strategies import assert_same_meaning, funcs
from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.passes.pin_indices import pin_indices
from tilekern.passes.pipeline import run

REFS = "%x: ref<f32[8], in>, %o: ref<f32[8], out>"


def func_of(grid: str, ops: str) -> Func:
    return parse(f"func @f({REFS}) {{ grid {grid} {ops} }}")


def test_the_index_of_an_axis_of_one_tile_is_0() -> None:
    before = func_of("%g in g[1 by 1], %n in n[8 by 1]", "%0 = load %x[8*%g + %n] : f32[] store %0 to %o[8*%g + %n]")
    after = pin_indices(before)
    verify(after)
    plain = func_of("%g in g[1 by 1], %n in n[8 by 1]", "%0 = load %x[%n] : f32[] store %0 to %o[%n]")
    assert to_text(run(after)) == to_text(run(plain)) != to_text(run(before))


def test_the_only_tile_of_several_elements() -> None:
    before = func_of("%i in i[6 by 8]", "%0 = load %x[8*%i +: 8] : f32[8] store %0 to %o[8*%i +: 8]")
    plain = func_of("%i in i[6 by 8]", "%0 = load %x[0 +: 8] : f32[8] store %0 to %o[0 +: 8]")
    assert to_text(run(pin_indices(before))) == to_text(run(plain))


def test_other_axes_stay() -> None:
    several = func_of("%n in n[8 by 1]", "%0 = load %x[%n] : f32[] store %0 to %o[%n]")
    assert pin_indices(several) is several


@settings(max_examples=50)
@given(funcs(), st.integers(0, 2**32 - 1))
def test_random_funcs_compute_the_same(func: Func, seed: int) -> None:
    pinned = pin_indices(func)
    verify(pinned)
    assert_same_meaning(func, pinned, seed)
