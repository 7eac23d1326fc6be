"""All steps together: random programs mean the same, and are what the emitter takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests import seeds
from tests.lower.triton.legalize.meaning import hardware
from tests.lower.triton.legalize.promises import assert_legal, ops_of
from tilekern.errors import TargetError
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Atomic
from tilekern.ir.types import DTYPES
from tilekern.lower.triton.chip import CHIPS, Chip
from tilekern.lower.triton.legalize import legalize
from tilekern.passes import pipeline
from tilekern.testing.programs import Program
from tilekern.testing.programs.batches import check

_CHUNK = 125
_SEEDS = [*range(1), *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]


def legalized(program: Program, chip: Chip) -> Sequence[np.ndarray]:
    """The outputs of the legal program; the expected ones where the chip has no such atomics."""
    try:
        legal = legalize(pipeline.run(program.func), chip)
    except TargetError as error:
        assert ops_of(program.func, Atomic) and "has no atomic" in str(error)
        return program.expected
    assert_legal(legal, chip)
    with hardware():
        return interpret(legal, *program.arrays, orders=1)


@pytest.mark.parametrize("name", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("chunk", _SEEDS)
def test_the_meaning_stays(chunk: int, name: str) -> None:
    dtypes = [d for n, d in DTYPES.items() if n != "f8e4m3fn" or CHIPS[name].float8]
    check(seeds.of_chunk(chunk, _CHUNK), lambda programs: [legalized(p, CHIPS[name]) for p in programs], dtypes=dtypes)
