"""The family of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.errors import ArgumentError, TraceError, UnsupportedError
from tilekern.kernel import derivatives
from tilekern.kernel.declared_call import DeclaredCall
from tilekern.kernel.definition import Definition
from tilekern.kernel.family import Calls
from tilekern.kernel.function_family import FunctionFamily, called, traced
from tilekern.kernel.inherited_target import inherit_target
from tilekern.kernel.results import results
from tilekern.kernel.signature import LAUNCH
from tilekern.lang.tiles import describe
from tilekern.lower.target import Target


class OpFamily(FunctionFamily):
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
            result_types = results(self.name, (), declared)
        settings = definition.settings()
        self.declared = DeclaredCall(definition, tuple(arguments), statics, blocks, target, result_types, settings)
        self.outputs = jax.tree.leaves(result_types.trees)
        self.function(self.target)

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        with _meshes.outside_of_meshes(), _jax.checking(self.declared.settings):
            try:
                traced = _jax.make_jaxpr(self.untraced(target), *jax.tree.leaves(self.declared.arguments))
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

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
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
        types = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        if types != self.declared.results.trees:
            with source.at(self.declared.definition.loc):
                raise ArgumentError(
                    f"the op {self.name} returned other types than its out_type says",
                    expected=str(self.declared.results.trees),
                    got=str(types),
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

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self.declared.arguments)

    def traced(self, target: Target) -> tuple[_jax.Jaxpr, Calls]:
        """The jaxpr of the op with the blocks of a target, and the kernels that it calls."""
        jaxpr = traced(self.function(target), self.types)
        return jaxpr, called(jaxpr, target)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.declared.rules.states_none:
            return super().jvp(primals, tangents)
        return derivatives.jvp(self.declared, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        if self.declared.rules.states_none:
            return super().transpose(cotangents, operands)
        return derivatives.transpose(self.declared, cotangents, operands)


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
