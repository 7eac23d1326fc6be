"""The derived kernels on the accelerators' backends: their programs, interpreted, agree; and they compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from tests.autodiff.kernels import CASES, Case
from tests.lower.library import CASES as LIBRARY
from tests.lower.library import DIFFERENTIABLE, family_of
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.types import kind_of
from tilekern.kernel.derived_rules import BackwardPass, tangent_of
from tilekern.kernel.instance import Instance
from tilekern.kernel.stages import Traced
from tilekern.lower.lowering import lower
from tilekern.lower.target import resolve

TARGETS = ("cuda:sm_90", "tpu:v5e")


def kernels(case: Case, target: str) -> list[Traced]:
    """The kernels of both modes, with the blocks of the target."""
    arrays = (*case.arrays(dtype=np.float32), *case.rest)
    gradient = case.kernel.trace(*arrays, target=target).gradient()
    return [gradient.tangent, *gradient.backward]


def inputs(func: Func, rest: Sequence[Any] = ()) -> list[Any]:
    """Random floats for the inputs of a derived kernel; for other inputs an array of `rest` that fits, or zeros."""
    random = np.random.default_rng(0)
    known = {(x.shape, x.dtype): x for x in rest}
    refs = [p.ref for p in func.inputs]
    return [
        random.standard_normal(r.shape).astype(r.dtype)
        if kind_of(r.dtype) == "float"
        else known.get((r.shape, r.dtype), np.zeros(r.shape, r.dtype))
        for r in refs
    ]


def check(func: Func, lowering: Any, arrays: Sequence[Any]) -> None:
    """Compare a program with the interpreter."""
    for ours, theirs in zip(lowering.interpret(*arrays), interpret(func, *arrays), strict=True):
        # Both round each of some hundred terms to float32, in other orders.
        scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * scale)


every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
targets = pytest.mark.parametrize("target", TARGETS)


@pytest.mark.sweep(5)
@targets
@every
def test_programs_agree_with_the_interpreter(case: Case, target: str) -> None:
    for traced in kernels(case, target):
        lowering = lower(traced.ir, resolve(target), {})
        check(lowering.func, lowering, inputs(traced.ir, case.rest))


@pytest.mark.sweep(5)
@targets
@every
def test_programs_compile(case: Case, target: str) -> None:
    for traced in kernels(case, target):
        assert traced.lower(target).compile().asm


def derived(name: str, dtype: str, target: str) -> list[Instance]:
    """The kernels of both modes of a library kernel, derived as if none were stated, for a small case."""
    family = family_of(name, LIBRARY[name][0].small(), dtype)
    moving = tuple(kind_of(t.dtype) == "float" for t in family.types)
    tangent = tangent_of(family, moving)
    backward = BackwardPass(tangent, (*(False for _ in moving), *(True for moves in moving if moves)))
    return [tangent, *backward.stages(resolve(target))]


@pytest.mark.sweep(6)
@targets
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.slow
def test_derivatives_of_the_library_compile(name: str, target: str) -> None:
    for family in derived(name, "bfloat16", target):
        assert cast(Any, family.lowered(resolve(target))).compile().asm


BOUNDED: dict[str, dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "selective_scan": {"a": lambda x: -np.abs(x)},
    "gated_delta_rule": {
        "log_decay": lambda x: -np.abs(x),
        "key": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True),
        "beta": lambda x: np.abs(np.sin(x)),
    },
}


@pytest.mark.sweep(9)
@targets
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives_of_the_library_agree_with_the_interpreter(name: str, target: str) -> None:
    for family in derived(name, "float32", target):
        func = family.func(resolve(target))
        arrays = inputs(func)
        # States grow without bound where a rate is above zero, or where beta times the square of a key is above two.
        change = BOUNDED.get(name, {})
        arrays = [change.get(p.name, np.asarray)(x) for p, x in zip(func.inputs, arrays, strict=True)]
        check(func, family.lowered(resolve(target)), arrays)
