"""Trace a kernel's body to a Func."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import ConcreteValueError, OutputError, TilekernError, TileScopeError, TraceError, UnsupportedError
from tilekern.ir.core import Block, Func, Value, index_value
from tilekern.ir.memory import Store
from tilekern.ir.types import DType, RefType, Role
from tilekern.ir.verify import verify
from tilekern.lang.importer import Importer
from tilekern.lang.primitives import program_index_p
from tilekern.lang.refs import Ref
from tilekern.lang.state import TraceState, tracing


@dataclass(frozen=True)
class Param:
    """An array of the kernel before it has a value: where in the signature it stands, and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role


@dataclass(frozen=True)
class Tracing:
    """A traced body.

    Attributes:
      func: the Func, verified; its inputs are the params', then one for each captured array.
      captured: arrays that the body closes over.
    """

    func: Func
    captured: tuple[Any, ...]

    @property
    def captures_tracers(self) -> bool:
        """Whether a captured array is itself being traced, so that this trace serves one call only."""
        return any(isinstance(array, _jax.Tracer) for array in self.captured)


def trace(
    function: Callable[..., Any],
    name: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    loc: source.Loc,
) -> Tracing:
    """Trace `function(*arguments, **keywords)`, where the leaves of `arguments` are `Param`s."""
    params, tree = _jax.flatten(arguments)
    state = TraceState(name)

    def body(*tokens: Any) -> tuple[()]:
        refs = [Ref(t, RefType(p.shape, p.dtype, p.role), p.name) for t, p in zip(tokens, params, strict=True)]
        returned = function(*jax.tree.unflatten(tree, refs), **keywords)
        if returned is not None:
            raise OutputError(
                f"the body of {name} returned a value",
                expected="None: outputs are stored to the last parameters",
                got=f"returned {type(returned).__name__}",
                fix="store it: out[...] = value",
            )
        return ()

    with tracing(state), _explained(name):
        jaxpr = _jax.make_jaxpr(body, *[jax.ShapeDtypeStruct((), jnp.int32)] * len(params))
    return _assemble(jaxpr, name, params, state, loc)


def _assemble(jaxpr: Any, name: str, params: list[Param], state: TraceState, loc: source.Loc) -> Tracing:
    refs = [Value(RefType(p.shape, p.dtype, p.role), p.name) for p in params]
    grid = tuple(index_value(axis.name) for axis in state.axes)
    _check_axes(jaxpr, len(grid))
    importer = Importer(grid)

    def region(*_: Value) -> tuple[Value, ...]:
        return importer.run(jaxpr, refs)

    with source.at(loc):
        block = importer.block(grid, region)
    captured = [param for _, param in importer.captured]
    inputs = [r for r in refs if r.ref.role == "in"]
    outputs = [r for r in refs if r.ref.role != "in"]
    func = Func(name, (*inputs, *captured, *outputs), tuple(state.axes), Block(grid, block.ops, ()), loc)
    _check_stores(func, state)
    verify(func)
    return Tracing(func, tuple(array for array, _ in importer.captured))


def _check_axes(jaxpr: Any, axes: int) -> None:
    """Grid axes must be declared by equations of the body itself, in this trace."""
    declared = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is program_index_p]
    if len(declared) == axes:
        return
    raise TraceError(
        "tk.parallel is called inside a loop, a branch or a jitted function",
        expected="grid axes declared at the top of the kernel's body",
        got=f"{axes} axes, {len(declared)} of them at the top",
        fix="declare the axis at the top and pass the tile on",
    )


def _check_stores(func: Func, state: TraceState) -> None:
    stores = [op for op in func.walk() if isinstance(op, Store)]
    kept = {op.loc for op in stores}
    for loc in state.stores:
        if loc not in kept:
            with source.at(loc):
                raise TraceError(
                    "a store was lost: JAX dropped it while transforming the function around it",
                    expected="stores outside of functions given to jax.vjp, jax.grad, jax.linearize or jax.checkpoint",
                    got="a store inside such a function",
                    fix="return the value from the function and store it afterwards",
                )
    written = {op.ref for op in stores}
    for output in func.outputs:
        if output not in written and 0 not in output.ref.shape:
            with source.at(func.loc):
                raise OutputError(
                    f"the output {output.name} is never stored to",
                    expected=f"a store to every element of {output.name}: {output.ref}",
                    got="no store",
                    fix=f"store it, {output.name}[...] = value, or leave it out of out_type",
                )


@contextmanager
def _explained(name: str) -> Generator[None]:
    """Turn JAX's errors about tracers into ours, at the user's line."""
    try:
        yield
    except TilekernError:
        raise
    except jax.errors.UnexpectedTracerError as error:
        with source.at(_jax.loc_of_exception(error.__traceback__)):
            raise TileScopeError(
                "a traced value is used outside the loop or the function that made it",
                expected="values of the body that is being traced",
                got="a value of a loop body (or trace) that has ended",
                fix="carry the value out: return it from the body of the fold",
            ) from error
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        with source.at(_jax.loc_of_exception(error.__traceback__)):
            raise ConcreteValueError(
                f"the body of {name} asks for the concrete value of a traced one",
                expected="Python control flow over static values only (shapes, keyword-only arguments)",
                got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="use jnp.where, lax.cond, tk.fold or lax.while_loop; or make the value a keyword-only argument",
            ) from error
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        with source.at(_jax.loc_of_exception(error.__traceback__)):
            raise UnsupportedError(
                "a fold cannot be differentiated in reverse mode inside a kernel",
                expected="jax.vjp or jax.grad of a function of tiles without folds",
                got="a tk.fold (or a loop with traced bounds) inside of it",
                fix="differentiate the body of the fold, and fold over its derivative",
            ) from cast(Exception, error)
