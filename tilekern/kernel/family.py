"""A kernel for given argument types: its members, one for each target's blocks, are traced when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax, source
from tilekern.errors import ArgumentError, TilekernError
from tilekern.ir.core import Func
from tilekern.ir.types import dtype_name, is_dtype
from tilekern.kernel.signature import Signature, select
from tilekern.lang.tiles import describe
from tilekern.lang.trace import Param, Tracing, trace
from tilekern.lower.target import DEFAULT, Target
from tilekern.lower.xla import emit
from tilekern.passes import pipeline
from tilekern.primitive import kernel_call_p

Schedule = Callable[..., Mapping[str, int]]


@dataclass(frozen=True)
class Definition:
    """What the user declared: the body, the rule for the outputs, and schedules by target prefix."""

    function: Callable[..., Any]
    out_type: Callable[..., Any]
    signature: Signature
    schedules: Mapping[str, Schedule]
    loc: source.Loc


class Family:
    """A kernel for arguments of given types.

    Attributes:
      arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
      statics: the static arguments.
      blocks: the blocks that the call fixed.
      results: the outputs as a tuple of pytrees of `jax.ShapeDtypeStruct`, one for each output parameter.
    """

    def __init__(
        self,
        definition: Definition,
        arguments: Sequence[Any],
        statics: Mapping[str, Any],
        blocks: Mapping[str, int],
        target: Target | None,
    ) -> None:
        self._definition, self._target = definition, target or DEFAULT
        self.arguments, self.statics, self.blocks = tuple(arguments), statics, blocks
        self._x64 = _jax.x64_enabled()
        self._members: dict[tuple[Any, ...], Tracing] = {}
        self._single, self.results = self._out_type()

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._definition.signature.name

    @cached_property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the results."""
        return jax.tree.leaves(self.results)

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Results in the structure that `out_type` returned."""
        packed = jax.tree.unflatten(_jax.structure(self.results), leaves)
        return packed[0] if self._single else packed

    # --- members ---

    def blocks_for(self, target: Target) -> dict[str, int]:
        """The blocks on a target: the kernel's defaults, the schedule's, the call's, the later the stronger."""
        signature = self._definition.signature
        defaults = {n: v for n, v in signature.blocks.items() if isinstance(v, int)}
        chosen = {**defaults, **self._scheduled(target), **self.blocks}
        for name in signature.blocks:
            if name not in chosen:
                raise ArgumentError(
                    f"{self.name} needs the block {name}",
                    expected=f"{name}=..., a default, or a schedule for {target.name}",
                    got="no value",
                    fix=f"call {self.name}(..., {name}=128)",
                )
        return chosen

    def _scheduled(self, target: Target) -> dict[str, int]:
        prefixes = [p for p in self._definition.schedules if target.name == p or target.name.startswith(p)]
        if not prefixes:
            return {}
        schedule = self._definition.schedules[max(prefixes, key=len)]
        values = schedule(*self.arguments, **select(schedule, {**self.statics, "target": target.name}))
        return self._definition.signature.check_blocks(values, f"the schedule {schedule.__name__}")

    def member(self, target: Target) -> Tracing:
        """The kernel traced with the blocks of a target, and improved by the passes."""
        # A body that closes over traced values can be traced while they live only: once, for all targets.
        first = next(iter(self._members.values()), None)
        if first is not None and first.captures_tracers:
            return first
        blocks = self.blocks_for(target)
        key = tuple(blocks.items())
        if key not in self._members:
            self._members[key] = self._trace(blocks)
        return self._members[key]

    def _trace(self, blocks: Mapping[str, int]) -> Tracing:
        definition = self._definition
        names = definition.signature.arrays
        roles = ["in"] * len(self.arguments) + ["out"] * len(self.results)
        params = [
            jax.tree_util.tree_map_with_path(partial(_param, name, role), tree)
            for name, role, tree in zip(names, roles, (*self.arguments, *self.results), strict=True)
        ]
        with _jax.neutral_tracing(self._x64):
            traced = trace(definition.function, self.name, params, {**self.statics, **blocks}, definition.loc)
        return Tracing(pipeline.run(traced.func), traced.captured)

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the body closes over, further operands of the call."""
        return self.member(self._target).captured

    @property
    def captures_tracers(self) -> bool:
        """Whether this family serves one call only."""
        return self.member(self._target).captures_tracers

    def func(self, target: Target | None = None) -> Func:
        """The block IR for a target."""
        return self.member(target or self._target).func

    # --- calls ---

    @cached_property
    def call(self) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program; one object, so that many calls share one computation."""
        return self.program(self._target)

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program for a target."""
        program = partial(emit.run, self.func(target))
        program.__name__ = self.name  # pyright: ignore[reportAttributeAccessIssue] -- jax.jit names the computation after it
        return jax.jit(program)

    @cached_property
    def eager(self) -> Callable[..., Sequence[jax.Array]]:
        """The primitive under jit."""
        return jax.jit(partial(kernel_call_p.bind, family=self))

    # --- types ---

    def _out_type(self) -> tuple[bool, tuple[Any, ...]]:
        """Whether there is one output parameter that is not a tuple; and the types of all."""
        definition, signature = self._definition, self._definition.signature
        with source.at(source.current()):  # the call: frames of an out_type are the user's, too
            results = self._ask(definition.out_type)
            single = not isinstance(results, tuple)
            packed: tuple[Any, ...] = (results,) if single else results  # pyright: ignore[reportUnknownVariableType] -- the user's
            if len(self.arguments) + len(packed) != len(signature.arrays):
                raise ArgumentError(
                    f"{self.name} is called with the wrong number of arrays",
                    expected=f"{len(signature.arrays)} parameters, {', '.join(signature.arrays)}",
                    got=f"{len(self.arguments)} inputs and {len(packed)} outputs from out_type",
                    fix="give one argument for each input; out_type returns one entry for each output",
                )
        with source.at(definition.loc):
            for leaf in jax.tree.leaves(packed):
                _check_output(self.name, leaf)
        return single, jax.tree.map(_plain, packed)

    def _ask(self, out_type: Callable[..., Any]) -> Any:
        try:
            return out_type(*self.arguments, **select(out_type, self.statics))
        except TilekernError:
            raise
        except Exception as error:
            shown = ", ".join(_show(a) for a in self.arguments)
            raise ArgumentError(
                f"out_type of {self.name} fails on these arguments",
                expected="arrays of the ranks and shapes that out_type is written for",
                got=f"{type(error).__name__}: {error}; arguments: {shown}",
                fix="check the number, the order and the shapes of the arguments",
            ) from error


def _param(name: str, role: Any, path: tuple[Any, ...], leaf: Any) -> Param:
    return Param(name + jax.tree_util.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype), role)


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _show(argument: Any) -> str:
    return str(jax.tree.map(describe, argument)).replace("'", "")


def _check_output(name: str, leaf: Any) -> None:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and is_dtype(np.dtype(leaf.dtype)):
        return
    raise ArgumentError(
        f"out_type of {name} returned something that is no array type",
        expected="jax.ShapeDtypeStruct, in a pytree for each output; None for an output that is not wanted",
        got=describe(leaf),
        fix="return jax.ShapeDtypeStruct(shape, dtype)",
    )


def check_argument(name: str, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of an array argument, whose dtype must be one of the language's."""
    shaped = leaf if _jax.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
    dtype: Any = shaped.dtype
    plain = not jnp.issubdtype(dtype, jax.dtypes.extended)
    if plain and is_dtype(np.dtype(dtype)):
        return jax.ShapeDtypeStruct(shaped.shape, jax.dtypes.canonicalize_dtype(dtype))
    raise ArgumentError(
        f"{name} cannot take an array of this dtype",
        expected="a float, integer or bool array",
        got=f"{path}: {dtype_name(dtype) if plain else dtype}{list(shaped.shape)}",
        fix="pass complex numbers as two real arrays, PRNG keys as jax.random.key_data(key)",
    )
