"""Families: a kernel, or an op, for given argument types, as `kernel_call_p` carries it.

A family has a member for each target: the kernel traced with that target's blocks, when it is first needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import jax
import numpy as np

from tilekern import _jax, _meshes, source
from tilekern.errors import (
    ArgumentError,
    DependencyError,
    FallbackWarning,
    GatherWarning,
    TargetError,
    TilekernError,
)
from tilekern.ir.core import Func
from tilekern.ir.types import Role
from tilekern.kernel import derivatives
from tilekern.kernel.asking import asking
from tilekern.kernel.derivatives import Rules, batched_jvp, batched_transpose
from tilekern.kernel.packed import before_pairs, packed, unpacked
from tilekern.kernel.results import Results, results
from tilekern.kernel.signature import LAUNCH, Signature, check_sizes, select
from tilekern.lang.tiles import describe
from tilekern.lang.trace import Param, Tracing, trace
from tilekern.lower.lowering import Lowering, lower
from tilekern.lower.target import DEFAULT, FALL_BACK, Target, on_platform
from tilekern.lower.xla.lowering import XlaLowering
from tilekern.passes import pipeline
from tilekern.passes.batch import batch, places
from tilekern.primitive import call

Schedule = Callable[..., Mapping[str, int]]

# The kernels of a call, and the targets that they are for.
type Calls = list[tuple[TileFamily, Target]]

# Kernels and shapes for which a `GatherWarning` was given.
_GATHERING = _jax.Cache[tuple[Any, ...], None](512)


@dataclass(frozen=True)
class Definition:
    """What the user declared: body, rule for the outputs, donated inputs, schedules by target prefix, derivatives."""

    function: Callable[..., Any]
    out_type: Callable[..., Any]
    signature: Signature
    donate: tuple[str, ...]
    schedules: dict[str, Schedule]
    rules: Rules
    loc: source.Loc


class Family:
    """Base of families: what the primitive needs.

    Attributes:
      name: of the kernel.
      asked: the target that the call asks for, None for the best one of the platform it is lowered for.
      target: the target whose member stands for the family where no platform is known yet.
      outputs: the types of the results.
      indivisible: the targets whose programs XLA cannot divide among devices, of those that were asked for.
    """

    outputs: Sequence[jax.ShapeDtypeStruct]

    def __init__(self, name: str, asked: Target | None) -> None:
        self.name, self.asked, self.target = name, asked, asked or DEFAULT
        self.indivisible = set[Target]()
        self._calls: dict[Target, Callable[..., Sequence[jax.Array]]] = {}

    def __repr__(self) -> str:
        return self.name

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        """The program for a target, jitted."""
        raise NotImplementedError

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        """The family of `size` calls at once, operand number n stacked along `dims[n]` (None: shared by all calls).

        All results are stacked along dim 0. Operands must be stacked along the dims returned with the family, which
        differ from `dims` only where a shared operand has to be stacked.
        """
        raise NotImplementedError

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        """The kernels that a call for a target runs, in the order in which their calls begin."""
        raise NotImplementedError

    def call(self, platform: str, site: _meshes.Site) -> Callable[..., Sequence[jax.Array]]:
        """The jitted program for a platform; one object, so that many calls share one computation.

        Raises:
          TargetError: the program is a kernel for TPUs, and XLA would have to divide it among several.
        """
        target = on_platform(platform, self.asked, site.exporting)
        if target not in self._calls:
            self._calls[target] = self.program(target)
        if site.divided and target in self.indivisible:
            self._not_divided(target, site)
        return self._calls[target]

    def _not_divided(self, target: Target, site: _meshes.Site) -> None:
        fix = "wrap the call in jax.shard_map: then each device calls the kernel for its own part"
        if target.backend == "mosaic":
            raise TargetError(
                f"XLA cannot divide the kernel {self.name} among TPUs",
                expected="a program for one device, or a call in jax.shard_map over all axes of the mesh",
                got=f"a program that XLA divides among {site.divided}",
                fix=fix,
            )
        shape = (self.name, site.gathered, *((o.shape, o.dtype) for o in self.outputs))
        if not site.gathered or shape in _GATHERING:
            return
        _GATHERING[shape] = None
        message = (
            f"XLA divides a program among {site.divided}, but not its call of {self.name}: each device gathers the "
            f"arguments, {site.gathered} bytes at most, and computes the whole result.\n  fix: {fix}"
        )
        loc = source.current()
        warnings.warn_explicit(message, GatherWarning, loc.file, loc.line)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The results and their tangents; None is a tangent that is zero."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        """The cotangents of those operands that are a `jax.ShapeDtypeStruct`, in which the results are linear."""
        raise NotImplementedError

    @cached_property
    def eager(self) -> Callable[..., Sequence[jax.Array]]:
        """The primitive under jit, for calls outside of it."""
        return _jax.jit_checked(partial(call, self), self.name)


class TileFamily(Family):
    """Base of the families whose members are Funcs."""

    def __init__(self, name: str, asked: Target | None) -> None:
        super().__init__(name, asked)
        self._batched: dict[tuple[int, tuple[int | None, ...]], TileFamily] = {}

    def member(self, target: Target) -> Tracing:
        """The kernel traced with the blocks of a target, and improved by the passes."""
        raise NotImplementedError

    def func(self, target: Target | None = None) -> Func:
        """The block IR for a target."""
        return self.member(target or self.target).func

    def launch(self, target: Target) -> Mapping[str, int]:
        """The launch options on a target, those that somebody chose."""
        raise NotImplementedError

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        raise NotImplementedError

    def lowered(self, target: Target) -> Lowering:
        """The member for a target, lowered to it."""
        return lower(self.func(target), target, self.launch(target))

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        lowering = self._lowered_as_asked(target)
        if not isinstance(lowering, XlaLowering):
            self.indivisible.add(target)

        def program(*operands: jax.Array) -> Sequence[jax.Array]:
            return unpacked(lowering.run(*packed(operands)), self.outputs)

        program.__name__ = self.name
        return jax.jit(program)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return [(self, target)]

    def _lowered_as_asked(self, target: Target) -> Lowering:
        """The member lowered to a target, or by the portable backend if nobody asked for the target by name."""
        by_name = self.asked is not None and not self.asked.falls_back
        return self.lowered(target) if by_name else self.lowered_or_portable(target)

    def lowered_or_portable(self, target: Target) -> Lowering:
        """The member lowered to a target, or with a warning by the portable backend what the target's refuses.

        Too large a block is an error: the portable backend would need the memory, too.
        """
        if target.backend not in FALL_BACK:
            return self.lowered(target)
        try:
            return self.lowered(target)
        except (TargetError, DependencyError) as error:
            message = f"{self.name} runs on {target.platform} by the portable backend, which is slower.\n{error}"
            warnings.warn(message, FallbackWarning, stacklevel=2)
            return self.lowered(DEFAULT)

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        if _jax.has_symbols((size,)):
            family = MappedFamily(self, size, dims)
            return family, family.dims
        wanted = places(self.func(), tuple(map(before_pairs, self.types, dims)))
        key = (size, wanted)
        if key not in self._batched:
            self._batched[key] = BatchedFamily(self, size, wanted)
        return self._batched[key], wanted


class BatchedFamily(TileFamily):
    """A family under `jax.vmap`: the batch is one more parallel axis of its members."""

    def __init__(self, inner: TileFamily, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self._dims = inner, size, dims
        self._members: dict[Target, Tracing] = {}
        self.outputs = stacked(inner.outputs, size)

    def member(self, target: Target) -> Tracing:
        if target not in self._members:
            inner = self._inner.member(target)
            self._members[target] = Tracing(batch(inner.func, self._size, self._dims), inner.captured)
        return self._members[target]

    def launch(self, target: Target) -> Mapping[str, int]:
        return self._inner.launch(target)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self._inner.types, self._dims, strict=True)
        shapes = [(t, t.shape if d is None else (*t.shape[:d], self._size, *t.shape[d:])) for t, d in pairs]
        return [jax.ShapeDtypeStruct(shape, t.dtype) for t, shape in shapes]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)


class MappedFamily(Family):
    """A family under `jax.vmap` over a batch of unknown size: a loop over the batch, for a grid has a known size.

    Attributes:
      dims: 0 for operands that are stacked, None for those that all calls share.
    """

    def __init__(self, inner: Family, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self.indivisible = inner, size, inner.indivisible
        self.dims = tuple(None if d is None else 0 for d in dims)
        self.outputs = stacked(inner.outputs, size)

    def program(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        one = self._inner.program(target)

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            def call(slices: Sequence[jax.Array]) -> Sequence[jax.Array]:
                each = iter(slices)
                return one(*(x if d is None else next(each) for x, d in zip(operands, self.dims, strict=True)))

            return cast(Any, jax.lax).map(call, [x for x, d in zip(operands, self.dims, strict=True) if d is not None])

        run.__name__ = self.name
        return jax.jit(run)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        pairs = zip(operands, self.dims, strict=True)
        return self._inner.kernels(
            target, [x if d is None else jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x, d in pairs]
        )

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        family = MappedFamily(self, size, dims)
        return family, family.dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self.dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self.dims, cotangents, operands)


class DeclaredFamily(Family):
    """Base of the families of declared kernels and ops: their derivatives.

    Attributes:
      signature: of the kernel or op.
      arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
      keywords: static arguments and blocks, as the call gave them.
      rules: for the derivatives.
      results: what a call returns.
      settings: of JAX, under which bodies and rules are traced.
    """

    signature: Signature
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    rules: Rules
    results: Results
    settings: _jax.Settings

    def again(self, *args: Any) -> Any:
        """The same call, on other inputs."""
        target = {} if self.asked is None else {"target": self.asked.asked_as}
        return self.rules.callee()(*args, **self.keywords, **target)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        with asking(self.asked), _jax.checking(self.settings):
            return derivatives.jvp(self, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        with asking(self.asked), _jax.checking(self.settings):
            return derivatives.transpose(self, cotangents, operands)


class KernelFamily(DeclaredFamily, TileFamily):
    """A kernel for arguments of given types.

    Attributes:
      statics: the static arguments.
      blocks: the blocks that the call fixed.
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
        self._definition, self.signature, self.rules = definition, definition.signature, definition.rules
        self.arguments, self.statics, self.blocks = tuple(arguments), statics, blocks
        self.keywords = {**statics, **blocks}
        self.settings = settings_of(definition)
        self._members: dict[tuple[Any, ...], Tracing] = {}
        self.results = self._results()
        self.outputs = jax.tree.leaves(self.results.trees)

    def member(self, target: Target) -> Tracing:
        # A body that closes over traced values can be traced while they live only: once, for all targets.
        for first in list(self._members.values())[:1]:
            if first.captures_tracers:
                return first
        chosen = self._chosen(target)
        blocks = {name: chosen[name] for name in self.signature.blocks}
        key = tuple(blocks.items())
        if key not in self._members:
            self._members[key] = self._trace(blocks)
        return self._members[key]

    def launch(self, target: Target) -> Mapping[str, int]:
        chosen = self._chosen(target)
        return {name: chosen[name] for name in LAUNCH if name in chosen}

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        captured = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.captured]
        return [*jax.tree.leaves(self.arguments), *captured]

    def _chosen(self, target: Target) -> Mapping[str, int]:
        return blocks_for(self._definition, target, self.arguments, self.statics, self.blocks)

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the body closes over, further operands of the call."""
        return self.member(self.target).captured

    @property
    def captures_tracers(self) -> bool:
        """Whether this family serves one call only."""
        return self.member(self.target).captures_tracers

    def _trace(self, blocks: Mapping[str, int]) -> Tracing:
        definition, names = self._definition, self._definition.signature.arrays
        inputs = [
            jax.tree_util.tree_map_with_path(partial(_param, name, self._role(name)), tree)
            for name, tree in zip(names, self.arguments, strict=False)
        ]
        outputs = [
            jax.tree_util.tree_map_with_path(partial(_output, name), tree, roles)
            for name, tree, roles in zip(names[len(inputs) :], self.results.outputs, self.results.roles, strict=True)
        ]
        with _jax.tracing_under(self.settings):
            keywords = {**self.statics, **blocks}
            traced = trace(definition.function, self.name, [*inputs, *outputs], keywords, definition.loc)
        return Tracing(pipeline.run(traced.func), traced.captured)

    def _role(self, name: str) -> Role:
        return "inout" if name in self._definition.donate else "in"

    def _results(self) -> Results:
        definition, names = self._definition, self._definition.signature.arrays
        with source.at(source.current()):  # the call: frames of an out_type are the user's, too
            declared = declared_type(definition, self.arguments, self.statics)
            count = len(declared) if isinstance(declared, tuple) else 1  # pyright: ignore[reportUnknownArgumentType] -- the user's
            if len(self.arguments) + count != len(names):
                raise ArgumentError(
                    f"{self.name} is called with the wrong number of arrays",
                    expected=f"{len(names)} parameters, {', '.join(names)}",
                    got=f"{len(self.arguments)} inputs and {count} outputs from out_type",
                    fix="give one argument for each input; out_type returns one entry for each output",
                )
        donated = [a for name, a in zip(names, self.arguments, strict=False) if name in definition.donate]
        with source.at(definition.loc):
            if any(name in definition.donate for name in names[len(self.arguments) :]):
                raise ArgumentError(
                    f"{self.name} donates an output",
                    expected=f"names among the inputs, {', '.join(names[: len(self.arguments)])}",
                    got=f"donate = {definition.donate!r}",
                    fix="an output is the kernel's to write anyway; leave it out of donate",
                )
            found = results(self.name, donated, declared)
        check_sizes(self.name, {f"result {n}": x for n, x in enumerate(jax.tree.leaves(found.trees))})
        return found


def settings_of(definition: Definition) -> _jax.Settings:
    """The caller's settings; the prebuilt kernels are not checked, for the modes check the user's code."""
    found = _jax.settings()
    return _jax.Settings(found.x64) if source.is_prebuilt(definition.loc) else found


def stacked(outputs: Sequence[jax.ShapeDtypeStruct], size: int) -> list[jax.ShapeDtypeStruct]:
    """The types of results of `size` calls, stacked in dim 0."""
    return [jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in outputs]


def blocks_for(
    definition: Definition,
    target: Target,
    arguments: Sequence[Any],
    statics: Mapping[str, Any],
    given: Mapping[str, int],
) -> dict[str, int]:
    """Blocks and launch options on a target: the declared defaults, the schedule's, the call's; the last one counts."""
    signature = definition.signature
    defaults = {n: v for n, v in signature.blocks.items() if isinstance(v, int)}
    chosen = {**defaults, **_scheduled(definition, target, arguments, statics), **given}
    for name in signature.blocks:
        if name not in chosen:
            raise ArgumentError(
                f"{signature.name} needs the block {name}",
                expected=f"{name}=..., a default, or a schedule for {target.name}",
                got="no value",
                fix=f"call {signature.name}(..., {name}=128)",
            )
    return chosen


def _scheduled(
    definition: Definition, target: Target, arguments: Sequence[Any], statics: Mapping[str, Any]
) -> dict[str, int]:
    prefixes = [p for p in definition.schedules if target.name.startswith(p)]
    if not prefixes:
        return {}
    schedule = definition.schedules[max(prefixes, key=len)]
    values = schedule(*arguments, **select(schedule, {**statics, "target": target.name}))
    return definition.signature.check_blocks(values, f"the schedule {schedule.__name__}")


def declared_type(definition: Definition, arguments: Sequence[Any], statics: Mapping[str, Any]) -> Any:
    """What `out_type` returns for arguments of given types."""
    try:
        return definition.out_type(*arguments, **select(definition.out_type, statics))
    except TilekernError:
        raise
    except Exception as error:
        shown = ", ".join(_show(a) for a in arguments)
        raise ArgumentError(
            f"out_type of {definition.signature.name} fails on these arguments",
            expected="arrays of the ranks and shapes that out_type is written for",
            got=f"{type(error).__name__}: {error}; arguments: {shown}",
            fix="check the number, the order and the shapes of the arguments",
        ) from error


def _param(name: str, role: Any, path: tuple[Any, ...], leaf: Any) -> Param:
    return Param(name + jax.tree_util.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype), role)


def _output(name: str, path: tuple[Any, ...], leaf: Any, role: Any) -> Param:
    return _param(name, role, path, leaf)


def _show(argument: Any) -> str:
    return str(jax.tree.map(describe, argument)).replace("'", "")
