"""The derived kernels on the accelerators' backends: their programs, interpreted, agree; and they compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.autodiff.kernels import CASES, Case
from tilekern.ir.types import kind_of
from tilekern.kernel.stages import Traced

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


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
