import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.strategies import arrays_for, funcs
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.passes.pipeline import PIPELINE, run


def bits(array: Array) -> bytes:
    """The bits of an array; all NaNs count as one."""
    return (
        np.where(array != array, np.asarray(np.nan, array.dtype), array).tobytes()
        if array.dtype.kind == "f"
        else array.tobytes()
    )


def assert_same(before: Func, after: Func, seed: int) -> None:
    verify(after)
    arrays = arrays_for(before, seed)
    expected, found = interpret(before, *arrays), interpret(after, *arrays)
    assert [*map(bits, found)] == [*map(bits, expected)]


@pytest.mark.parametrize("improve", [*PIPELINE, run])
@given(func=funcs(), seed=st.integers(0, 1000))
def test_the_meaning_stays_bit_for_bit(improve, func: Func, seed: int) -> None:
    verify(func)
    assert_same(func, improve(func), seed)


@given(func=funcs())
def test_running_again_changes_nothing(func: Func) -> None:
    once = run(func, check=True)
    again = parse(to_text(once))
    assert run(again) is again
