"""The arrays that the stages of a kernel or op take and return; the check of a call's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.ir.records import record
from tilekern.kernel.definition import TypedCall
from tilekern.kernel.instance import Instance
from tilekern.kernel.packed import unpacked
from tilekern.kernel.results import Results
from tilekern.kernel.signature import Signature, check_argument
from tilekern.lang.tiles import describe
from tilekern.lower.target import Target


@record
class Interface:
    """The arguments and results of a traced kernel or op.

    Attributes:
      name: the name of the kernel or op.
      signature: the parameters.
      arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
      results: the types of the results.
      captured: arrays that a body closes over: further operands, after the arrays of the arguments.
      statics: the static arguments, in words.
    """

    name: str
    signature: Signature
    arguments: tuple[Any, ...]
    results: Results
    captured: tuple[Any, ...] = ()
    statics: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def captures_tracers(self) -> bool:
        """True if the body closes over traced values, which stages cannot have."""
        return any(isinstance(array, _jax.Tracer) for array in self.captured)

    def flat(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The arrays of the arguments in order, without `captured`.

        Raises:
          ArgumentError: they have another structure or other types than the kernel or op was traced for.
        """
        structure, traced_structure = _jax.structure(arguments), _jax.structure(self.arguments)
        if structure != traced_structure:
            raise self._other(f"arguments of the structure {traced_structure}", str(structure))
        with_paths, _ = _jax.flatten_with_path(arguments)
        for (path, leaf), aval in zip(with_paths, jax.tree.leaves(self.arguments), strict=True):
            name = self.signature.leaf_name(path)
            leaf_type = check_argument(self.name, name, leaf)
            if leaf_type != aval or isinstance(leaf, jax.ShapeDtypeStruct):
                raise self._other(f"{name} = {describe(aval)}", f"{name} = {describe(leaf)}")
        return jax.tree.leaves(arguments)

    def moving(self, wrt: str | Sequence[str] | None) -> list[bool]:
        """One flag for each array of the arguments: True if it is of floats and belongs to a parameter in `wrt`.

        Args:
          wrt: names of parameters, or one name; None for all arrays of floats.
        """
        names = (wrt,) if isinstance(wrt, str) else wrt if wrt is None else tuple(wrt)
        pairs = zip(self.signature.arrays, self.arguments, strict=False)
        leaves = [(name, leaf) for name, tree in pairs for leaf in jax.tree.leaves(tree)]
        flags = [
            jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) and (names is None or name in names)
            for name, leaf in leaves
        ]
        floats = {name for (name, _), moves in zip(leaves, flags, strict=True) if moves}
        if not floats or not all(name in floats for name in names or ()):
            raise ArgumentError(
                f"{self.name} has no gradient with respect to that",
                expected="names of inputs that have arrays of floats",
                got=f"wrt = {describe(wrt)}",
                fix=f"choose among {', '.join(dict.fromkeys(name for name, _ in leaves))}",
            )
        return flags

    def _other(self, expected: str, got: str) -> ArgumentError:
        return ArgumentError(
            f"{self.name} was traced for other arguments",
            expected=expected,
            got=got,
            fix="trace it again for these arguments",
        )

    def packed(self, outputs: Sequence[Any]) -> Any:
        """The results of a program, packed as a call returns them."""
        return self.results.pack(unpacked(outputs, jax.tree.leaves(self.results.trees)))

    def packed_arrays(self, outputs: Sequence[Any]) -> Any:
        """The results of a program as NumPy arrays, packed as a call returns them."""
        return self.results.pack([np.asarray(x) for x in unpacked(outputs, jax.tree.leaves(self.results.trees))])


def of_call(call: TypedCall, captured: tuple[Any, ...] = ()) -> Interface:
    """The interface of a declared kernel or op."""
    statics = {name: describe(value) for name, value in call.options.statics.items()}
    return Interface(call.name, call.signature, call.arguments, call.results, captured, statics)


def of_flat_arrays(kernel: Instance, target: Target) -> Interface:
    """The interface of a kernel that an op calls, as a function of flat arrays.

    The arguments are the arrays of the call, then the arrays that the kernel closes over. The result is an array, or a
    tuple of arrays.
    """
    inputs = kernel.func(target).inputs
    names = [inputs[n].name for n in range(len(kernel.types))]
    signature = Signature(kernel.name, tuple(names), {}, {}, {})
    results = Results(tuple(kernel.outputs), (), len(kernel.outputs) == 1)
    return Interface(kernel.name, signature, tuple(kernel.types), results)
