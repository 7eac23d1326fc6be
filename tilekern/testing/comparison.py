"""The comparison of one call: the interpreter, every target and the reference, each against a float64 oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import (
    ArgumentError,
    DependencyError,
    FallbackWarning,
    InterpreterError,
    NotBatchableError,
    NotDifferentiableError,
    ResourceError,
    TargetError,
    TilekernError,
    UnsupportedError,
)
from tilekern.ir.core import Array
from tilekern.ir.types import F32, F64, dtype_name, kind_of
from tilekern.testing.calls import Call, with_dtype
from tilekern.testing.differences import derivative_problem
from tilekern.testing.layouts import known_to
from tilekern.testing.simulation import INTERPRETER, Simulation, longest_sum, run_at
from tilekern.testing.tolerance import bound_of, errors, unit_roundoff

REFUSALS = (TargetError, ResourceError, DependencyError, UnsupportedError, NotDifferentiableError, NotBatchableError)
"""Errors that say that a target, or a transformation, does not take a kernel. They are counted, not failures."""

# The naive error is doubled in results, and tripled in gradients.
_FACTOR, _FACTOR_OF_GRADIENTS = 2.0, 3.0

# A result that a change of the inputs in the last place moves may move so many times as far.
_STEADY, _SHAKES = 4.0, 3


@dataclass(frozen=True)
class Outcome:
    """The comparison of a call in one place.

    Attributes:
      where: "interpreter", the name of a target, or "here" for an ordinary call on this machine.
      dtype: the dtype that the call counts under.
      error: the largest error, in units of what the rule allows: 1 would just pass. 0 for integers.
      refused: the error by which the target refuses the kernel; "" if it ran.
      unsteady: the number of elements beyond the rule that a change of the inputs in their last place moves as far.
    """

    where: str
    dtype: str
    error: float = 0.0
    refused: str = ""
    unsteady: int = 0


class Disagreement(AssertionError):
    """Two backends, or a backend and the reference, compute different functions."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where, self.message = where, message


