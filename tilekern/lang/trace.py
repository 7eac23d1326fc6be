"""Trace a kernel's body to a Func."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import (
    CarryError,
    ConcreteValueError,
    IndexingError,
    OutputError,
    TilekernError,
    TraceError,
    UnsupportedError,
)
from tilekern.ir.control import Hoist
from tilekern.ir.core import Block, Func, Op, Value, definitions, index_value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.index_vectors import guard_index_vectors
from tilekern.ir.memory import Load, WriteOp
from tilekern.ir.records import record
from tilekern.ir.types import DType, RefType, Role, packed_type
from tilekern.ir.verify import verify
from tilekern.lang.collisions import check_collisions
from tilekern.lang.coverage import check_coverage
from tilekern.lang.importer import Importer, escaped, unknown_size
from tilekern.lang.refs import Ref
from tilekern.lang.state import TraceState, tracing
from tilekern.lang.tiles import describe
from tilekern.lang.unwritten import check_loads

# Errors that JAX raises where Python needs the value of a tracer.
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Parts of JAX's messages about loops and branches whose types do not fit.
_MISMATCHES = (
    *("carry input and carry output must", "branches must have equal output", "branch outputs must have the same"),
    *("must return a boolean scalar", "Pred must be a scalar"),
)
# Parts of JAX's and NumPy's messages about integers that are too large for the dtype of the other operand.
_OVERFLOWS = ("An overflow was encountered", "Python int", "out of bounds for")


@record
class Param:
    """Array parameter of a kernel: its place in the signature, and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role


@record
class Tracing:
    """Result of a trace.

    Attributes:
      func: the verified Func. Its inputs are the inputs among the params, then one for each captured array.
      captured: arrays that the body closes over and that became operands.
    """

    func: Func
    captured: tuple[Any, ...]

    @property
    def captures_tracers(self) -> bool:
        """True if a captured array is itself a tracer; this trace then serves one call only."""
        return any(isinstance(array, _jax.Tracer) for array in self.captured)


def trace(
    function: Callable[..., Any],
    name: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    loc: source.Loc,
) -> Tracing:
    """Trace `function(*arguments, **keywords)`. The leaves of `arguments` are `Param`s."""
    params, tree = _jax.flatten(arguments)
    state = TraceState(name, function)

    def body(*tokens: Any) -> tuple[()]:
        state.top = _jax.current_trace()
        refs = [Ref(t, RefType(p.shape, p.dtype, p.role), p.name) for t, p in zip(tokens, params, strict=True)]
        returned = function(*jax.tree.unflatten(tree, refs), **keywords)
        with source.at(loc):
            _check_returned(name, returned)
        return ()

    with tracing(state), _explained(name):
        jaxpr = _jax.make_jaxpr(body, *[jax.ShapeDtypeStruct((), jnp.int32)] * len(params))
    return _assemble(jaxpr, name, params, state, loc)


def _check_returned(name: str, returned: Any) -> None:
    if returned is None:
        return
    raise OutputError(
        f"the body of {name} returned a value",
        expected="None: outputs are stored to the last parameters",
        got=f"returned {describe(returned)}",
        fix="store it: out[...] = value",
    )


def _assemble(jaxpr: Any, name: str, params: list[Param], state: TraceState, loc: source.Loc) -> Tracing:
    refs = [Value(RefType(*packed_type(p.shape, p.dtype), p.role), p.name) for p in params]
    grid = tuple(index_value(axis.name) for axis in state.axes)
    importer = Importer(grid)

    def region(*_: Value) -> tuple[Value, ...]:
        return importer.run(jaxpr, refs)

    with source.at(loc):
        block = importer.block(grid, region)
    captured = [param for _, param in importer.captured]
    inputs = [r for r in refs if r.ref.role in ("in", "inout")]
    outputs = [r for r in refs if r.ref.role not in ("in", "inout")]
    traced = Func(name, (*inputs, *captured, *outputs), tuple(state.axes), Block(grid, block.ops, ()), loc)
    func = guard_index_vectors(traced)
    _check_stores(func, state)
    _check_hoists(func)
    check_loads(func)
    check_coverage(func)
    check_collisions(func)
    verify(func)
    return Tracing(func, tuple(_jax.snapshot(array) for array, _ in importer.captured))


def _check_hoists(func: Func) -> None:
    """Refuse hoists that depend on a loop around them, or on an array that programs write."""
    defined = definitions(func)
    for hoist in (op for op in func.walk() if isinstance(op, Hoist)):
        visible: set[Value] = {*func.params, *func.body.args}
        pending: list[Op] = [hoist]
        while pending:
            outer = pending.pop()
            ops = list(outer.walk())
            visible.update(*(op.results for op in ops), *(region.args for op in ops for region in op.regions))
            for value in outer.uses():
                if value not in visible:
                    if value not in defined:
                        raise _not_hoistable(hoist, "a value of a loop around it")
                    pending.append(defined[value])
            for load in ops:
                if isinstance(load, Load) and load.ref.ref.role != "in":
                    raise _not_hoistable(hoist, f"a load of {load.ref.name}, which programs write")
        for write in hoist.walk():
            if isinstance(write, WriteOp):
                raise _not_hoistable(hoist, f"a store to {write.ref.name}")


def _not_hoistable(hoist: Op, got: str) -> TraceError:
    with source.at(hoist.loc):
        return TraceError(
            "a hoisted value may depend on grid indices and inputs only",
            expected="loads of inputs at places that follow from tk.parallel, and what is computed from them",
            got=got,
            fix="compute it in the body, without tk.hoist",
        )


