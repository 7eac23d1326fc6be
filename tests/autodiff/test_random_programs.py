"""Random programs: their tangents are JAX's, of the portable program, and their backward passes the transposes."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

from tests import seeds
from tilekern.ir.parse import parse
from tilekern.ir.types import F64
from tilekern.testing.fuzz import derivatives
from tilekern.testing.programs import Program
from tilekern.testing.programs.batches import sample

_CHUNK = 40


@pytest.mark.sweep(22)
@pytest.mark.parametrize("chunk", range(44))
def test_tangents_are_those_of_jax_and_backward_passes_their_transposes(chunk: int) -> None:
    tally = Counter[str]()
    with jax.enable_x64(True):
        for seed in seeds.of_chunk(chunk, _CHUNK):
            tally[derivatives.check(sample(seed, dtypes=(F64,))[0])] += 1
    assert tally["transposes"] >= _CHUNK // 10, tally


# Row 4 is [5.5, 6.5, 4.75, 2.0, 6.5] for seed 10: five equal numbers, of which one alone has a tangent.
TIES = """
func @f(%x: ref<f64[8, 5, 6], in>, %out: ref<f64[8], out>) {
  grid %i in i[1 by 8]
  %0 = load %x[2 +: 8, 0 +: 5, 0] : f64[8, 5]
  %1 = constant 2.0 : f64[8, 5]
  %2 = min(%0, %1) : f64[8, 5]
  %3 = reduce(%2) {monoid="max", dims=[1]} : f64[8]
  store %3 to %out[0 +: 8]
}
"""


def test_equal_numbers_have_equal_parts_of_the_derivative_of_their_maximum() -> None:
    with jax.enable_x64(True):
        assert derivatives.check(Program(parse(TIES), 10, (0.0,))) == "transposes"
