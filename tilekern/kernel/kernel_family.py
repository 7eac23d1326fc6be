"""The family of a declared kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from tilekern import _jax, source
from tilekern.errors import ArgumentError, TraceError
from tilekern.ir.analysis.same_program import difference
from tilekern.ir.analysis.sharding import Factor, Place, sharding_of
from tilekern.ir.core import Func
from tilekern.ir.debug import Assert, Print
from tilekern.ir.types import FOUR_BITS, Role
from tilekern.kernel import derivatives, derived
from tilekern.kernel.choice import Tunable
from tilekern.kernel.declared_call import DeclaredCall
from tilekern.kernel.definition import Definition
from tilekern.kernel.results import Results, results
from tilekern.kernel.sharding_rule import ShardingRule, part_types, rule_of
from tilekern.kernel.signature import LAUNCH, check_sizes, select
from tilekern.kernel.stated_sharding import stated
from tilekern.kernel.tile_family import Member, TileFamily
from tilekern.lang.tiles import describe
from tilekern.lang.trace import Param, Tracing, trace
from tilekern.lower.target import Target, on_platform
from tilekern.passes import pipeline
from tilekern.passes.dce import dce
from tilekern.passes.divide import divide
from tilekern.passes.pin_indices import pin_indices

# The sizes of a kernel's blocks and the values of its choices, by name.
type _Blocks = tuple[tuple[str, Tunable], ...]


class KernelFamily(TileFamily):
    """A kernel for arguments of given types.

    Attributes:
      declared: the call.
    """

    def __init__(
        self,
        definition: Definition,
        arguments: Sequence[Any],
        statics: Mapping[str, Any],
        blocks: Mapping[str, Tunable],
        target: Target | None,
    ) -> None:
        super().__init__(definition.signature.name, target)
        result_types = _results(definition, arguments, statics)
        settings = definition.settings()
        self.declared = DeclaredCall(definition, tuple(arguments), statics, blocks, target, result_types, settings)
        self.outputs = jax.tree.leaves(result_types.trees)
        # Members of a body that closes over traced values, which can be traced while these live only.
        self._traced_early: dict[_Blocks, Member] = {}
        # Traces without passes, which the first member and the rule share, and the checks of parts.
        self._raw: dict[_Blocks, Tracing] = {}
        self._factors: dict[_Blocks, dict[frozenset[Place], Factor]] = {}

    @cached_property
    def _first(self) -> tuple[_Blocks, Tracing]:
        """The blocks and the trace, without passes, for `self.target`, whose trace decides what the operands are."""
        blocks = self._blocks(self.target)
        return blocks, self._as_traced(blocks)

    @cached_property
    def _first_member(self) -> Member:
        func = self._trace(self._first[0]).func
        return Member(func, tuple(range(len(func.inputs))))

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the body closes over: further operands of the call."""
        return self._first[1].captured

    @property
    def captures_tracers(self) -> bool:
        """True if the body closes over traced values, so that this family serves one call only."""
        return self._first[1].captures_tracers

    def member(self, target: Target) -> Member:
        blocks = self._blocks(target)
        if blocks == self._first[0]:
            return self._first_member
        if self.captures_tracers:
            # A target that `trace_early` could not trace for has the blocks of the first one.
            return self._traced_early.get(blocks) or self.member(self.target)
        member = self.caches.members.get(blocks)
        if member is None:
            self.caches.members[blocks] = member = self._member(blocks)
        return member

    def trace_early(self) -> None:
        """Trace the body for each platform that a call may be lowered for, while the values it closes over live."""
        for platform in ("cpu", "cuda", "tpu") if self.asked is None else (self.asked.platform,):
            # An error is one of a platform that the call may never be lowered for.
            with suppress(Exception):
                blocks = self._blocks(on_platform(platform, self.asked))
                if blocks != self._first[0] and blocks not in self._traced_early:
                    self._traced_early[blocks] = self._member(blocks)

    def launch(self, target: Target) -> Mapping[str, int]:
        chosen = self.declared.blocks_for(target)
        return {name: int(chosen[name]) for name in LAUNCH if name in chosen}

    def settings(self, target: Target) -> Mapping[str, int]:
        chosen = self.declared.blocks_for(target)
        return {name: size for name, size in chosen.items() if type(size) is int}

    def varied(self, settings: Mapping[str, int]) -> KernelFamily:
        call = self.declared
        blocks = {**call.blocks, **settings}
        return KernelFamily(call.definition, call.arguments, call.statics, blocks, call.asked)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        captured = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.captured]
        return [*jax.tree.leaves(self.declared.arguments), *captured]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if not self.states_rules:
            return derived.jvp(self, primals, tangents)
        return derivatives.jvp(self.declared, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        if self.declared.rules.transpose is None:
            return derived.transpose(self, cotangents, operands)
        return derivatives.transpose(self.declared, cotangents, operands)

    @property
    def residuals(self) -> int:
        return self.declared.definition.residuals

    @property
    def states_rules(self) -> bool:
        return not self.declared.rules.states_none

    @property
    def is_for_derivatives(self) -> bool:
        return self.declared.definition.derives

    @property
    def derives(self) -> KernelFamily:
        call = self.declared
        if self.captures_tracers or not call.definition.gradient_schedules:
            return self
        # With the blocks that the author chose for derivatives.
        definition = replace(call.definition, derives=True)
        return KernelFamily(definition, call.arguments, call.statics, call.blocks, call.asked)

    def _blocks(self, target: Target) -> _Blocks:
        chosen = self.declared.blocks_for(target)
        return tuple((name, chosen[name]) for name in self.declared.signature.tunables)

    def _member(self, blocks: _Blocks) -> Member:
        """The kernel with other blocks than the first, with which its body may close over other arrays.

        Arrays that are no operands of the call become constants of the member.
        """
        traced, operands = self._trace(blocks), self.captured
        first = len(jax.tree.leaves(self.declared.arguments))
        constants: list[Any] = []
        reads = list(range(first))
        for array in traced.captured:
            number = next((n for n, operand in enumerate(operands) if _same(array, operand)), None)
            if number is None:
                if isinstance(array, _jax.Tracer):
                    raise self._other_capture(array, blocks)
                number = len(operands) + len(constants)
                constants.append(array)
            reads.append(first + number)
        return Member(traced.func, tuple(reads), tuple(constants))

    def _other_capture(self, array: Any, blocks: _Blocks) -> TraceError:
        with source.at(self.declared.definition.loc):
            return TraceError(
                f"with some blocks only {self.name} closes over a traced value",
                expected="a body that closes over the same traced values with all blocks",
                got=f"{describe(array)} with {', '.join(f'{n} = {size}' for n, size in blocks)}",
                fix="pass it as an argument",
            )

    @property
    def rule(self) -> ShardingRule | None:
        has_none = self.captures_tracers or any(t.dtype in FOUR_BITS for t in (*self.types, *self.outputs))
        return None if has_none else self._rule

    @cached_property
    def _rule(self) -> ShardingRule:
        func, operand_count = self._first[1].func, len(self.types) - len(self.captured)
        if self.declared.rules.sharding is not None:
            return stated(self._stated_sharding(), func, operand_count)
        is_scheduled = not self.declared.blocks.keys() >= set(self.declared.signature.tunables)
        return rule_of(func, operand_count, with_other_blocks=is_scheduled)

    def calls_host(self, target: Target) -> bool:
        return any(isinstance(op, (Assert, Print)) for op in self._first[1].func.walk())

    def _stated_sharding(self) -> str:
        rule, call = self.declared.rules.sharding, self.declared
        assert rule is not None
        return rule(*call.arguments, **select(rule, call.statics))

    def _part(self, parts: Mapping[str, int]) -> PartFamily | str:
        rule, places = self._rule, self._places()
        operands = part_types(self.types, rule.operands, parts)
        try:
            part = PartFamily(self, {places[name]: count for name, count in parts.items()}, operands)
        except Exception as error:  # of the user's out_type, which may take sizes of the whole only
            return _failed(error)
        if [(x.shape, x.dtype) for x in part.outputs] != [
            (x.shape, x.dtype) for x in part_types(self.outputs, rule.results, parts)
        ]:
            return "the body depends on its size (the shapes of results)"
        return part.reason(self.target) or part

    def _places(self) -> dict[str, frozenset[Place]]:
        """For each name of the rule the dims of params that it stands for, as pairs (number of the param, dim)."""
        func, rule, by_name = self._first[1].func, self._rule, defaultdict[str, set[Place]](set)
        for params, side in ((func.inputs, rule.operands), (func.outputs, rule.results)):
            for param, dims in zip(params, side, strict=True):
                for n, name in enumerate(dims):
                    by_name[name].add((func.params.index(param), n))
        return {name: frozenset(places) for name, places in by_name.items()}

    def divided_func(self, blocks: _Blocks, parts: Mapping[frozenset[Place], int]) -> Func | str:
        """The Func of a part of the kernel with some blocks; or, as a str, the reason why there is none.

        Args:
          blocks: the blocks.
          parts: by dims of params that are divided together, the number of parts.
        """
        if blocks not in self._factors:
            sharding = sharding_of(self._as_traced(blocks).func)
            self._factors[blocks] = {factor.dims: factor for factor in sharding.factors}
        factors = self._factors[blocks]
        if not all(dims in factors for dims in parts):
            return "with the blocks of a part its tiles are no parts of the whole"
        if any(size % count for dims, count in parts.items() for size in factors[dims].sizes):
            return "parts of it are no whole tiles"
        return divide(self._as_traced(blocks).func, {factors[dims]: count for dims, count in parts.items()})

    def _trace(self, blocks: _Blocks) -> Tracing:
        """The body with some blocks, after the passes of every Func."""
        traced = self._as_traced(blocks)
        return Tracing(pipeline.run(traced.func), traced.captured)

    def _as_traced(self, blocks: _Blocks) -> Tracing:
        """The body with some blocks, before all passes, which change nothing in it."""
        tracing = self._raw.get(blocks)
        if tracing is None:
            tracing = self._raw[blocks] = self._traced(blocks)
        return tracing

    def _traced(self, blocks: _Blocks) -> Tracing:
        call, definition = self.declared, self.declared.definition
        names, roles = definition.signature.arrays, call.results.roles
        inputs = [
            jax.tree_util.tree_map_with_path(partial(_param, name, _role(definition, name)), tree)
            for name, tree in zip(names, call.arguments, strict=False)
        ]
        outputs = [
            jax.tree_util.tree_map_with_path(partial(_output, name), tree, of_tree)
            for name, tree, of_tree in zip(names[len(inputs) :], call.results.outputs, roles, strict=True)
        ]
        with _jax.tracing_under(call.settings):
            keywords = {**call.statics, **dict(blocks)}
            return trace(definition.function, self.name, [*inputs, *outputs], keywords, definition.loc)


class PartFamily(KernelFamily):
    """A kernel on the part of each operand that a device has.

    The body is traced for the types of the parts. With some blocks it is proved if that trace is, op by op, the Func
    that `divide` makes of the trace for whole arrays. A target gets blocks that are proved: its own for the part, or
    its own for the whole, or else the blocks of `self.target`.

    Args:
      whole: the family of the call.
      parts: by dims of params that are divided together, the number of parts.
      operands: the types of the parts of operands.
    """

    def __init__(
        self, whole: KernelFamily, parts: Mapping[frozenset[Place], int], operands: Sequence[jax.ShapeDtypeStruct]
    ) -> None:
        self._whole, self._parts, self._operands = whole, parts, operands
        self._reasons: dict[_Blocks, str] = {}
        call = whole.declared
        leaves, tree = _jax.flatten(call.arguments)
        arguments = jax.tree.unflatten(tree, operands[: len(leaves)])
        super().__init__(call.definition, arguments, call.statics, call.blocks, call.asked)

    def reason(self, target: Target) -> str:
        """The reason why no blocks of a target are proved; "" if some are, or if the author states the rule."""
        if self._whole.declared.rules.sharding is not None:
            return ""
        reasons = [self._unproved(blocks) for blocks in self._candidates(target)]
        return "" if "" in reasons else reasons[0]

    @property
    def derives(self) -> KernelFamily:
        whole = self._whole.derives
        if whole is self._whole:
            return self
        part = PartFamily(whole, self._parts, self._operands)
        return self if part.reason(part.target) else part

    def launch(self, target: Target) -> Mapping[str, int]:
        is_of_whole = self._blocks(target) != super()._blocks(target)
        return self._whole.launch(target) if is_of_whole else super().launch(target)

    def _blocks(self, target: Target) -> _Blocks:
        first = super()._blocks(target)
        if self._whole.declared.rules.sharding is not None:
            return first
        candidates = [*self._candidates(target), *self._candidates(self.target)]
        return next((blocks for blocks in candidates if not self._unproved(blocks)), first)

    def _candidates(self, target: Target) -> list[_Blocks]:
        return [super()._blocks(target), self._whole._blocks(target)]

    def _unproved(self, blocks: _Blocks) -> str:
        """The reason why the trace with some blocks is not proved to be a part of the whole; "" if it is."""
        if blocks not in self._reasons:
            self._reasons[blocks] = self._compared(blocks)
        return self._reasons[blocks]

    def _compared(self, blocks: _Blocks) -> str:
        divided = self._whole.divided_func(blocks, self._parts)
        if isinstance(divided, str):
            return divided
        try:
            traced = self._as_traced(blocks)
        except Exception as error:  # of the user's body
            return _failed(error)
        different = difference(dce(divided), dce(traced.func))
        # Bodies may leave out an index that is 0 in all programs, as the index of a part's only group.
        if different and difference(_simplified(divided), _simplified(traced.func)):
            return f"the body depends on its size ({different})"
        pairs = zip(self._whole._as_traced(blocks).captured, traced.captured, strict=True)
        return "" if all(_same(*pair) for pair in pairs) else "the body closes over other arrays for a part"


def _simplified(func: Func) -> Func:
    """A Func with indices pinned that can only be 0, after the passes, for a comparison."""
    return pipeline.run(pin_indices(func))


def _failed(error: Exception) -> str:
    first_line, *_ = str(error).splitlines() or [""]
    return f"the kernel does not take parts of it ({type(error).__name__}: {first_line})"


def _results(definition: Definition, arguments: Sequence[Any], statics: Mapping[str, Any]) -> Results:
    """The results of a kernel, checked against its parameters.

    Raises:
      ArgumentError: the numbers of inputs and outputs do not fit the parameters, or an output is donated.
    """
    name, names = definition.signature.name, definition.signature.arrays
    with source.at(source.current()):  # the call: frames of an out_type are the user's, too
        declared = definition.declared_type(arguments, statics)
        count = len(declared) if isinstance(declared, tuple) else 1  # pyright: ignore[reportUnknownArgumentType] -- the user's
        if len(arguments) + count != len(names):
            raise ArgumentError(
                f"{name} is called with the wrong number of arrays",
                expected=f"{len(names)} parameters, {', '.join(names)}",
                got=f"{len(arguments)} inputs and {count} outputs from out_type",
                fix="give one argument for each input; out_type returns one entry for each output",
            )
    donated = [a for n, a in zip(names, arguments, strict=False) if n in definition.donate]
    with source.at(definition.loc):
        if any(n in definition.donate for n in names[len(arguments) :]):
            raise ArgumentError(
                f"{name} donates an output",
                expected=f"names among the inputs, {', '.join(names[: len(arguments)])}",
                got=f"donate = {definition.donate!r}",
                fix="an output is the kernel's to write anyway; leave it out of donate",
            )
        checked_results = results(name, donated, declared)
    check_sizes(name, {f"result {n}": x for n, x in enumerate(jax.tree.leaves(checked_results.trees))})
    return checked_results


def _role(definition: Definition, name: str) -> Role:
    return "inout" if name in definition.donate else "in"


def _param(name: str, role: Role, path: tuple[Any, ...], leaf: Any) -> Param:
    return Param(name + jax.tree_util.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype), role)


def _output(name: str, path: tuple[Any, ...], leaf: Any, role: Role) -> Param:
    return _param(name, role, path, leaf)


def _same(array: Any, operand: Any) -> bool:
    """True for the same object, and for equal arrays of NumPy, of which each trace has its own copy."""
    if not (isinstance(array, np.ndarray) and isinstance(operand, np.ndarray)):
        return array is operand
    return (array.shape, array.dtype) == (operand.shape, operand.dtype) and array.tobytes() == operand.tobytes()
