"""`@tilekern.op`: plain JAX code that calls several kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.errors import ArgumentError, TraceError, UnsupportedError
from tilekern.kernel.asking import asking
from tilekern.kernel.declared import Declared, required
from tilekern.kernel.derivatives import batched_jvp, batched_transpose
from tilekern.kernel.family import (
    Calls,
    DeclaredFamily,
    Definition,
    Family,
    blocks_for,
    declared_type,
    settings_of,
    stacked,
)
from tilekern.kernel.op_stages import TracedOp
from tilekern.kernel.results import results
from tilekern.kernel.signature import LAUNCH
from tilekern.lang.tiles import describe
from tilekern.lower.target import Target
from tilekern.primitive import call, calls_in


def op(
    function: None = None, /, *, out_type: Callable[..., Any] | None = None, linear: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Make an op of a JAX function: traced for each target, with that target's blocks, when it is lowered.

    The function takes pytrees of arrays and static keyword-only arguments like a kernel, and returns arrays of the
    types that `out_type` names. Inside, shapes may depend on blocks: split a reduction over programs, then combine.
    What it reads besides its parameters keeps its first value, as in a `kernel`.

    Args:
      function: left out: the decorator has arguments, `@tk.op(out_type=...)`.
      out_type: required; the types of the results, as for `kernel`.
      linear: names of inputs in which the results are linear, as for `kernel`; derivatives are stated as a kernel's.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.op(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
      ... def total(x, *, splits: tk.Block = 4):
      ...     return x.reshape(splits, -1).sum(axis=1).sum()
      >>> total(jnp.ones(8))
      Array(8., dtype=float32)
    """
    return partial(Op, required("op", function, out_type), linear)


class Op(Declared):
    """An op, made by `op`: call it like a function of arrays, inside or outside of `jax.jit`."""

    def __init__(self, out_type: Callable[..., Any], linear: tuple[str, ...], function: Callable[..., Any]) -> None:
        super().__init__(out_type, function, linear=linear)

    def trace(self, *args: Any, **keywords: Any) -> TracedOp:
        """Trace the op, and the kernels that it calls, for arrays or `jax.ShapeDtypeStruct`s and static arguments."""
        args, keywords = self.signature.positional(args, keywords)
        statics, blocks, target = self._check(keywords)
        family, _ = self._family(args, statics, blocks, target)

        def again(target: Target) -> OpFamily:
            return OpFamily(self._definition, family.arguments, statics, blocks, target)

        return TracedOp(family, again)

    def _make_family(
        self, args: tuple[Any, ...], statics: Mapping[str, Any], blocks: Mapping[str, int], target: Target | None
    ) -> tuple[OpFamily, bool]:
        return OpFamily(self._definition, args, statics, blocks, target), True

    def _bind(self, family: OpFamily, args: tuple[Any, ...]) -> Any:
        return family.results.pack(call(family, *jax.tree.leaves(args)))


