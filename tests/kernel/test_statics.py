"""Static arguments: the keys that tell them apart."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.lang.checks import like_first, numbers
from tilekern.kernel.statics import static_key

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = numbers(6)
Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Factor:
    value: Any


@dataclass(frozen=True)
class Named:
    """Its name is compared; its notes are not; its options are compared, and not hashed."""

    name: str
    options: list[Any] = field(default_factory=list, hash=False)
    notes: Any = field(default=None, compare=False)


# --- what a key tells apart -----------------------------------------------------------------------------------------

SCALARS = [0, 1, False, True, 0.0, -0.0, 1.0, float("inf"), None, "1"]
SCALARS += [np.float32(0), np.float32(-0.0), np.float64(0), np.float64(-0.0), np.int8(1), np.int64(1)]


def test_a_key_tells_apart_what_python_does_not() -> None:
    """`repr` shows the difference of 1, True and 1.0, and of 0.0 and -0.0."""
    values = [*SCALARS, *((v,) for v in SCALARS), *((0, (v,)) for v in SCALARS)]
    values += [wrap(v) for wrap in (Factor, lambda v: Factor((0, v)), lambda v: Pair(v, 0)) for v in SCALARS]
    values += [frozenset([v]) for v in SCALARS]
    for a, b in product(values, values):
        assert (static_key({"n": a}) == static_key({"n": b})) == (repr(a) == repr(b)), (a, b)


def test_nan_is_one_key() -> None:
    assert static_key({"n": float("nan")}) == static_key({"n": float("nan")})


def test_fields_that_are_not_compared_or_not_hashed() -> None:
    a, b = static_key({"n": Named("a", [1], notes=1)}), static_key({"n": Named("a", [1], notes=1.0)})
    assert a == b and hash(a) == hash(b)
    assert a != static_key({"n": Named("a", [2])}) and a != static_key({"n": Named("b", [1])})


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0),
        (0.0, -0.0),
        ((1,), (True,), (1.0,)),
        (("a", 0.0), ("a", -0.0)),
        (Factor(1), Factor(True), Factor(1.0), Factor(-1.0)),
        (Factor((0, 1)), Factor((0, 1.0))),
        (Factor(Factor(0.0)), Factor(Factor(-0.0))),
    ],
)
def test_static_arguments_that_are_equal_in_python(values) -> None:
    @like_first
    def code(x, out, *, value: Any):
        out[...] = x[...] * 0 + _code(value)

    for _ in range(2):
        assert [float(code(X, value=v)[0]) for v in values] == [_code(v) for v in values]


def _code(value: Any) -> float:
    if isinstance(value, Factor):
        return 10 * _code(value.value)
    inner = value[-1] if isinstance(value, tuple) else value
    return {bool: 1, int: 2, float: 3}[type(inner)] * float(np.copysign(1, inner))
