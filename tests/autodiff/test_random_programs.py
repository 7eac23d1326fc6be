"""Random programs: their tangents are JAX's, of the portable program, and their backward passes the transposes."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

from tests import seeds
from tilekern.ir.types import F64
from tilekern.testing.fuzz import derivatives
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
