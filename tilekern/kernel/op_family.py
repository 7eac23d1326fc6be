"""The family of an op, and of an op under `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.errors import ArgumentError, TraceError, UnsupportedError
from tilekern.kernel import derivatives
from tilekern.kernel.declared_call import DeclaredCall
from tilekern.kernel.definition import Definition
from tilekern.kernel.derivatives import batched_jvp, batched_transpose
from tilekern.kernel.family import Calls, Family, Program, stacked
from tilekern.kernel.inherited_target import inherit_target
from tilekern.kernel.results import results
from tilekern.kernel.signature import LAUNCH
from tilekern.lang.tiles import describe
from tilekern.lower.target import Target
from tilekern.primitive import calls_in


class OpFamily(Family):
    """An op for arguments of given types.

    Attributes:
      declared: the call.
    """

    def __init__(
        self,
        definition: Definition,
        arguments: Sequence[Any],
        statics: Mapping[str, Any],
        blocks: Mapping[str, int],
        target: Target | None,
    ) -> None:
        super().__init__(definition.signature.name, target)
        _check_call(definition, arguments, blocks)
        declared = definition.declared_type(arguments, statics)
        with source.at(definition.loc):
            found = results(self.name, (), declared)
        settings = definition.settings()
        self.declared = DeclaredCall(definition, tuple(arguments), statics, blocks, target, found, settings)
        self.outputs = jax.tree.leaves(found.trees)
        self.function(self.target)

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The op on flat operands, traced once with the blocks of a target."""
        found = self.caches.members.get(target)
        if found is None:
            self.caches.members[target] = found = self._trace(target)
        return found

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        with _meshes.outside_of_meshes(), _jax.checking(self.declared.settings):
            try:
                traced = _jax.make_jaxpr(self._function(target), *jax.tree.leaves(self.declared.arguments))
            except RecursionError as error:
                raise self._endless() from error
        for value in traced.consts:
            # By the time an op is lowered, traced values that it closes over have ended.
            if isinstance(value, _jax.Tracer):
                with source.at(self.declared.definition.loc):
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
        call = self.declared
        blocks = call.blocks_for(target)
        keywords = {**call.statics, **{name: blocks[name] for name in call.signature.blocks}}
        tree = _jax.structure(call.arguments)

        def run(*leaves: jax.Array) -> list[jax.Array]:
            with inherit_target(None if self.asked is None else target):
                returned = call.definition.function(*jax.tree.unflatten(tree, leaves), **keywords)
            return self._checked((returned,) if call.results.single else returned)

        return run

    def _checked(self, returned: Any) -> list[jax.Array]:
        leaves, tree = _jax.flatten(returned)
        found = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        if found != self.declared.results.trees:
            with source.at(self.declared.definition.loc):
                raise ArgumentError(
                    f"the op {self.name} returned other types than its out_type says",
                    expected=str(self.declared.results.trees),
                    got=str(found),
                    fix="cast or reshape the results, or correct out_type",
                )
        return leaves

    def _endless(self) -> UnsupportedError:
        with source.at(self.declared.definition.loc):
            return UnsupportedError(
                f"{self.name} calls itself without end",
                expected="calls of itself that a static argument ends",
                got="a RecursionError of Python while it was traced",
                fix="use a loop, or end the calls by a static argument",
            )

    def traced(self, target: Target) -> tuple[_jax.Jaxpr, Calls]:
        """The jaxpr of the op with the blocks of a target, and the kernels that it calls."""
        jaxpr = _traced(self.function(target), jax.tree.leaves(self.declared.arguments))
        return jaxpr, _called(jaxpr, target)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return self.traced(target)[1]

    def program(self, target: Target) -> Program:
        # The operations of the op are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedOpFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return derivatives.jvp(self.declared, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return derivatives.transpose(self.declared, cotangents, operands)


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

    def program(self, target: Target) -> Program:
        # The operations of the op are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedOpFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)


def _check_call(definition: Definition, arguments: Sequence[Any], blocks: Mapping[str, int]) -> None:
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


def _traced(function: Callable[..., list[jax.Array]], operands: Sequence[jax.ShapeDtypeStruct]) -> _jax.Jaxpr:
    with _meshes.outside_of_meshes():
        return _jax.make_jaxpr(function, *operands)


def _called(jaxpr: _jax.Jaxpr, target: Target) -> Calls:
    """The kernels that a jaxpr calls, each different one once."""
    found: Calls = []
    for family, operands in calls_in(jaxpr):
        found += family.kernels(family.asked or target, operands)
    return list(dict.fromkeys(found))
