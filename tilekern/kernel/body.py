"""The body of a kernel, traced for arguments of given types with the blocks of a target, and for parts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import numpy as np

from tilekern import _jax, source
from tilekern.errors import TilekernError, TraceError
from tilekern.ir.analysis.same_program import difference
from tilekern.ir.analysis.sharding import Factor, Place, sharding_of
from tilekern.ir.core import Func
from tilekern.ir.records import record
from tilekern.ir.types import Role
from tilekern.kernel.choice import Tunable
from tilekern.kernel.definition import TypedCall
from tilekern.kernel.derived_rules import gradient_funcs
from tilekern.kernel.fingerprint import key_of
from tilekern.kernel.instance import Version
from tilekern.kernel.primitive import Types
from tilekern.kernel.signature import LAUNCH
from tilekern.kernel.tuned import Entry, Key, Tuned, shipped
from tilekern.lang.tiles import describe
from tilekern.lang.trace import Param, Tracing, trace
from tilekern.lower.backend import OPEN
from tilekern.lower.lowering import is_refused
from tilekern.lower.target import Target, backend_of, on_platform
from tilekern.passes import pipeline
from tilekern.passes.dce import dce
from tilekern.passes.divide import divide
from tilekern.passes.pin_indices import pin_indices

# The sizes of a kernel's blocks and the values of its choices, by name.
type Blocks = tuple[tuple[str, Tunable], ...]


@record(eq=False)
class BlockTrace:
    """A trace of a body with some blocks.

    Attributes:
      blocks: the blocks.
      tracing: the Func before all passes, and the arrays that the body closes over.
    """

    blocks: Blocks
    tracing: Tracing

    @cached_property
    def func(self) -> Func:
        """The Func after the passes of all targets."""
        return pipeline.run(self.tracing.func)

    @cached_property
    def factors(self) -> dict[frozenset[Place], Factor]:
        """The factors by which devices may divide the call, by the dims of params that a factor divides."""
        return {factor.dims: factor for factor in sharding_of(self.tracing.func).factors}


@record(eq=False)
class Body:
    """The body of a kernel for arguments of given types.

    Its first trace decides what the operands of a call are: the arrays of the arguments, then `captured`.

    Attributes:
      call: the call.
      proof: for a body on parts of arrays, chooses blocks with which it is proved to compute parts; else None.
      plain: for a copy that derivatives are derived from, the body that it is a copy of; None if that is not known.
    """

    call: TypedCall
    proof: Proof | None = None
    plain: Body | None = None
    _traces: dict[Blocks, BlockTrace] = field(default_factory=dict[Blocks, BlockTrace], init=False)
    # Versions of a body that closes over traced values, which can be traced while these live only.
    _early: dict[Blocks, Version] = field(default_factory=dict[Blocks, Version], init=False)
    # By target and stated settings the blocks that nobody chose; by target the settings of the file of tuned blocks.
    _modelled: dict[tuple[Target, Blocks], Mapping[str, Tunable]] = field(
        default_factory=dict[tuple[Target, Blocks], Mapping[str, Tunable]], init=False
    )
    _tuned: dict[Target, Mapping[str, Tunable]] = field(default_factory=dict[Target, Mapping[str, Tunable]], init=False)

    @cached_property
    def first(self) -> BlockTrace:
        """The trace with the blocks for the target of the call."""
        return self.trace(self.blocks(self.call.target))

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the body closes over: further operands of the call."""
        return self.first.tracing.captured

    @property
    def captures_tracers(self) -> bool:
        """True if the body closes over traced values, so that this body serves one call only."""
        return self.first.tracing.captures_tracers

    def types(self) -> Types:
        """The types of the operands."""
        captured = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.captured]
        return [*jax.tree.leaves(self.call.arguments), *captured]

    # --- targets ---

    def blocks(self, target: Target) -> Blocks:
        """The blocks on a target."""
        return self.scheduled(target) if self.proof is None else self.proof.blocks(self, target)

    def scheduled(self, target: Target) -> Blocks:
        """The blocks on a target that the call, a file of tuned blocks or the schedule gives."""
        return self._blocks_of(self.settings(target))

    def _blocks_of(self, settings: Mapping[str, Tunable]) -> Blocks:
        return tuple((name, settings[name]) for name in self.call.signature.tunables)

    def own_settings(self, target: Target) -> Mapping[str, Tunable]:
        """Blocks, choices and launch options on a target without a file: the call's, the schedule's, the model's."""
        call = self.call
        stated = call.stated_blocks(target)
        free = [name for name in call.signature.blocks if name not in stated]
        # The search for blocks of a derivative begins at the blocks of the body.
        defaults = self._plain.settings(target) if self._derives_by_model else call.signature.defaults
        key = (target, tuple(stated.items()))
        # On CPUs gradients were up to 8% faster with blocks of their own, which take up to a second to find.
        keeps_defaults = self._derives_by_model and backend_of(target).hardware == "CPU"
        if free and not keeps_defaults and key not in self._modelled:
            self._modelled[key] = self._good_blocks(target, {**defaults, **stated}, free)
        return call.definition.with_defaults({**defaults, **self._modelled.get(key, {}), **stated}, target)

    def _good_blocks(self, target: Target, known: Mapping[str, Tunable], free: Sequence[str]) -> Mapping[str, int]:
        """The sizes of the free blocks by the model of the target; without blocks whose default stays."""
        from tilekern.blocks import good_blocks  # only kernels with such blocks pay for the import

        if not set(self.call.signature.choices) <= known.keys():
            return {}  # a choice without a value, which is an error

        @cache
        def funcs(blocks: Blocks) -> Sequence[Func]:
            if self._derives_by_model:
                return gradient_funcs(self.trace(blocks).func, self.call.definition.residuals)
            return [self.trace(blocks).tracing.func]

        # The model describes the plain emitter; Gluon's has few shapes of tiles.
        plain = replace(target, emitter="")

        def refuses(settings: Mapping[str, Tunable], large: bool = False) -> bool:
            blocks, names = self._blocks_of(settings), () if self._derives_by_model else LAUNCH
            launch = {name: int(settings[name]) for name in names if name in settings}
            try:
                lowered = funcs(blocks) if self._derives_by_model else [self.trace(blocks).func]
            except TilekernError:
                return True
            return any(is_refused(func, plain, launch, large) for func in lowered)

        # The library's own kernels have schedules, or defaults that were measured.
        is_users = not source.is_prebuilt(self.call.definition.loc)
        is_replaceable = is_users and target.emitter != "gluon"
        return good_blocks(lambda b: funcs(self._blocks_of(b)), refuses, plain, known, free, is_replaceable)

    def settings(self, target: Target) -> Mapping[str, Tunable]:
        """Blocks, choices and launch options on a target: the call's, else tuned ones, else the schedule's."""
        own = self.own_settings(target)
        if target not in self._tuned:
            entry = _entry(self._own_entry, target) or _entry(self._shipped_entry, target)
            settings = {} if entry is None else dict(entry.settings)
            self._tuned[target] = self.call.signature.check_blocks(settings, "the file of tuned blocks")
        return {**own, **self._tuned[target], **self.call.options.blocks}

    def emitter(self, target: Target) -> str:
        """The emitter that a file of tuned blocks chose for a target that leaves it open; "" if it chose none."""
        entry = self._own_entry(target) or self._shipped_entry(target)
        return "" if entry is None else entry.emitter

    def _own_entry(self, target: Target) -> Entry | None:
        """The entry of the user's table whose key has the target and its emitter."""
        table = self.call.tuned
        return table.entry(self.key(target)) if table is not None and self._has_entries(table, target) else None

    def _shipped_entry(self, target: Target) -> Entry | None:
        """The same of the table that tilekern ships with its own kernels; an entry of an older signature is a miss."""
        call = self.call
        if not source.is_prebuilt(call.definition.loc) or (call.tuned is not None and not call.tuned.shipped):
            return None
        table = shipped(target.name)
        if table is None or not self._has_entries(table, target):
            return None
        entry = table.entry(self.key(target, of_shipped=True))
        return entry if entry is not None and call.signature.takes(dict(entry.settings)) else None

    def _has_entries(self, table: Tuned, target: Target) -> bool:
        """True if a table has entries for the kernel on a target, of whatever IR."""
        return (self.call.name, target.full_name, bool(self.call.definition.derives)) in table.names

    def key(self, target: Target, of_shipped: bool = False) -> Key:
        """The key of the call in tables of tuned blocks; with `of_shipped` in the tables that tilekern ships."""
        own = self.own_settings(target)
        func = self.trace(self._blocks_of(own)).tracing.func
        derives = bool(self.call.definition.derives)
        return key_of(func, target, self.call.options.blocks, own.values(), derives, of_shipped)

    def launch(self, target: Target) -> Mapping[str, int]:
        """The launch options on a target that the call or the schedule gives: the schedule that chose the blocks."""
        if self.proof is not None and self.blocks(target) != self.scheduled(target):
            return self.proof.whole.launch(target)
        chosen = self.settings(target)
        return {name: int(chosen[name]) for name in LAUNCH if name in chosen}

    def version(self, target: Target) -> Version:
        """The block program for a target, with the target's blocks."""
        blocks = self.blocks(target)
        if blocks == self.first.blocks:
            return Version(self.first.func, tuple(range(len(self.first.func.inputs))))
        if not self.captures_tracers:
            return self._version(blocks)
        # A target that `trace_early` could not trace for has the blocks of the first one.
        return self._early.get(blocks) or self.version(self.call.target)

    def trace_early(self) -> None:
        """Trace the body for each target that a call may be lowered for, while the values it closes over live."""
        asked = self.call.asked
        # "any other" platform, an export, and a kernel that a backend refuses run on the portable one.
        for platform in ("cpu", "cuda", "tpu", "any other") if asked is None else (asked.platform,):
            # An error is one of a platform that the call may never be lowered for.
            with suppress(Exception):
                blocks = self.blocks(on_platform(platform, asked))
                if blocks != self.first.blocks and blocks not in self._early:
                    self._early[blocks] = self._version(blocks)

    def _version(self, blocks: Blocks) -> Version:
        """The block program with other blocks than the first, with which the body may close over other arrays.

        Arrays that are no operands of the call become constants of the version.
        """
        traced, operands = self.trace(blocks), self.captured
        first = len(jax.tree.leaves(self.call.arguments))
        constants: list[Any] = []
        reads = list(range(first))
        for array in traced.tracing.captured:
            number = next((n for n, operand in enumerate(operands) if _same(array, operand)), None)
            if number is None:
                if isinstance(array, _jax.Tracer):
                    raise self._other_capture(array, blocks)
                number = len(operands) + len(constants)
                constants.append(array)
            reads.append(first + number)
        return Version(traced.func, tuple(reads), tuple(constants))

    def _other_capture(self, array: Any, blocks: Blocks) -> TraceError:
        with source.at(self.call.definition.loc):
            return TraceError(
                f"with some blocks only {self.call.name} closes over a traced value",
                expected="a body that closes over the same traced values with all blocks",
                got=f"{describe(array)} with {', '.join(f'{n} = {size}' for n, size in blocks)}",
                fix="pass it as an argument",
            )

    # --- traces ---

    def trace(self, blocks: Blocks) -> BlockTrace:
        """The body traced with some blocks, once."""
        if self.plain is not None:
            return self.plain.trace(blocks)
        traced = self._traces.get(blocks)
        # Threads may trace it at once: then the first to end gives the trace to all.
        return traced or self._traces.setdefault(blocks, BlockTrace(blocks, self._traced(blocks)))

    def _traced(self, blocks: Blocks) -> Tracing:
        call, definition = self.call, self.call.definition
        names, roles = definition.signature.arrays, call.results.roles
        inputs = [
            jax.tree_util.tree_map_with_path(partial(_param, name, _role(definition.donate, name)), tree)
            for name, tree in zip(names, call.arguments, strict=False)
        ]
        outputs = [
            jax.tree_util.tree_map_with_path(partial(_output, name), tree, of_tree)
            for name, tree, of_tree in zip(names[len(inputs) :], call.results.outputs, roles, strict=True)
        ]
        with _jax.tracing_under(call.settings):
            keywords = {**call.options.statics, **dict(blocks)}
            return trace(definition.function, call.name, [*inputs, *outputs], keywords, definition.loc)

    # --- parts of arrays ---

    def divided(self, blocks: Blocks, parts: Mapping[frozenset[Place], int], of_elements: bool = False) -> Func | str:
        """The Func of a part of the kernel with some blocks; or, as a str, the reason why there is none.

        Args:
          blocks: the blocks.
          parts: by dims of params that are divided together, the number of parts.
          of_elements: True to refuse a dim whose elements are not proved to be independent of each other.
        """
        factors = self.trace(blocks).factors
        if not all(dims in factors for dims in parts):
            return "with the blocks of a part its tiles are no parts of the whole"
        if of_elements and not all(factors[dims].has_independent_elements for dims in parts):
            return "the elements of a tile are combined"
        if any(size % count for dims, count in parts.items() for size in factors[dims].sizes):
            return "parts of it are no whole tiles"
        return divide(self.trace(blocks).tracing.func, {factors[dims]: count for dims, count in parts.items()})

    @property
    def has_blocks_for_derivatives(self) -> bool:
        """True if the author, or a table of tuned blocks, has blocks for derivatives."""
        table = self.call.tuned
        is_tuned = table is not None and any(name == self.call.name and g for name, _, g in table.names)
        return is_tuned or bool(self.call.definition.gradient_schedules)

    @property
    def models_derivatives(self) -> bool:
        """True if the model of the target may choose blocks for the derived derivatives of a user's kernel."""
        call = self.call
        if call.definition.derives or not call.rules.states_none or source.is_prebuilt(call.definition.loc):
            return False
        return not call.stated_blocks(call.target).keys() >= set(call.signature.blocks)

    @property
    def _derives_by_model(self) -> bool:
        return self.call.definition.derives == "modelled"

    @cached_property
    def _plain(self) -> Body:
        """The body that a copy for derivatives is a copy of."""
        definition = replace(self.call.definition, derives="")
        return self.plain or Body(replace(self.call, definition=definition))

    def for_derivatives(self, always: bool = False) -> Body:
        """The body with the blocks for derivatives; itself if there are none, unless a copy is `always` wanted."""
        is_stated = always or self.has_blocks_for_derivatives
        if self.captures_tracers or not (is_stated or self.models_derivatives):
            return self
        definition = replace(self.call.definition, derives="stated" if is_stated else "modelled")
        call = replace(self.call, definition=definition)
        if self.proof is None:
            return Body(call, plain=self)
        whole = self.proof.whole.for_derivatives()
        if whole is self.proof.whole:
            return self
        part = Body(call, replace(self.proof, whole=whole), self)
        return self if part.unproved(call.target) else part

    def unproved(self, target: Target) -> str:
        """The reason why no blocks of a target are proved to compute parts; "" if some are."""
        return "" if self.proof is None else self.proof.reason(self, target)