class Comparison:
    """A call of a function, and its expected results."""

    def __init__(self, function: Callable[..., Any], call: Call, reference: Callable[..., Any] | None = None) -> None:
        self.call, self._of, self._reference = call, function, reference
        self._function = call.function(function)
        self._interpreter = Simulation(INTERPRETER)

    def all(self, places: Sequence[str]) -> list[Outcome]:
        """The outcomes in some places, the interpreter first.

        Raises:
          Disagreement: a place gives something else.
          tilekern.errors.InterpreterError: the kernel itself is wrong: it races, or leaves elements unwritten.
        """
        with jax.enable_x64(self.call.needs_x64):
            outcomes = [self.at(place) for place in dict.fromkeys([INTERPRETER, *places])]
        if self.call.gradient:
            self._check_derivatives()
        return outcomes

    def _check_derivatives(self) -> None:
        """Check the derivatives of the kernel in float64 against each other and against differences."""
        forward = replace(self.call, gradient=False)
        if (gradients := self._own_in_float64) is None:
            return
        with jax.enable_x64(True):
            problem = derivative_problem(forward.function(self._of), _wide(self.call.arrays), gradients, self.call.seed)
        if problem:
            raise Disagreement(INTERPRETER, problem)

    def at(self, where: str) -> Outcome:
        """The outcome in one place."""
        dtype = dtype_name(self.call.dtype)
        try:
            outputs = self.interpreted if where == INTERPRETER else self._run(where)
        except REFUSALS as error:
            if where == INTERPRETER:
                raise
            return Outcome(where, dtype, refused=f"{type(error).__name__}: {error.summary}")
        worst, unsteady = 0.0, 0
        for number, out in enumerate(outputs):
            error, moved = self._judge(where, number, out)
            worst, unsteady = max(worst, error), unsteady + moved
        return Outcome(where, dtype, worst, unsteady=unsteady)

    def _run(self, where: str) -> list[Array]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            return run_at(where, self._function, *self.call.arrays)

    # --- expected results ---

    @cached_property
    def interpreted(self) -> list[Array]:
        """The results by the interpreter."""
        return self._interpreter.run(self._function, *self.call.arrays)

    @cached_property
    def _oracle(self) -> list[Array]:
        """The results in float64: of the reference, or of the kernel in the interpreter."""
        with jax.enable_x64(True):
            if self._reference is not None:
                return self._checked([np.asarray(x) for x in self._of_reference(None)(*_wide(self.call.arrays))])
        return self._own_in_float64 or [x.astype(F64) if kind_of(x.dtype) == "float" else x for x in self.interpreted]

    @cached_property
    def _own_in_float64(self) -> list[Array] | None:
        """The results of the kernel itself in float64, by the interpreter; None if it does not take float64."""
        try:
            with jax.enable_x64(True):
                return run_at(INTERPRETER, self._function, *_wide(self.call.arrays))
        except InterpreterError:
            raise
        except TilekernError:
            return None

    @cached_property
    def _low(self) -> list[Array]:
        """The results of the naive computation, which may be as wrong as the dtypes are coarse."""
        if self.call.dtype == F64:
            return self._low_of_float64
        if self._reference is None:
            return self.interpreted
        results = self._of_reference(self.call.dtype)(*self.call.arrays)
        return [np.asarray(x).astype(y.dtype) for x, y in zip(results, self.interpreted, strict=True)]

    @property
    def _low_of_float64(self) -> list[Array]:
        """The oracle, as wrong as float32 is for the same numbers, scaled by the ratio of the dtypes' roundoffs."""
        short = Comparison(self._function, _flat(with_dtype(self.call, F32)), None)
        ratio = unit_roundoff(F64) / unit_roundoff(F32)
        results: list[Array] = []
        for oracle, low, wide in zip(self._oracle, short.interpreted, short._oracle, strict=True):
            with np.errstate(all="ignore"):
                error = np.abs(low.astype(F64) - wide.astype(F64)) * ratio
            results.append(
                oracle + np.where(np.isfinite(error), error, 0) if kind_of(oracle.dtype) == "float" else oracle
            )
        return results

    def _of_reference(self, dtype: Any) -> Callable[..., list[Any]]:
        """The reference, batched and differentiated as the call is, with the keywords that it takes."""
        assert self._reference is not None
        computed_in = {} if dtype is None else {"dtype": dtype}
        keywords = known_to(self._reference, {**self.call.keywords, **computed_in})
        function = self.call.function(self._reference, keywords)
        return lambda *arrays: function(*(jnp.asarray(x) for x in arrays))

    def _checked(self, results: list[Array]) -> list[Array]:
        """The results of the reference, of the kernel's shapes."""
        shapes, kernel_shapes = [x.shape for x in results], [x.shape for x in self.interpreted]
        if shapes == kernel_shapes:
            return results
        raise ArgumentError(
            "the reference gives other shapes than the kernel",
            expected=f"results of the shapes {', '.join(map(str, kernel_shapes)) or '()'}",
            got=", ".join(map(str, shapes)) or "no results",
            fix="give a reference that returns the same arrays in the same order",
        )

    # --- the judgement ---

    def _judge(self, where: str, number: int, out: Array) -> tuple[float, int]:
        """The error of a result in units of the rule, and the number of its unsteady elements."""
        expected = self.interpreted[number]
        if (out.shape, out.dtype) != (expected.shape, expected.dtype):
            shown = f"{dtype_name(out.dtype)}{list(out.shape)}, not {dtype_name(expected.dtype)}{list(expected.shape)}"
            raise Disagreement(where, f"result {number} is {shown}")
        if kind_of(out.dtype) != "float":
            return self._judge_integers(where, number, out)
        oracle, low = self._oracle[number].astype(F64), self._low[number]
        factor = _FACTOR_OF_GRADIENTS if self.call.gradient else _FACTOR
        bound = bound_of(oracle, low, length=self._length, factor=factor) + _flushed(out)
        error = np.where(self._is_sure(low, oracle), errors(out, oracle), 0.0)
        if not (error > bound).any():
            return float(error.max(initial=0.0)) / bound if bound else 0.0, 0
        allowed = bound + _STEADY * self._movement(number)
        far = error > allowed
        if far.any():
            raise Disagreement(where, _message(number, out, oracle, error, allowed, far))
        steady = error <= bound
        return float(np.max(error, where=steady, initial=0.0)) / bound if bound else 0.0, int((~steady).sum())

    def _judge_integers(self, where: str, number: int, out: Array) -> tuple[float, int]:
        expected = self.interpreted[number]
        if where == INTERPRETER and self._reference is not None:
            expected = self._oracle[number]
        different = out != expected
        if not different.any():
            return 0.0, 0
        far = different & (self._movement(number) == 0)
        if far.any():
            raise Disagreement(where, _message(number, out, expected, different, np.zeros(out.shape), far))
        return 0.0, int(different.sum())

    def _is_sure(self, low: Array, oracle: Array) -> Array:
        """The elements where the naive computation overflows neither more nor less than the oracle, in its dtype."""
        return np.isfinite(errors(low, oracle))

    @cached_property
    def _length(self) -> int:
        _ = self.interpreted
        return max(
            [1, *map(longest_sum, self._interpreter.funcs), *(max(x.shape, default=1) for x in self.call.arrays)]
        )

    def _movement(self, number: int) -> Array:
        return self._movements[number]

    @cached_property
    def _movements(self) -> list[Array]:
        """How far the results move, in the interpreter, when the inputs change in their last place."""
        moved = [np.zeros(x.shape) for x in self.interpreted]
        for shake in range(_SHAKES):
            random = np.random.default_rng(shake)
            shaken = [_shaken(x, random) if kind_of(x.dtype) == "float" else x for x in self.call.arrays]
            again = Simulation(INTERPRETER).run(self._function, *shaken)
            moved = [np.maximum(m, _distance(x, y)) for m, x, y in zip(moved, again, self.interpreted, strict=True)]
        return moved


