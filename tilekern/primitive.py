"""The JAX primitive: one call of a kernel in a JAX program.

`kernel_call_p` carries a `Family`, the kernel for given argument types. Which member of the family runs, with which
blocks, is decided when the call is lowered, for then the platform is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import jax

from tilekern import _jax
from tilekern.errors import NotBatchableError, NotDifferentiableError


class Family(Protocol):
    """What the primitive needs to know of a kernel for given argument types."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        ...

    @property
    def outputs(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The types of the results."""
        ...

    @property
    def call(self) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program, one and the same object each time, so that many calls share one computation."""
        ...

    @property
    def eager(self) -> Callable[..., Sequence[jax.Array]]:
        """A jitted function that binds the primitive, for calls outside of jit; made once."""
        ...


def _types(*operands: Any, family: Family) -> list[_jax.ShapedArray]:
    return [_jax.ShapedArray(o.shape, o.dtype) for o in family.outputs]


def _run(*operands: Any, family: Family) -> Sequence[jax.Array]:
    return family.call(*operands)


def _eager(*operands: Any, family: Family) -> Sequence[jax.Array]:
    return family.eager(*operands)


def _no_derivative(primals: Any, tangents: Any, *, family: Family) -> NoReturn:
    raise NotDifferentiableError(
        f"the kernel {family.name} has no derivative",
        expected="a call outside of jax.grad, jax.vjp and jax.jvp",
        got=f"{family.name} under differentiation",
        fix="wrap the call in jax.custom_vjp with a backward pass, or stop gradients of its inputs (lax.stop_gradient)",
    )


def _no_batching(operands: Any, dims: Any, *, family: Family) -> NoReturn:
    raise NotBatchableError(
        f"the kernel {family.name} has no batching rule",
        expected="a call outside of jax.vmap",
        got=f"{family.name} under jax.vmap",
        fix="give the arrays a batch dim and the kernel a tk.parallel axis for it, or use jax.lax.map",
    )


kernel_call_p = _jax.primitive("tilekern_call", _types, multiple_results=True)
kernel_call_p.def_impl(_eager)
_jax.register_lowering(kernel_call_p, _run)
_jax.register_rules(kernel_call_p, jvp=_no_derivative, batch=_no_batching)