@record(eq=False)
class Proof:
    """A choice of blocks with which a body on parts of arrays is proved to compute parts of the results.

    With some blocks the body is proved if its trace is, op by op, the Func that `divide` makes of the trace for whole
    arrays. A target gets blocks that are proved: its own for the part, or its own for the whole, or else the blocks of
    the call's target.

    Attributes:
      whole: the body on whole arrays.
      parts: by dims of params that are divided together, the number of parts.
      of_elements: True if the elements along the dims must be independent of each other, also inside of a tile.
    """

    whole: Body
    parts: Mapping[frozenset[Place], int]
    of_elements: bool = False
    _reasons: dict[Blocks, str] = field(default_factory=dict[Blocks, str], init=False)

    def blocks(self, body: Body, target: Target) -> Blocks:
        """The blocks of a target, proved if there are such."""
        first = body.scheduled(target)
        if self._is_stated:
            return first
        candidates = [*self._candidates(body, target), *self._candidates(body, body.call.target)]
        return next((blocks for blocks in candidates if not self._unproved(body, blocks)), first)

    def reason(self, body: Body, target: Target) -> str:
        """The reason why no blocks of a target are proved; "" if some are, or if the author states the rule."""
        if self._is_stated:
            return ""
        first, second = self._candidates(body, target)
        reason = self._unproved(body, first)
        return reason if reason and self._unproved(body, second) else ""

    @property
    def _is_stated(self) -> bool:
        return self.whole.call.rules.sharding is not None

    def _candidates(self, body: Body, target: Target) -> list[Blocks]:
        return [body.scheduled(target), self.whole.blocks(target)]

    def _unproved(self, body: Body, blocks: Blocks) -> str:
        """The reason why the trace with some blocks is not proved to be a part of the whole; "" if it is."""
        if blocks not in self._reasons:
            self._reasons[blocks] = self._compared(body, blocks)
        return self._reasons[blocks]

    def _compared(self, body: Body, blocks: Blocks) -> str:
        divided = self.whole.divided(blocks, self.parts, self.of_elements)
        if isinstance(divided, str):
            return divided
        try:
            traced = body.trace(blocks).tracing
        except Exception as error:  # of the user's body
            return failed(error)
        different = difference(dce(divided), dce(traced.func))
        # Bodies may leave out an index that is 0 in all programs, as the index of a part's only group.
        if different and difference(_simplified(divided), _simplified(traced.func)):
            return f"the body depends on its size ({different})"
        pairs = zip(self.whole.trace(blocks).tracing.captured, traced.captured, strict=True)
        return "" if all(_same(*pair) for pair in pairs) else "the body closes over other arrays for a part"


