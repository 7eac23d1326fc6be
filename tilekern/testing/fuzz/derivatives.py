"""Derivatives of a random program: its tangents are JAX's, of the portable program; its backward pass the transpose.

⟨J v, w⟩ = ⟨v, Jᵀ w⟩
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.autodiff.activity import is_float
from tilekern.autodiff.backward import Backward, backward
from tilekern.autodiff.tangent import tangent
from tilekern.errors import NotDifferentiableError
from tilekern.ir.core import Array, Func
from tilekern.ir.index_vectors import guard_index_vectors
from tilekern.ir.interpret import interpret
from tilekern.ir.types import F64
from tilekern.ir.verify import verify
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.passes import pipeline
from tilekern.testing.programs import Program


def check(program: Program) -> str:
    """Check the derivatives of a program of float64, under `jax.enable_x64`.

    Returns:
      The check that was made, "tangents" or "transposes", or the reason why none was.

    Raises:
      AssertionError: a derivative is wrong.
    """
    # As the language does: lanes whose position was read outside of an array read and write nothing.
    guarded = guard_index_vectors(program.func)
    func = pipeline.run(guarded)
    floats = [p for p in func.inputs if is_float(p)]
    if program.seed % 2 or not floats or not any(map(is_float, func.outputs)):
        return "nothing to differentiate"
    moving = _drawn(program.seed, floats)
    try:
        along = pipeline.run(tangent(func, [is_float(p) for p in func.inputs]))
    except NotDifferentiableError as error:
        return error.summary.split(" ", 1)[1][:24]
    verify(along)
    found = interpret(along, *program.arrays, *moving, orders=1)
    expected = _by_jax(guarded, program.arrays, moving)
    results = [x for x, p in zip(program.expected, func.outputs, strict=True) if is_float(p)]
    for result, one, other in zip(results, found, expected, strict=True):
        # Where a result is not finite, its tangent depends on which zeros are known when the program is made.
        ours, theirs = (np.where(np.isfinite(result), x, 0) for x in (one, other))
        scale = max(1.0, float(np.abs(theirs, where=np.isfinite(theirs), out=np.zeros(theirs.shape)).max(initial=0)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9 * scale, err_msg=repr(program))
    if not all(np.isfinite(x).all() for x in found):
        return "tangents"
    try:
        made = backward(along, [False] * len(func.inputs) + [True] * len(floats), 1 << 30)
    except NotDifferentiableError:
        return "tangents"
    cotangents = _drawn(program.seed + 1, along.outputs)
    back = _pulled(made, program.arrays, cotangents)
    (there, size), (again, size_again) = _product(found, cotangents), _product(back, moving)
    assert abs(there - again) <= 1e-9 * max(1.0, size, size_again), f"⟨Jv,w⟩ = {there}, ⟨v,Jᵀw⟩ = {again}: {program!r}"
    return "transposes"


def _drawn(seed: int, refs: Sequence[Any]) -> list[Array]:
    random: Any = np.random.default_rng(seed)
    return [random.standard_normal(r.ref.shape) for r in refs]


def _pulled(backward_pass: Backward, primals: Sequence[Array], cotangents: Sequence[Array]) -> list[Array]:
    """The cotangents of the linear inputs, by the interpreter."""
    arrays = dict(zip(backward_pass.known, primals, strict=True)) | dict(
        zip(backward_pass.cotangents, cotangents, strict=True)
    )
    for stage in backward_pass.stages:
        verify(stage.func)
        outputs = interpret(stage.func, *(arrays[p] for p in stage.func.inputs), orders=1)
        arrays |= dict(zip(stage.results, outputs, strict=True))
    return [sum((arrays[p] for p in parts), np.zeros(())) for parts in backward_pass.results]


def _by_jax(func: Func, arrays: Sequence[Array], moving: Sequence[Array]) -> list[Array]:
    """The tangents of the outputs of floats, by JAX, of the portable program."""
    which = [n for n, p in enumerate(func.inputs) if is_float(p)]

    def of_floats(*floats: Any) -> list[Any]:
        float_of = dict(zip(which, floats, strict=True))
        results = run(func, *(jnp.asarray(float_of.get(n, x)) for n, x in enumerate(arrays)))
        return [r for r, p in zip(results, func.outputs, strict=True) if is_float(p)]

    def both(floats: Any, moving: Any) -> Any:
        return jax.jvp(of_floats, floats, moving)[1]

    compiled: Any = partial(jax.jit, compiler_options=_jax.UNOPTIMIZED)(both)
    return jax.device_get(compiled(tuple(arrays[n] for n in which), tuple(moving)))


def _product(left: Sequence[Array], right: Sequence[Array]) -> tuple[float, float]:
    """The inner product, and the sum of the magnitudes of its terms."""
    terms: list[Array] = [np.asarray(x * y, F64) for x, y in zip(left, right, strict=True)]
    return sum(float(t.sum()) for t in terms), sum(float(np.abs(t).sum()) for t in terms)
