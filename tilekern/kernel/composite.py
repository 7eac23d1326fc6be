"""`Composite`: a JAX function of kernels, as the primitive carries it: ops, derivatives, and `jax.vmap` of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes, source
from tilekern.errors import ArgumentError, TraceError, UnsupportedError
from tilekern.ir.records import record
from tilekern.kernel import stated_rules
from tilekern.kernel.choice import Tunable
from tilekern.kernel.definition import Definition, Options, TypedCall, expecting, inherit_target
from tilekern.kernel.dispatch import call
from tilekern.kernel.primitive import Callee, Calls, Dims, Divisible, Program, Types, calls_in
from tilekern.kernel.results import results
from tilekern.kernel.signature import LAUNCH
from tilekern.kernel.vmapped_rules import stacked, vmapped_jvp, vmapped_transpose
from tilekern.lang.tiles import describe
from tilekern.lower.target import Target

# A JAX function of flat operands.
type Function = Callable[..., list[jax.Array]]


class Rules(NamedTuple):
    """Rules for derivatives, in the place of JAX's derivatives of the function.

    Attributes:
      jvp: as `Callee.jvp`; None for JAX's.
      transpose: as `Callee.transpose`; it returns None for operands for which JAX's transpose serves.
    """

    jvp: Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]] | None
    transpose: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any] | None]


@record(eq=False, kw_only=True, repr=False)
class Composite(Callee):
    """A JAX function of kernels, made for each target.

    Without a sharding rule, explicit axes of a mesh divide the operations of the function by JAX's rules, and each
    kernel inside by its own. Then the function is traced again, for the types of its operands say how they are divided.

    Attributes:
      types: the types of the operands; None for a function that is not traced, because the function that it calls is.
      make: `make(target, on_mesh)` returns the function for a target; `on_mesh` is True if a mesh divides its operands.
      rules: rules for derivatives; None for JAX's.
      op: the call of the op; None for a function that no user declares.
    """

    types: Types | None
    make: Callable[[Target, bool], Function]
    rules: Rules | None = None
    divisible: Divisible | None = None
    op: TypedCall | None = None

    def function(self, target: Target) -> Function:
        """The function of flat operands for a target, traced once."""
        types = self.types
        if types is None:
            return self.make(target, False)
        return self.once(("function", target), lambda: _jax.of_jaxpr(self._trace(target, types), self.name))

    def _trace(self, target: Target, types: Types) -> _jax.Jaxpr:
        with expecting(target), nullcontext() if self.op is None else _jax.checking(self.op.settings):
            jaxpr = traced(self.make(target, False), types)
        for value in jaxpr.consts:
            if isinstance(value, _jax.Tracer) and self.op is not None:
                raise _captures(self.op, value)
        return jaxpr

    def traced(self, target: Target) -> tuple[_jax.Jaxpr, Calls]:
        """The jaxpr with the blocks of a target, and the kernels that it calls."""
        assert self.types is not None
        jaxpr = traced(self.function(target), self.types)
        return jaxpr, called(jaxpr, target)

    def kernels(self, target: Target, operands: Types) -> Calls:
        return called(traced(self.function(target), operands), target)

    def program(self, target: Target) -> Program:
        # The operations of the function are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def on_mesh(self, target: Target) -> Function:
        return self.make(target, True)

    def calls_host(self, target: Target) -> bool:
        return False

    # --- rules of JAX ---

    def batched(self, size: int, dims: Dims) -> tuple[Callee, Dims]:
        return vmapped(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.rules is not None and self.rules.jvp is not None:
            return self.rules.jvp(primals, tangents)
        moving = tuple(t is not None for t in tangents)
        tangent = self.once(("tangent", moving), lambda: _tangent(self, moving))
        return call(self, *primals), call(tangent, *primals, *(t for t in tangents if t is not None))

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        by_rule = None if self.rules is None else self.rules.transpose(cotangents, operands)
        if by_rule is not None:
            return by_rule
        linear = tuple(x if isinstance(x, jax.ShapeDtypeStruct) else None for x in operands)
        transposed = self.once(("transpose", linear), lambda: _transposed(self, linear))
        fixed = [x for x, unknown in zip(operands, linear, strict=True) if unknown is None]
        cotangents_of_linear = iter(call(transposed, *fixed, *filled(cotangents, self.outputs)))
        return [None if unknown is None else next(cotangents_of_linear) for unknown in linear]


# --- derivatives and vmap -------------------------------------------------------------------------------------------


def _tangent(of: Composite, moving: tuple[bool, ...]) -> Composite:
    """The tangents of the results of `of`, for its operands and the tangents of the operands whose flag is set."""
    moved = [n for n, moves in enumerate(moving) if moves]

    def make(target: Target, on_mesh: bool) -> Function:
        function = of.on_mesh(target) if on_mesh else of.function(target)

        def run(*operands: jax.Array) -> list[jax.Array]:
            primals, tangents = operands[: len(moving)], operands[len(moving) :]

            def of_moving(*values: jax.Array) -> list[jax.Array]:
                by_number = dict(zip(moved, values, strict=True))
                return function(*(by_number.get(n, x) for n, x in enumerate(primals)))

            return jax.jvp(of_moving, [primals[n] for n in moved], list(tangents))[1]

        return run

    types = _known(of)
    return _derived(of, "tangent", [*types, *(types[n] for n in moved)], of.outputs, make)


def _transposed(of: Composite, linear: tuple[jax.ShapeDtypeStruct | None, ...]) -> Composite:
    """The cotangents of operands in which `of` is linear, for its other operands and the results' cotangents.

    Args:
      of: the function.
      linear: the types of such operands, with the axes that divide them; None for all other operands.
    """
    pairs, count = [*zip(_known(of), linear, strict=True)], linear.count(None)
    outputs = [t for t, unknown in pairs if unknown is not None]

    def make(target: Target, on_mesh: bool) -> Function:
        function = of.on_mesh(target) if on_mesh else of.function(target)
        types = [t for t in linear if t is not None] if on_mesh else outputs

        def run(*operands: jax.Array) -> list[jax.Array]:
            def of_linear(*moving: jax.Array) -> list[jax.Array]:
                fixed, moved = iter(operands[:count]), iter(moving)
                return function(*(next(fixed) if unknown is None else next(moved) for unknown in linear))

            pull = cast(Callable[..., Any], jax.linear_transpose(of_linear, *types))
            return list(pull(_meshes.placed(operands[count:], jax.eval_shape(of_linear, *types))))

        return run

    types = [*(t for t, unknown in pairs if unknown is None), *of.outputs]
    return _derived(of, "transpose", types, outputs, make)


def _derived(
    of: Composite, kind: str, types: Types, outputs: Types, make: Callable[[Target, bool], Function]
) -> Composite:
    name = f"{of.name}_{kind}"
    return Composite(name=name, asked=of.asked, target=of.target, types=types, outputs=outputs, make=make)


def vmapped(of: Composite, size: int, dims: Dims) -> Composite:
    """`size` calls of a function at once: `jax.vmap` batches the kernels inside."""

    def make(target: Target, on_mesh: bool) -> Function:
        function = of.on_mesh(target) if on_mesh else of.function(target)
        return jax.vmap(function, in_axes=dims, axis_size=size)

    return _many(of, size, dims, make)


def mapped(of: Callee, size: int, dims: Dims) -> Composite:
    """`size` calls of a kernel in a loop, for a batch of unknown size: a grid has a known size.

    `dims` has 0 for an operand that is stacked, and None for an operand that all calls share.
    """

    def run(*operands: jax.Array) -> list[jax.Array]:
        def of_slices(slices: Sequence[jax.Array]) -> Sequence[jax.Array]:
            left = iter(slices)
            return call(of, *(x if d is None else next(left) for x, d in zip(operands, dims, strict=True)))

        return cast(Any, jax.lax).map(of_slices, [x for x, d in zip(operands, dims, strict=True) if d is not None])

    def make(target: Target, on_mesh: bool) -> Function:
        return run

    return _many(of, size, dims, make)


def _many(of: Callee, size: int, dims: Dims, make: Callable[[Target, bool], Function]) -> Composite:
    rules = Rules(partial(vmapped_jvp, of, size, dims), partial(vmapped_transpose, of, size, dims))
    return Composite(
        name=of.name,
        asked=of.asked,
        target=of.target,
        types=None,
        outputs=stacked(of.outputs, size),
        make=make,
        rules=rules,
    )


# --- ops ------------------------------------------------------------------------------------------------------------


def op_call(definition: Definition, arguments: Sequence[Any], options: Options, target: Target) -> TypedCall:
    """A call of an op on arguments of given types, which are checked; the op is traced for `target` first."""
    _check_call(definition, arguments, options.blocks)
    declared = definition.declared_type(arguments, options.statics)
    with source.at(definition.loc):
        result_types = results(definition.signature.name, (), declared)
    return TypedCall(definition, tuple(arguments), options, target, result_types, definition.settings())


def op(call: TypedCall) -> Composite:
    """An op for arguments of given types, traced for the target of its call."""
    stated = Rules(partial(stated_rules.jvp, call), partial(stated_rules.transpose, call))
    composite = Composite(
        name=call.name,
        asked=call.asked,
        target=call.target,
        types=jax.tree.leaves(call.arguments),
        outputs=jax.tree.leaves(call.results.trees),
        make=partial(_function_of_op, call),
        rules=None if call.rules.states_none else stated,
        op=call,
    )
    composite.function(composite.target)  # so that an error comes with the call
    return composite


def _function_of_op(declared: TypedCall, target: Target, on_mesh: bool) -> Function:
    """Function from the op's flat operands to the list of its flat results, with the blocks of `target`.

    The function raises `ArgumentError` if its results have other types than `out_type` says. `on_mesh` has no effect.
    """
    blocks = declared.blocks_for(target)
    keywords = {**declared.options.statics, **{name: blocks[name] for name in declared.signature.tunables}}
    tree = _jax.structure(declared.arguments)

    def run(*leaves: jax.Array) -> list[jax.Array]:
        with inherit_target(None if declared.asked is None else target):
            try:
                returned = declared.definition.function(*jax.tree.unflatten(tree, leaves), **keywords)
            except RecursionError as error:
                raise _endless(declared) from error
        return _checked(declared, (returned,) if declared.results.single else returned)

    return run


def _checked(declared: TypedCall, returned: Any) -> list[jax.Array]:
    leaves, tree = _jax.flatten(returned)
    types = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    if types != declared.results.trees:
        with source.at(declared.definition.loc):
            raise ArgumentError(
                f"the op {declared.name} returned other types than its out_type says",
                expected=str(declared.results.trees),
                got=str(types),
                fix="cast or reshape the results, or correct out_type",
            )
    return leaves


def _endless(declared: TypedCall) -> UnsupportedError:
    with source.at(declared.definition.loc):
        return UnsupportedError(
            f"{declared.name} calls itself without end",
            expected="calls of itself that a static argument ends",
            got="a RecursionError of Python while it was traced",
            fix="use a loop, or end the calls by a static argument",
        )


def _captures(declared: TypedCall, value: Any) -> TraceError:
    """The refusal of an op that closes over a traced value, which has ended by the time the op is lowered."""
    with source.at(declared.definition.loc):
        return TraceError(
            f"the op {declared.name} closes over a traced value",
            expected="an op that uses its arguments and known values only",
            got=describe(value),
            fix="make the value an argument of the op; a function that is an argument carries it in a "
            "jax.tree_util.Partial",
        )


def _check_call(definition: Definition, arguments: Sequence[Any], blocks: Mapping[str, Tunable]) -> None:
    name, names = definition.signature.name, definition.signature.arrays
    if len(arguments) != len(names):
        raise ArgumentError(
            f"{name} is called with the wrong number of arrays",
            expected=", ".join(names),
            got=f"{len(arguments)} arguments",
            fix="give one argument for each positional parameter",
        )
    for option in LAUNCH:
        if option in blocks:
            raise ArgumentError(
                f"the op {name} has no programs of its own",
                expected="launch options of the kernels that it calls",
                got=f"{option} = {blocks[option]}",
                fix=f"give {option} to the kernels inside, or make it a static argument of the op",
            )


# --- operands and jaxprs --------------------------------------------------------------------------------------------


def _known(of: Composite) -> Types:
    """The types of the operands of a function that JAX differentiates; a vmapped function has its own rules."""
    assert of.types is not None, of.name
    return of.types


def filled(values: Sequence[Any], types: Types) -> list[Any]:
    """The values, with zeros of the type in `types` for each None."""
    return [jnp.zeros(t.shape, t.dtype) if v is None else v for v, t in zip(values, types, strict=True)]


def is_float(aval: jax.ShapeDtypeStruct) -> bool:
    """True for an array of floats: only these have tangents."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def traced(function: Function, operands: Types) -> _jax.Jaxpr:
    """The jaxpr of a function of flat operands."""
    with _meshes.outside_of_meshes():
        return _jax.make_jaxpr(function, *operands)


def called(jaxpr: _jax.Jaxpr, target: Target) -> Calls:
    """The kernels that a jaxpr calls, each with its target, without repetitions."""
    calls: Calls = []
    for callee, operands in calls_in(jaxpr):
        calls += callee.kernels(callee.asked or target, operands)
    return list(dict.fromkeys(calls))