def _entry(of: Callable[[Target], Entry | None], target: Target) -> Entry | None:
    """The entry for a target: its own; else the entry for the open emitter, if that chose the target's emitter.

    Args:
      of: returns the entry of a table whose key has a target and its emitter.
      target: the target.
    """
    own = of(target)
    if own is not None or target.emitter == OPEN or OPEN not in target.emitters:
        return own
    entry = of(replace(target, emitter=OPEN))
    return entry if entry is not None and entry.emitter == (target.emitter or target.emitters[0]) else None


def failed(error: Exception) -> str:
    """The reason why there is no part of a kernel: the user's code raised an error for the part's types."""
    first_line, *_ = str(error).splitlines() or [""]
    return f"the kernel does not take parts of it ({type(error).__name__}: {first_line})"


def _simplified(func: Func) -> Func:
    """A Func with indices pinned that can only be 0, after the passes, for a comparison."""
    return pipeline.run(pin_indices(func))


def _role(donated: Sequence[str], name: str) -> Role:
    return "inout" if name in donated else "in"


def _param(name: str, role: Role, path: tuple[Any, ...], leaf: Any) -> Param:
    return Param(name + jax.tree_util.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype), role)


def _output(name: str, path: tuple[Any, ...], leaf: Any, role: Role) -> Param:
    return _param(name, role, path, leaf)


def _same(array: Any, operand: Any) -> bool:
    """True for the same object, and for equal arrays of NumPy, of which each trace has its own copy."""
    if not (isinstance(array, np.ndarray) and isinstance(operand, np.ndarray)):
        return array is operand
    return (array.shape, array.dtype) == (operand.shape, operand.dtype) and array.tobytes() == operand.tobytes()
