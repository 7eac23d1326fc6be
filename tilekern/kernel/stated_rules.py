"""Derivatives of kernels and ops by the rules of their authors, and by linearity.

A forward kernel f has a tangent kernel L(x, dx), linear in dx, whose transpose is the backward kernel B(x, ct). Of
these JAX makes every derivative: forward mode runs L, and reverse mode transposes L into B. B is linear in ct, and L is
its transpose; where L and B have rules for x, too, there is a derivative of each order.

All functions here take flat operands. A tangent or a cotangent that is zero is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax

from tilekern import _jax
from tilekern.errors import ArgumentError, NotDifferentiableError
from tilekern.kernel.definition import TypedCall, inherit_target
from tilekern.kernel.signature import select
from tilekern.lang.tiles import describe


def jvp(call: TypedCall, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of a call and their tangents.

    Raises:
      NotDifferentiableError: there is no rule for an input that has a tangent.
    """
    with inherit_target(call.asked), _jax.checking(call.settings):
        return _jvp(call, primals, tangents)


def transpose(call: TypedCall, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """For each operand that is a `jax.ShapeDtypeStruct`, its cotangent; None for all other operands.

    Raises:
      NotDifferentiableError: there is no rule, or the results are not linear in such an operand.
    """
    with inherit_target(call.asked), _jax.checking(call.settings):
        return _transpose(call, cotangents, operands)


def _jvp(call: TypedCall, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    tree = _jax.structure(call.arguments)
    args, moved = (jax.tree.unflatten(tree, list(x[: tree.num_leaves])) for x in (primals, tangents))
    names = call.signature.arrays[: len(args)]
    along, linear = ([_only(x, (n in call.rules.linear) is is_linear) for n, x in zip(names, moved, strict=True)]
                     for is_linear in (False, True))  # fmt: skip
    captured = any(t is not None for t in tangents[tree.num_leaves :])
    if not captured and not jax.tree.leaves(along):
        results, stated = call.again(*args), None
    elif call.rules.jvp is None or captured:
        raise _no_derivative(call, "jvp", "closes over what is differentiated" if captured else "")
    else:
        results, stated = _pair(call, call.rules.jvp(args, tuple(along), **select(call.rules.jvp, call.keywords)))
    total = _aligned(call, stated, "the tangents that the rule of defjvp returned")
    if jax.tree.leaves(linear):
        # The tangent of a linear function is the function of the tangent; None stands for an operand of zeros.
        replaced = [t if n in call.rules.linear else x for n, x, t in zip(names, args, linear, strict=True)]
        more = _aligned(call, call.again(*replaced), "the results")
        total = [m if t is None else t if m is None else t + m for t, m in zip(total, more, strict=True)]
    return _aligned(call, results, "the results that the rule of defjvp returned"), total


def _transpose(call: TypedCall, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    tree = _jax.structure(call.arguments)
    args = jax.tree.unflatten(tree, list(operands[: tree.num_leaves]))
    names = call.signature.arrays[: len(args)]
    unknown = [any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arg)) for arg in args]
    if call.rules.transpose is None or any(
        u and n not in call.rules.linear for u, n in zip(unknown, names, strict=True)
    ):
        raise _no_derivative(call, "transpose")
    packed = call.results.pack(cotangents)
    by_name = call.rules.transpose(packed, *args, **select(call.rules.transpose, call.keywords))
    _check_names(call, by_name)
    leaves: list[Any] = []
    for name, types in zip(names, call.arguments, strict=True):
        leaves += _leaves(call, types, by_name.get(name), f"the cotangent of {name}")
    return [*leaves, *[None] * (len(operands) - len(leaves))]


def _only(tree: Any, keep: bool) -> Any:
    leaves, structure = _jax.flatten(tree)
    return tree if keep else jax.tree.unflatten(structure, [None] * len(leaves))


def _pair(call: TypedCall, returned: Any) -> Any:
    pair: Any = returned
    if isinstance(pair, (tuple, list)) and len(cast(Any, pair)) == 2:
        return cast(Any, pair)
    raise ArgumentError(
        f"the rule of {call.name}.defjvp returned no pair",
        expected="(results, tangents)",
        got=str(jax.tree.map(describe, pair)),
        fix="return what the call returns, and a tangent, or None for zeros, of each of its arrays",
    )


def _aligned(call: TypedCall, returned: Any, role: str) -> list[Any]:
    """The leaves of results, or of their tangents, in the order of the results; None for each that is left out.

    `role` names them in errors.
    """
    wrapped = (returned,) if call.results.single and returned is not None else returned
    return _leaves(call, call.results.trees, wrapped, role)


def _leaves(call: TypedCall, types: Any, values: Any, role: str) -> list[Any]:
    """One value for each leaf of `types`, checked to have its type, or None.

    `values` is a tree like `types`; None may stand for a leaf, a subtree, or for all.
    """
    avals, tree = _jax.flatten(types)
    if values is None:
        return [None] * len(avals)
    try:
        leaves = tree.flatten_up_to(values)
    except ValueError:
        raise _misfit(call, role, str(types), str(jax.tree.map(describe, values))) from None
    for value, aval in zip(leaves, avals, strict=True):
        if value is None or (_jax.is_array(value) and (value.shape, value.dtype) == (aval.shape, aval.dtype)):
            continue
        raise _misfit(call, role, describe(aval), str(jax.tree.map(describe, value)))
    return leaves


def _misfit(call: TypedCall, role: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"a derivative of {call.name} has the wrong type",
        expected=f"{role} as {expected}, or None for zeros",
        got=got,
        fix="tangents and cotangents have the shapes and dtypes of what they belong to",
    )


def _check_names(call: TypedCall, returned: Any) -> None:
    names = list(map(str, returned)) if isinstance(returned, dict) else None  # pyright: ignore[reportUnknownArgumentType] -- the user's
    if names is None or not set(names) <= set(call.rules.linear):
        raise ArgumentError(
            f"the rule of {call.name}.deftranspose returned something else than cotangents",
            expected=f"a dict from names among {', '.join(call.rules.linear)} to cotangents",
            got=describe(returned) if names is None else f"the names {', '.join(names)}",
            fix="leave out what is zero",
        )


def _no_derivative(call: TypedCall, kind: str, why: str = "") -> NotDifferentiableError:
    missing = "transpose" if kind == "transpose" else "derivative"
    return NotDifferentiableError(
        f"the kernel {call.name} has no {missing}",
        expected=f"a rule ({call.name}.def{kind}), or a call outside of jax.grad, jax.vjp and jax.jvp",
        got=f"{call.name} under differentiation" + (f", which {why}" if why else ""),
        fix="state the rule, wrap the call in jax.custom_vjp with a backward pass, or stop gradients of its inputs "
        "(lax.stop_gradient)",
    )
