"""The JAX primitive: one call of a kernel in a JAX program.

`kernel_call_p` carries a `Family`, the kernel for given argument types. The member of the family that runs, and
its blocks, are chosen when the call is lowered: then the platform is known.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes


class Family(Protocol):
    """A kernel or op for given argument types, as the primitive needs it."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        ...

    @property
    def outputs(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The types of the results."""
        ...

    def call(self, platform: str, site: _meshes.Site) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program for a platform, one and the same object each time: many calls share one computation."""
        ...

    @property
    def eager(self) -> Callable[..., Sequence[jax.Array]]:
        """A jitted function that binds the primitive, for calls outside of jit; made once."""
        ...

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        """The family of `size` calls at once, results stacked in dim 0; and for each operand its batch dim, or None."""
        ...

    def divided(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of a call whose operands are divided by explicit axes of a mesh."""
        ...

    def types_on_mesh(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The types of the results of such a call, if `divided` binds the primitive."""
        ...

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[Sequence[Any], Sequence[Any | None]]:
        """The results and their tangents; None stands for a tangent that is zero."""
        ...

    def transpose(self, cotangents: Sequence[Any | None], operands: Sequence[Any]) -> Sequence[Any | None]:
        """The cotangents of operands that are a `jax.ShapeDtypeStruct`, in which the results are linear."""
        ...


def _types(*operands: _jax.ShapedArray, family: Family) -> list[_jax.ShapedArray]:
    if any(map(_meshes.is_divided, operands)):
        return list(family.types_on_mesh(operands))
    return _meshes.result_types(kernel_call_p.name, operands, family.outputs)


def _run(platform: str, site: _meshes.Site, *operands: Any, family: Family) -> Sequence[jax.Array]:
    with _jax.own_functions():
        return family.call(platform, site)(*operands)


# Runs a call outside of jit, in the place of XLA.
type Runner = Callable[[Any, Sequence[Any]], Sequence[Any]]

_runner: ContextVar[Runner | None] = ContextVar("tilekern_runner", default=None)


def _eager(*operands: Any, family: Family) -> Sequence[jax.Array]:
    runner = _runner.get()
    with jax.disable_jit(False):  # else jit would run this function again
        return family.eager(*operands) if runner is None else runner(family, operands)


@contextmanager
def calls_run_by(runner: Runner) -> Generator[None]:
    """A context in which `runner(family, operands)` runs all calls, without `jax.jit`, so that operands are known."""
    token = _runner.set(runner)
    try:
        with jax.disable_jit():
            yield
    finally:
        _runner.reset(token)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any | None], *, family: Family) -> tuple[Any, Any]:
    with _jax.own_functions():
        return family.jvp(primals, tangents)


def _transpose(cotangents: Sequence[Any | None], operands: Sequence[Any], *, family: Family) -> Sequence[Any | None]:
    with _jax.own_functions():
        return family.transpose(cotangents, operands)


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, family: Family) -> tuple[Any, list[int]]:
    """vmap: one call of the batched family; operands that no call writes to are not copied."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    with _jax.own_functions():
        batched, batch_dims = family.batched(size, tuple(dims))
        stacked = [_stacked(x, d, w, size) for x, d, w in zip(operands, dims, batch_dims, strict=True)]
        results = call(batched, *stacked)
    return results, [0] * len(results)


def _stacked(x: Any, dim: int | None, batch_dim: int | None, size: int) -> Any:
    if dim is None and batch_dim is not None:
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    return x if dim is None or batch_dim is None or dim == batch_dim else jnp.moveaxis(x, dim, batch_dim)


def call(family: Any, *operands: Any) -> list[Any]:
    """The results of a call of a `Family`."""
    aligned = _meshes.alike(operands)
    if any(_meshes.is_divided(jax.typeof(x)) for x in aligned):
        traced = any(isinstance(x, _jax.Tracer) for x in aligned)
        return list(family.divided(aligned) if traced else family.eager(*aligned))
    return _jax.bind(kernel_call_p, *aligned, family=family)


def calls_in(jaxpr: _jax.Jaxpr) -> list[tuple[Any, list[jax.ShapeDtypeStruct]]]:
    """The families that a jaxpr calls, in order, with the types of the operands; calls in nested jaxprs count."""
    calls: list[Any] = [eqn for eqn in _jax.equations(jaxpr) if eqn.primitive is kernel_call_p]
    return [(e.params["family"], [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.invars]) for e in calls]


kernel_call_p = _jax.primitive("tilekern_call", _types, multiple_results=True)
_jax.forget_parameters(kernel_call_p)
kernel_call_p.def_impl(_eager)
for _platform in (None, "cpu", "cuda", "rocm", "tpu"):
    _jax.register_lowering(kernel_call_p, partial(_run, _platform or "any other"), _platform)
_jax.register_rules(kernel_call_p, batch=_batch)
_jax.register_derivatives(kernel_call_p, _jvp, _transpose)