def _check_stores(func: Func, state: TraceState) -> None:
    effect_locs = {replace(op.loc, region="") for op in func.walk() if isinstance(op, (WriteOp, Print, Assert))}
    for loc, kind in state.effects.items():
        if loc not in effect_locs:
            with source.at(loc):
                raise TraceError(
                    f"a {kind} was lost: JAX dropped it while transforming the function around it",
                    expected=f"{kind}s outside of functions given to jax.vjp, jax.grad, jax.linearize, jax.checkpoint",
                    got=f"a {kind} inside such a function",
                    fix=f"return the value from the function and {kind} it afterwards",
                )
    written = {op.ref for op in func.walk() if isinstance(op, WriteOp)}
    for output in func.outputs:
        if output.ref.role == "out" and output not in written and 0 not in output.ref.shape:
            with source.at(func.loc):
                raise OutputError(
                    f"the output {output.name} is never stored to",
                    expected=f"a store to every element of {output.name}: {output.ref}",
                    got="no store",
                    fix=f"store it, {output.name}[...] = value, or leave it out of out_type",
                )


@contextmanager
def _explained(name: str) -> Generator[None]:
    """Turn JAX's errors about tracers and loops into tilekern's, at the user's line."""
    try:
        yield
    except TilekernError:
        raise
    except Exception as error:
        with source.at(_jax.loc_of_exception(error.__traceback__)):
            explained = _explain(name, error)
        if explained is None:
            raise
        raise explained from error


def _explain(name: str, error: Exception) -> TilekernError | None:
    text = str(error).partition("\n\nRevise")[0]
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return escaped()
    if isinstance(error, _CONCRETE) or "Shapes must be 1D sequences of concrete values" in text:
        if isinstance(error, jax.errors.TracerArrayConversionError):
            return _given_to_numpy(name, text)
        return ConcreteValueError(
            f"the body of {name} asks for the concrete value of a traced one",
            expected="Python control flow over static values only (shapes, keyword-only arguments)",
            got=f"{type(error).__name__}: {text.partition(chr(10))[0]}",
            fix="use jnp.where, lax.cond, tk.fold or lax.while_loop; or make the value a keyword-only argument",
        )
    if isinstance(error, ValueError) and "Invalid integer data type 'V'" in text:  # NumPy's words for int4 and uint4
        return UnsupportedError(
            "a function of jax.numpy does not take integers of 4 bits",
            expected="casts, comparisons and choices of 4-bit numbers, and what moves them",
            got=f"{type(error).__name__}: {text}",
            fix="cast before, with .astype(jnp.int8)",
        )
    if isinstance(error, jax.errors.InconclusiveDimensionOperation):
        return unknown_size(text.partition("\n")[0])
    if "Reverse-mode differentiation does not work" in text:
        return UnsupportedError(
            "a fold cannot be differentiated in reverse mode inside a kernel",
            expected="jax.vjp or jax.grad of a function of tiles without folds",
            got="a tk.fold (or a loop with traced bounds) inside of it",
            fix="differentiate the body of the fold, and fold over its derivative",
        )
    return _of_values(name, error, text) or _of_types(error, text)


def _given_to_numpy(name: str, text: str) -> ConcreteValueError:
    return ConcreteValueError(
        f"the body of {name} gives a tile to NumPy, which needs its value",
        expected="functions of jax.numpy and jax.lax for tiles; of NumPy for static values only",
        got=f"TracerArrayConversionError: {text.partition(chr(10))[0]}",
        fix="write jnp in the place of np",
    )


def _of_values(name: str, error: Exception, text: str) -> TraceError | None:
    """Make the error for a value of the wrong kind."""
    first = f"{type(error).__name__}: {text.partition(chr(10))[0]}"
    first = first if len(first) <= 300 else first[:297] + "..."
    if isinstance(error, OverflowError) and any(part in text for part in _OVERFLOWS):
        return TraceError(
            "a Python integer does not fit the dtype of the tile that it meets",
            expected="integers that the dtype holds; for a float tile, floats",
            got=first,
            fix="use a float, such as 2.0**100, or cast the tile with .astype to a wider dtype",
        )
    if isinstance(error, IndexError) and "valid indices" in text:
        return IndexingError(
            "an array that is no ref is indexed by what JAX and NumPy do not know",
            expected="a Tile as an index of a ref; static integers and slices, or integer arrays, of any other array",
            got=first,
            fix="pass the array as an argument of the kernel and index its ref there",
        )
    if isinstance(error, TypeError) and "Tracer.__format__" in text:
        return ConcreteValueError(
            f"the body of {name} formats a traced value, which has none yet",
            expected="tk.debug_print with the format, which prints while the kernel runs",
            got=first,
            fix='write tk.debug_print("{:.2f}", x) in the place of an f-string',
        )
    if isinstance(error, TypeError) and any(f"{kind}'" in text for kind in ("lang.tiles.Tile", "lang.refs.Ref")):
        return TraceError(
            "a Tile or a ref is used where an array is needed",
            expected="what was loaded, ref[tile]; or tile.start, tile.index or tile.indices",
            got=first,
            fix="load the ref; use tile.indices for the positions of a Tile",
        )
    return None


def _of_types(error: Exception, text: str) -> CarryError | None:
    """Make the error for a loop or branches with mismatched types."""
    if isinstance(error, TypeError) and any(part in text for part in _MISMATCHES):
        varies = "manual axis types do not match" in text
        return CarryError(
            "a loop or a branch of jax.lax returns values of other types than it must",
            expected="carries of the types of the initial ones, branches with results of one type, bool conditions",
            got=" ".join(text.split()),
            fix="pass what the body closes over as an argument of the kernel"
            if varies
            else "cast with .astype, in the body or before the loop",
        )
    return None