def _flushed(out: Array) -> float:
    """The largest number that a backend may take for zero: a subnormal one, where float32 or float64 computes."""
    return float(np.finfo(F64 if out.dtype == F64 else F32).tiny)


def _wide(arrays: Sequence[Array]) -> list[Array]:
    return [x.astype(F64) if kind_of(x.dtype) == "float" else x for x in arrays]


def _flat(call: Call) -> Call:
    """The call of a function that takes flat arrays and has its keywords, and is batched and differentiated."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.arrays]
    tree = _jax.structure(tuple(shapes))
    return replace(call, tree=tree, types=tuple(shapes), keywords={}, in_axes=None, gradient=False)


def _shaken(x: Array, random: np.random.Generator) -> Array:
    """The array, each element rounded up, down, or as it is: by one unit in its last place."""
    with np.errstate(all="ignore"):
        wide = x.astype(F64) * (1 + 2 * unit_roundoff(x.dtype) * random.integers(-1, 2, x.shape))
        return wide.astype(x.dtype)


def _distance(x: Array, y: Array) -> Array:
    """The distance of each two elements: inf where one is not finite and they differ, 0 where both are NaN."""
    with np.errstate(all="ignore"):
        left, right = x.astype(F64), y.astype(F64)
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        distance = np.abs(left - right)
    return np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))


def _message(number: int, out: Array, expected: Array, error: Array, allowed: Array, far: Array) -> str:
    """A message: the worst element of a result, its error, and the error allowed."""
    worst = np.unravel_index(int(np.argmax(np.where(far, error, -1.0))), out.shape)
    at = [int(i) for i in worst]
    return (
        f"result {number}, {dtype_name(out.dtype)}{list(out.shape)}, is wrong\n"
        f"  worst element: {at} is {out[worst].item()!r}, should be {expected[worst].item()!r}\n"
        f"  error: {float(error[worst]):.3e}, allowed: {float(allowed[worst]):.3e}\n"
        f"  wrong elements: {int(far.sum())} of {out.size}"
    )
