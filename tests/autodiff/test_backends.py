"""The derived kernels on the accelerators' backends: their programs, interpreted, agree; and they compile."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tests.autodiff.kernels import CASES, Case
from tests.lower.library import CASES as LIBRARY
from tests.lower.library import NAMES, family_of
from tilekern.ir.types import kind_of
from tilekern.kernel.derived import backward_family, tangent_family
from tilekern.kernel.stages import Traced
from tilekern.lower.target import resolve

TARGETS = ("cuda:sm_90", "tpu:v5e")


def kernels(case: Case, target: str) -> list[Traced]:
    """The kernels of both modes, with the blocks of the target."""
    arrays = (*case.arrays(dtype=np.float32), *case.rest)
    gradient = case.kernel.trace(*arrays, target=target).gradient()
    return [gradient.tangent, *gradient.backward]


def inputs(case: Case, traced: Traced) -> list[Any]:
    """Random arrays for the inputs of a derived kernel; those of the case that are no floats."""
    random = np.random.default_rng(0)
    known = {(x.shape, x.dtype): x for x in case.rest}
    refs = [p.ref for p in traced.ir.inputs]
    return [
        known[r.shape, r.dtype] if kind_of(r.dtype) != "float" else random.standard_normal(r.shape).astype(r.dtype)
        for r in refs
    ]


every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
targets = pytest.mark.parametrize("target", TARGETS)


@pytest.mark.sweep(5)
@targets
@every
def test_programs_agree_with_the_interpreter(case: Case, target: str) -> None:
    for traced in kernels(case, target):
        arrays = inputs(case, traced)
        expected = traced.interpret(*arrays)
        found = traced.lower(target).interpret(*arrays)
        for ours, theirs in zip(_tuple(found), _tuple(expected), strict=True):
            # Both round each of some hundred terms to float32, in other orders.
            scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * scale)


@pytest.mark.sweep(5)
@targets
@every
def test_programs_compile(case: Case, target: str) -> None:
    for traced in kernels(case, target):
        assert traced.lower(target).compile().asm


@pytest.mark.sweep(6)
@targets
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_the_library_compile(name: str, target: str) -> None:
    """Derived as if none were stated, with the blocks that the kernels have for a small case."""
    family, machine = family_of(name, LIBRARY[name][0].small(), "bfloat16"), resolve(target)
    moving = tuple(kind_of(t.dtype) == "float" for t in family.types)
    tangent = tangent_family(family, moving)
    backward = backward_family(tangent, (*(False for _ in moving), *(True for moves in moving if moves)))
    for made in (tangent, *backward.stages(machine)):
        assert cast(Any, made.lowered(machine)).compile().asm


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
