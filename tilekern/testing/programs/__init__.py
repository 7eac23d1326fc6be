"""Random programs of the block IR, and the judgement of a backend's results for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tilekern.ir.core import Array, Func, Value
from tilekern.ir.index_vectors import guard_index_vectors
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import WriteOp
from tilekern.ir.types import DTYPES, DType
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.facts import Fact
from tilekern.testing.programs.values import Choose, draw_array

__all__ = ["FEATURES", "Program", "assert_agrees", "build", "inputs_of"]

DTYPES_OF_VALUES = tuple(DTYPES.values())
FEATURES = tuple(Generator.MOVES)
"""Features of programs beyond elementwise ops and plain loads and stores; leave out those that a backend rejects."""


class Made(Protocol):
    """A random Func that is made by choices."""

    seed: int

    @property
    def facts(self) -> Mapping[Value, Fact]:
        """Facts of the outputs of the Func, once it is made."""
        ...

    def func(self) -> Func:
        """Make the Func."""
        ...


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


def build(
    choose: Choose,
    features: Sequence[str] = FEATURES,
    dtypes: Sequence[DType] = DTYPES_OF_VALUES,
    make: Callable[[Choose, Sequence[str], Sequence[DType]], Made] = Generator,
) -> Program:
    """The program that some choices make."""
    generator = make(choose, features, dtypes)
    func = generator.func()
    if any(isinstance(op, WriteOp) and any(d.kind == "gather" for d in op.access.dims) for op in func.walk()):
        # As the language does: no lane writes at a position that was read outside of an array.
        func = guard_index_vectors(func)
    return Program(func, generator.seed, tuple(generator.facts[p].error for p in func.outputs))


def assert_agrees(program: Program, outputs: Sequence[Any]) -> None:
    """Assert that a backend's outputs are the interpreter's: bit for bit, but for signs of zero and what rounds.

    Raises:
      AssertionError: with the program as text, the seed of its inputs, and the first element that differs.
    """
    for number, (output, expected) in enumerate(zip(outputs, program.expected, strict=True)):
        actual, tolerance = np.asarray(output), program.tolerances[number]
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), f"output {number} of {program!r}"
        different = differences(actual, expected, tolerance)
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            name = program.func.outputs[number].name
            raise AssertionError(
                f"{name}{list(at)} is {actual[at]!r}, should be {expected[at]!r} (tolerance {tolerance:.3g}; "
                f"{np.count_nonzero(different)} of {different.size} elements differ) in\n{program!r}"
            )


def differences(actual: Array, expected: Array, tolerance: float) -> Array:
    """Mask of elements that differ by more than `tolerance`, in arrays of one type; NaN equals NaN, -0 equals 0."""
    equal = (actual == expected) | ((actual != actual) & (expected != expected))
    if not tolerance:
        return ~equal
    with np.errstate(all="ignore"):
        return ~equal & ~(np.abs(actual.astype(np.float64) - expected.astype(np.float64)) <= tolerance)
