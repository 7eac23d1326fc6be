"""The arguments that a function takes, found by trial: ranks, dtypes, and the dims whose sizes must agree.

Tracing needs no numbers, so a trial takes milliseconds. A kernel's own accesses say more: dims that one axis indexes
have one size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any, Literal, get_args, get_origin

import jax
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.ir.control import While
from tilekern.ir.core import Func
from tilekern.ir.memory import MemoryOp
from tilekern.ir.types import BOOL, F32, I32, DType
from tilekern.kernel.choice import Tunable
from tilekern.kernel.primitive import calls_in
from tilekern.kernel.signature import LAUNCH, Signature
from tilekern.lang.tiles import describe

# Sizes of all dims in the first trials; and how many trials there are.
_SIZES, _TRIALS = (8, 128), 2000
_MOST_DIMS, _MOST_LAYOUTS = 4, 4


def _others(size: int) -> tuple[int, ...]:
    """Other sizes of a dim: a kernel may want any, a multiple, or a divisor."""
    return size + 5, 2 * size, size // 2, 4 * size, 3 * size


@dataclass(frozen=True)
class Layout:
    """Arguments that a function takes, but for the sizes of dims.

    Attributes:
      tree: the structure of the positional arguments.
      dtypes: of the arrays.
      dims: for each array a number for each dim: dims of one number have one size.
      sizes: for each number a size that the function takes.
    """

    tree: Any
    dtypes: tuple[DType, ...]
    dims: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def types(self, sizes: Sequence[int], dtypes: Sequence[DType] | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the arrays for some sizes, one for each number."""
        pairs = zip(self.dims, dtypes or self.dtypes, strict=True)
        return tuple(jax.ShapeDtypeStruct(tuple(sizes[n] for n in dims), dtype) for dims, dtype in pairs)


@dataclass(frozen=True)
class Trial:
    """Whether a function takes some arguments.

    Attributes:
      functions: the kernel, and the reference if there is one: both must take them.
    """

    functions: tuple[Callable[..., Any], ...]

    def refusal(self, tree: Any, types: Sequence[jax.ShapeDtypeStruct], keywords: Mapping[str, Any]) -> str:
        """The error that refuses the arguments, in a line; "" if they are taken."""
        arguments = jax.tree.unflatten(tree, types)
        x64 = any(np.dtype(t.dtype).itemsize == 8 for t in types)
        for function in self.functions:
            try:
                with jax.enable_x64(x64):
                    jax.eval_shape(partial(function, **known_to(function, keywords)), *arguments)
            except Exception as error:  # the bodies are users' code, which may raise anything
                return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""


def known_to(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: v for n, v in keywords.items() if n in parameters or anything}


