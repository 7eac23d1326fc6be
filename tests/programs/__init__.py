"""Random programs of the block IR, and how a backend's results for them are judged.

@given(program=programs())
def test_my_backend(program: Program) -> None:
    assert_agrees(program, my_backend(program.func, *program.arrays))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.programs.control import Generator
from tests.programs.values import Choose, draw_array
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.types import DTYPES, DType

__all__ = ["FEATURES", "Program", "assert_agrees", "build", "inputs_of", "programs"]

DTYPES_OF_VALUES = tuple(DTYPES.values())
FEATURES = tuple(Generator.MOVES)
"""Features of programs beyond elementwise ops and plain loads and stores; see `programs`."""


@dataclass(frozen=True, eq=False)
class Program:
    """A Func and inputs for it.

    Attributes:
      func: stores every element of its outputs, each by one program; has no integer division by zero, and ends.
      seed: of the inputs; an odd one brings NaN and infinities.
      tolerances: how far, for each output, a backend may be from the interpreter; 0 where nothing rounds.
    """

    func: Func
    seed: int
    tolerances: tuple[float, ...]

    def __repr__(self) -> str:
        return f"Program(parse('''{self.func}'''), seed={self.seed}, tolerances={self.tolerances})"

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The inputs."""
        return inputs_of(self.func, self.seed)

    @cached_property
    def expected(self) -> tuple[Array, ...]:
        """The outputs by the interpreter."""
        return interpret(self.func, *self.arrays, orders=1)


def inputs_of(func: Func, seed: int) -> tuple[Array, ...]:
    """The inputs of a random Func: all that they depend on are its types and the seed."""
    types = enumerate(p.ref for p in func.inputs)
    return tuple(draw_array(t.shape, t.dtype, 64 * n + seed, specials=bool(seed % 2)) for n, t in types)


@st.composite
def programs(
    draw: st.DrawFn, features: Sequence[str] = FEATURES, dtypes: Sequence[DType] = DTYPES_OF_VALUES
) -> Program:
    """Random programs.

    Args:
      draw: by Hypothesis.
      features: some of `FEATURES`; leave out what a backend rejects.
      dtypes: those of the values, beside int32 and bool where positions and masks need them.
    """
    return build(lambda n: draw(st.integers(0, n)), features, dtypes)


def build(
    choose: Choose,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[DType] = DTYPES_OF_VALUES,
    make: type[Generator] = Generator,
) -> Program:
    """The program that some choices make."""
    generator = make(choose, features, dtypes)
    func = generator.func()
    return Program(func, generator.seed, tuple(generator.facts[p].error for p in func.outputs))


def assert_agrees(program: Program, outputs: Sequence[Any]) -> None:
    """Assert that a backend's outputs are the interpreter's: bit for bit, but for signs of zero and what rounds.

    Raises:
      AssertionError: with the program as text, the seed of its inputs, and the first element that differs.
    """
    for number, (output, expected) in enumerate(zip(outputs, program.expected, strict=True)):
        found, tolerance = np.asarray(output), program.tolerances[number]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), f"output {number} of {program!r}"
        different = differences(found, expected, tolerance)
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            name = program.func.outputs[number].name
            raise AssertionError(
                f"{name}{list(at)} is {found[at]!r}, should be {expected[at]!r} (tolerance {tolerance:.3g}; "
                f"{np.count_nonzero(different)} of {different.size} elements differ) in\n{program!r}"
            )


def differences(found: Array, expected: Array, tolerance: float) -> Array:
    """Mask of elements that differ by more than `tolerance`, in arrays of one type; NaN equals NaN, -0 equals 0."""
    equal = (found == expected) | ((found != found) & (expected != expected))
    if not tolerance:
        return ~equal
    with np.errstate(all="ignore"):
        return ~equal & ~(np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= tolerance)
