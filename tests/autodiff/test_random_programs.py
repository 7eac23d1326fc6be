"""Random programs: their tangents are JAX's, of the portable program, and their backward passes the transposes.

⟨J v, w⟩ = ⟨v, Jᵀ w⟩
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import FEATURES, Program
from tests.programs.batches import sample
from tilekern.autodiff.activity import is_float
from tilekern.autodiff.backward import Backward, backward
from tilekern.autodiff.tangent import tangent
from tilekern.errors import NotDifferentiableError
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.types import F64
from tilekern.ir.verify import verify
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.passes import pipeline

_CHUNK = 60
_FAST = {"xla_backend_optimization_level": 0}


def drawn(seed: int, refs: Sequence[Any]) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(r.ref.shape) for r in refs]


def pulled(made: Backward, known: Sequence[Array], cotangents: Sequence[Array]) -> list[Array]:
    """The cotangents of the linear inputs, by the interpreter."""
    arrays = dict(zip(made.known, known, strict=True)) | dict(zip(made.cotangents, cotangents, strict=True))
    for stage in made.stages:
        verify(stage.func)
        found = interpret(stage.func, *(arrays[p] for p in stage.func.inputs), orders=1)
        arrays |= dict(zip(stage.results, found, strict=True))
    return [sum((arrays[p] for p in parts), np.zeros(())) for parts in made.results]


def jax_tangents(func: Func, arrays: Sequence[Array], moving: Sequence[Array]) -> list[Array]:
    """The tangents of the outputs of floats, by JAX, of the portable program."""
    which = [n for n, p in enumerate(func.inputs) if is_float(p)]

    def of_floats(*floats: Any) -> list[Any]:
        given = dict(zip(which, floats, strict=True))
        results = run(func, *(jnp.asarray(given.get(n, x)) for n, x in enumerate(arrays)))
        return [r for r, p in zip(results, func.outputs, strict=True) if is_float(p)]

    def both(floats: Any, moving: Any) -> Any:
        return jax.jvp(of_floats, floats, moving)[1]

    compiled = partial(jax.jit, compiler_options=_FAST)(both)
    return [np.asarray(x) for x in compiled(tuple(arrays[n] for n in which), tuple(moving))]


def product(some: Sequence[Array], others: Sequence[Array]) -> tuple[float, float]:
    """The inner product, and the sum of the magnitudes of its terms."""
    terms = [np.multiply(x, y) for x, y in zip(some, others, strict=True)]
    return sum(float(t.sum()) for t in terms), sum(float(np.abs(t).sum()) for t in terms)


def check(program: Program, seed: int, tally: Counter[str]) -> None:
    """Check the derivatives of a program; count what was checked, and what is refused."""
    func = pipeline.run(program.func)
    floats = [p for p in func.inputs if is_float(p)]
    if not floats or not any(map(is_float, func.outputs)):
        tally["nothing to differentiate"] += 1
        return
    moving = drawn(seed, floats)
    try:
        along = pipeline.run(tangent(func, [is_float(p) for p in func.inputs]))
    except NotDifferentiableError as error:
        tally[error.summary.split(" ", 1)[1][:24]] += 1
        return
    verify(along)
    found = interpret(along, *program.arrays, *moving, orders=1)
    expected = jax_tangents(program.func, program.arrays, moving)
    for ours, theirs in zip(found, expected, strict=True):
        scale = max(1.0, float(np.abs(theirs, where=np.isfinite(theirs), out=np.zeros(theirs.shape)).max(initial=0)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9 * scale, err_msg=repr(program))
    tally["tangents"] += 1
    if not all(np.isfinite(x).all() for x in found):
        return
    try:
        made = backward(along, [False] * len(func.inputs) + [True] * len(floats), 1 << 30)
    except NotDifferentiableError as error:
        tally[error.summary.split(" ", 1)[1][:24]] += 1
        return
    cotangents = drawn(seed + 1, along.outputs)
    back = pulled(made, program.arrays, cotangents)
    there, size = product(found, cotangents)
    again, size_again = product(back, moving)
    assert abs(there - again) <= 1e-9 * max(1.0, size, size_again), repr(program)
    tally["transposes"] += 1


@pytest.mark.sweep(15)
@pytest.mark.parametrize("chunk", range(30))
def test_tangents_are_those_of_jax_and_backward_passes_their_transposes(chunk: int) -> None:
    tally = Counter[str]()
    with jax.enable_x64(True):
        for seed in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
            # Even seeds have no NaN and no infinities in their inputs.
            program, _ = sample(seed, features=FEATURES, dtypes=(F64,))
            if program.seed % 2 == 0:
                check(program, seed, tally)
    assert tally["transposes"] >= _CHUNK // 10, tally