class OpFamily(DeclaredFamily):
    """An op for arguments of given types."""

    def __init__(
        self,
        definition: Definition,
        arguments: Sequence[Any],
        statics: Mapping[str, Any],
        blocks: Mapping[str, int],
        target: Target | None,
    ) -> None:
        super().__init__(definition.signature.name, target)
        self._definition, self.signature, self.rules = definition, definition.signature, definition.rules
        self.arguments, self._statics, self._blocks = tuple(arguments), statics, blocks
        self.keywords = {**statics, **blocks}
        self.settings = settings_of(definition)
        if len(self.arguments) != len(definition.signature.arrays):
            raise ArgumentError(
                f"{self.name} is called with the wrong number of arrays",
                expected=", ".join(definition.signature.arrays),
                got=f"{len(self.arguments)} arguments",
                fix="give one argument for each positional parameter",
            )
        for name in LAUNCH:
            if name in blocks:
                raise ArgumentError(
                    f"the op {self.name} has no programs of its own",
                    expected="launch options of the kernels that it calls",
                    got=f"{name} = {blocks[name]}",
                    fix=f"give {name} to the kernels inside, or make it a static argument of the op",
                )
        declared = declared_type(definition, arguments, statics)
        with source.at(definition.loc):
            self.results = results(self.name, (), declared)
        self.outputs = jax.tree.leaves(self.results.trees)
        self._traced: dict[Target, Callable[..., list[jax.Array]]] = {}
        self.function(self.target)

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The op on flat operands, traced once with the blocks of a target."""
        if target not in self._traced:
            self._traced[target] = self._trace(target)
        return self._traced[target]

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        with _meshes.outside_of_meshes(), _jax.checking(self.settings):
            try:
                traced = _jax.make_jaxpr(self._function(target), *jax.tree.leaves(self.arguments))
            except RecursionError as error:
                raise self._endless() from error
        for value in traced.consts:
            # By the time an op is lowered, traced values that it closes over have ended.
            if isinstance(value, _jax.Tracer):
                with source.at(self._definition.loc):
                    raise TraceError(
                        f"the op {self.name} closes over a traced value",
                        expected="an op that uses its arguments and known values only",
                        got=describe(value),
                        fix="make the value an argument of the op; a function that is an argument carries it in a "
                        "jax.tree_util.Partial",
                    )
        return _jax.of_jaxpr(traced, self.name)

    def _function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The op on flat operands, with the blocks of a target."""
        definition = self._definition
        blocks = blocks_for(definition, target, self.arguments, self._statics, self._blocks)
        keywords = {**self._statics, **{name: blocks[name] for name in definition.signature.blocks}}
        tree = _jax.structure(self.arguments)

        def run(*leaves: jax.Array) -> list[jax.Array]:
            with asking(None if self.asked is None else target):
                returned = definition.function(*jax.tree.unflatten(tree, leaves), **keywords)
            return self._checked((returned,) if self.results.single else returned)

        return run

    def _checked(self, returned: Any) -> list[jax.Array]:
        leaves, tree = _jax.flatten(returned)
        found = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        if found != self.results.trees:
            with source.at(self._definition.loc):
                raise ArgumentError(
                    f"the op {self.name} returned other types than its out_type says",
                    expected=str(self.results.trees),
                    got=str(found),
                    fix="cast or reshape the results, or correct out_type",
                )
        return leaves

    def _endless(self) -> UnsupportedError:
        with source.at(self._definition.loc):
            return UnsupportedError(
                f"{self.name} calls itself without end",
                expected="calls of itself that a static argument ends",
                got="a RecursionError of Python while it was traced",
                fix="use a loop, or end the calls by a static argument",
            )

    def traced(self, target: Target) -> tuple[_jax.Jaxpr, Calls]:
        """The jaxpr of the op with the blocks of a target, and the kernels that it calls."""
        jaxpr = _traced(self.function(target), jax.tree.leaves(self.arguments))
        return jaxpr, _called(jaxpr, target)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return self.traced(target)[1]

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        return jax.jit(self.function(target))

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedOpFamily(self, size, dims), dims


class BatchedOpFamily(Family):
    """An op under `jax.vmap`: its function under `jax.vmap`, so that the kernels inside are batched."""

    def __init__(self, inner: OpFamily | BatchedOpFamily, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self._dims = inner, size, dims
        self.outputs = stacked(inner.outputs, size)

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The batched op on flat operands."""
        return jax.vmap(self._inner.function(target), in_axes=self._dims, axis_size=self._size)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return _called(_traced(self.function(target), operands), target)

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        return jax.jit(self.function(target))

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedOpFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)


def _traced(function: Callable[..., list[jax.Array]], operands: Sequence[jax.ShapeDtypeStruct]) -> _jax.Jaxpr:
    with _meshes.outside_of_meshes():
        return _jax.make_jaxpr(function, *operands)


def _called(jaxpr: _jax.Jaxpr, target: Target) -> Calls:
    """The kernels that a jaxpr calls, each different one once."""
    found: Calls = []
    for family, operands in calls_in(jaxpr):
        found += family.kernels(family.asked or target, operands)
    return list(dict.fromkeys(found))
