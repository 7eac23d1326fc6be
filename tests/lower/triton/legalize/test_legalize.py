"""All steps together: random programs mean the same, and are what the emitter takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.lower.triton.legalize.meaning import SM_80, SM_90, hardware
from tests.lower.triton.legalize.promises import assert_legal, ops_of
from tests.programs import Program
from tests.programs.batches import check
from tilekern.errors import TargetError
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Atomic
from tilekern.ir.types import DTYPES
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.legalize import legalize
from tilekern.passes import pipeline

_CHUNK = 125
_SEEDS = [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))]


def legalized(program: Program, chip: Chip, improve: Callable[[Func], Func]) -> Sequence[np.ndarray]:
    """The outputs of the legal program; the expected ones where the chip has no such atomics."""
    try:
        legal = legalize(improve(program.func), chip)
    except TargetError as error:
        assert ops_of(program.func, Atomic) and "has no atomic" in str(error)
        return program.expected
    assert_legal(legal.func, chip)
    with hardware():
        return interpret(legal.func, *program.arrays, *legal.constants, orders=1)


@pytest.mark.parametrize("chunk", _SEEDS)
def test_the_meaning_stays(chunk: int) -> None:
    seeds = range(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    check(seeds, lambda programs: [legalized(p, SM_90, pipeline.run) for p in programs])


@pytest.mark.parametrize("chunk", _SEEDS)
def test_the_meaning_stays_without_passes_and_on_older_chips(chunk: int) -> None:
    seeds = range(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    dtypes = [d for n, d in DTYPES.items() if n != "f8e4m3fn"]
    check(seeds, lambda programs: [legalized(p, SM_80, lambda func: func) for p in programs], dtypes=dtypes)