def layout_of_case(trial: Trial, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Layout:
    """The layout of a case that the user gives.

    Raises:
      ArgumentError: the function does not take the case.
    """
    leaves, tree = _jax.flatten(arguments)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ArgumentError(
                f"a case of {_name(trial)} has an argument that is no array",
                expected="arrays or jax.ShapeDtypeStructs, in pytrees",
                got=describe(leaf),
                fix="make it an array; give static arguments by keyword",
            )
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    if refusal := trial.refusal(tree, types, keywords):
        shown = ", ".join(map(describe, leaves))
        raise ArgumentError(
            f"{_name(trial)} does not take a case",
            expected="arrays and static arguments that it takes",
            got=f"{shown} {dict(keywords) or ''}: {refusal}",
            fix="correct the case",
        )
    return _bound(trial, tree, types, keywords)


def found_layouts(trial: Trial, keywords: Mapping[str, Any]) -> list[Layout]:
    """Layouts of arrays that a function takes, with few dims first.

    Raises:
      ArgumentError: no arrays of up to four dims are found; or the function has parameters that cannot be guessed.
    """
    last = ""
    for size in _SIZES:
        layouts: list[Layout] = []
        for types in _guesses(trial.functions[0], size):
            tree = _jax.structure(tuple(types))
            if len(layouts) == _MOST_LAYOUTS or (layouts and [t.dtype for t in types] != list(layouts[0].dtypes)):
                break
            if refusal := trial.refusal(tree, types, keywords):
                last = refusal
            else:
                layouts.append(_bound(trial, tree, types, keywords))
        if layouts:
            return layouts
    raise ArgumentError(
        f"no arguments are found that {_name(trial)} takes",
        expected=f"a function of arrays of up to {_MOST_DIMS} dims, whose sizes may all be {_SIZES[0]}",
        got=last or "no parameters that take arrays",
        fix="give cases=[(x, y), ...]: arrays or jax.ShapeDtypeStructs that it takes",
    )


def _guesses(function: Callable[..., Any], size: int) -> Iterator[list[jax.ShapeDtypeStruct]]:
    """Types of arguments, the likely ones first: floats, then one integer or bool among them, then more."""
    required = _positional(function)
    ranks = sorted(product(range(_MOST_DIMS + 1), repeat=required), key=lambda r: (sum(r), len(set(r))))
    count = 0
    for integer_count in range(required + 1):
        for places in combinations(range(required), integer_count):
            for kinds in product((I32, BOOL), repeat=integer_count):
                dtype_of = dict(zip(places, kinds, strict=True))
                for rank in ranks:
                    if (count := count + 1) > _TRIALS:
                        return
                    yield [jax.ShapeDtypeStruct((size,) * r, dtype_of.get(n, F32)) for n, r in enumerate(rank)]


def _positional(function: Callable[..., Any]) -> int:
    """The number of positional parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ArgumentError(
            f"{getattr(function, '__name__', function)} takes any number of arrays",
            expected="a function whose positional parameters are known",
            got="a parameter with a star",
            fix="give cases=[(x, y), ...]",
        )
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _name(trial: Trial) -> str:
    return str(getattr(trial.functions[0], "__name__", trial.functions[0]))


# --- the sizes of dims ----------------------------------------------------------------------------------------------


def _bound(trial: Trial, tree: Any, types: Sequence[jax.ShapeDtypeStruct], keywords: Mapping[str, Any]) -> Layout:
    """The layout of arguments that are taken: which dims must have one size, and which may have any."""
    places = [(n, d) for n, t in enumerate(types) for d in range(len(t.shape))]
    groups = {place: {place} for place in places}

    def join(some: Sequence[tuple[int, int]]) -> None:
        merged = set[tuple[int, int]]().union(*(groups[p] for p in some))
        groups.update(dict.fromkeys(merged, merged))

    def taken(changed: Sequence[tuple[int, int]]) -> bool:
        """True if these dims may have another size, together."""
        return any(not trial.refusal(tree, _resized(types, changed, way), keywords) for way in range(len(_others(1))))

    for some in _of_one_axis(trial, tree, types, keywords):
        join(some)
    stiff = [g for g in _distinct(groups) if not taken(sorted(g))]
    while stiff:
        first, *rest = stiff
        more = (c for count in range(1, len(rest) + 1) for c in combinations(rest, count))
        found = next((c for c in more if taken(sorted(first.union(*c)))), ())
        if found:
            join(sorted(first.union(*found)))
        stiff = [g for g in rest if g not in found]
    numbers = {place: n for n, group in enumerate(_distinct(groups)) for place in group}
    dims = tuple(tuple(numbers[n, d] for d in range(len(t.shape))) for n, t in enumerate(types))
    sizes = {numbers[n, d]: types[n].shape[d] for n, d in places}
    return Layout(tree, tuple(np.dtype(t.dtype) for t in types), dims, tuple(sizes[n] for n in sorted(sizes)))


def _distinct(groups: Mapping[tuple[int, int], set[tuple[int, int]]]) -> list[set[tuple[int, int]]]:
    return [group for place, group in groups.items() if place == min(group)]


def _resized(
    types: Sequence[jax.ShapeDtypeStruct], changed: Sequence[tuple[int, int]], way: int
) -> list[jax.ShapeDtypeStruct]:
    shapes = [[_others(s)[way] if (n, d) in changed else s for d, s in enumerate(t.shape)] for n, t in enumerate(types)]
    return [jax.ShapeDtypeStruct(tuple(shape), t.dtype) for shape, t in zip(shapes, types, strict=True)]


def _of_one_axis(
    trial: Trial, tree: Any, types: Sequence[jax.ShapeDtypeStruct], keywords: Mapping[str, Any]
) -> list[list[tuple[int, int]]]:
    """Dims of arguments that one axis of a kernel indexes, if the function is nothing but a call of this kernel."""
    function = partial(trial.functions[0], **keywords)
    with jax.enable_x64(any(np.dtype(t.dtype).itemsize == 8 for t in types)):
        calls = calls_in(jax.make_jaxpr(function)(*jax.tree.unflatten(tree, types)))
    if len(calls) != 1 or not hasattr(calls[0][0], "func"):
        return []
    func: Func = calls[0][0].func()
    if [(p.ref.shape, p.ref.dtype) for p in func.inputs[: len(types)]] != [(t.shape, t.dtype) for t in types]:
        return []
    numbers = {p: n for n, p in enumerate(func.inputs[: len(types)])}
    dims_of_index: dict[Any, set[tuple[int, int]]] = {}
    for op in func.walk():
        if isinstance(op, MemoryOp) and op.ref in numbers and op.access.extents is None:
            for d, dim in enumerate(op.access.dims):
                if dim.kind == "block" and len(dim.position.terms) == 1:
                    dims_of_index.setdefault(op.operands[dim.position.terms[0].operand], set()).add(
                        (numbers[op.ref], d)
                    )
    return [sorted(group) for group in dims_of_index.values()]


def blocks_in(trial: Trial, layout: Layout, keywords: Mapping[str, Any]) -> list[int]:
    """The sizes of tiles that the kernels of a function have, for the sizes of a layout."""
    _, funcs = _program(trial, layout, keywords)
    return sorted({axis.block for func in funcs for axis in func.axes})


def loops_without_bounds(trial: Trial, layout: Layout, keywords: Mapping[str, Any]) -> bool:
    """True if a function or its kernels may loop as often as an integer of an array says."""
    jaxpr, funcs = _program(trial, layout, keywords)
    inside = any(isinstance(op, While) for func in funcs for op in func.walk())
    return inside or any(eqn.primitive.name == "while" for eqn in _jax.equations(jaxpr))


def _program(trial: Trial, layout: Layout, keywords: Mapping[str, Any]) -> tuple[_jax.Jaxpr, list[Func]]:
    arguments = jax.tree.unflatten(layout.tree, layout.types(layout.sizes))
    jaxpr: Any = jax.make_jaxpr(partial(trial.functions[0], **keywords))(*arguments)
    return jaxpr, [family.func() for family, _ in calls_in(jaxpr) if hasattr(family, "func")]


# --- static arguments -----------------------------------------------------------------------------------------------


def static_choices(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Values of the static arguments of a kernel, the simplest one first: defaults, and what hints say.

    Raises:
      ArgumentError: an argument has no default, and its hint says nothing.
    """
    signature = getattr(function, "signature", None)
    if not isinstance(signature, Signature):
        return {name: [value] for name, value in given.items()}
    values_of: dict[str, list[Any]] = {name: [value] for name, value in given.items()}
    for name, default in signature.statics.items():
        if name in given:
            continue
        choices = [*([] if default is inspect.Parameter.empty else [default]), *_by_hint(signature.hints.get(name))]
        if not choices:
            raise ArgumentError(
                f"{signature.name} needs the static argument {name}",
                expected="a default, or a hint such as bool or Literal",
                got=f"{name}: {signature.hints.get(name)}",
                fix=f"give it: check(..., {name}=...)",
            )
        values_of[name] = list(dict.fromkeys(choices))
    return values_of


def _by_hint(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (False, True)
    return get_args(hint) if get_origin(hint) is Literal else ()


def block_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The blocks of a kernel or op, without launch options."""
    signature = getattr(function, "signature", None)
    return tuple(n for n in signature.blocks if n not in LAUNCH) if isinstance(signature, Signature) else ()


def values_of_choices(function: Callable[..., Any]) -> dict[str, tuple[Tunable, ...]]:
    """For each choice of a kernel or op, by its name, the values it may have."""
    signature = getattr(function, "signature", None)
    if not isinstance(signature, Signature):
        return {}
    return {name: choice.values for name, choice in signature.choices.items()}
