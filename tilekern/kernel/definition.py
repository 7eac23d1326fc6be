"""The definition of a kernel or op, with everything that decorators state about it; and its calls on given types."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax

from tilekern import _jax, _machine, source
from tilekern.errors import ArgumentError, TargetError, TilekernError
from tilekern.ir.records import record
from tilekern.kernel.choice import Tunable
from tilekern.kernel.results import Results
from tilekern.kernel.signature import Signature, select
from tilekern.kernel.symbols import with_sizes
from tilekern.kernel.tuned import Tuned
from tilekern.lang.tiles import describe
from tilekern.lower.target import DEFAULT, TARGETS, Target, device_of, on_platform

Schedule = Callable[..., Mapping[str, Tunable]]


class Registers(Protocol):
    """A decorator that registers a schedule, and returns it with its own type."""

    def __call__[S: Schedule](self, schedule: S, /) -> S: ...


RESIDUALS = 1 << 30
"""Bytes of carries that a derived backward pass saves at most, unless the kernel says otherwise."""


@dataclass
class Rules:
    """The rules that the author of a kernel or an op states.

    Attributes:
      linear: names of inputs in which, together, the results are linear.
      callee: returns the kernel or op, by a weak reference: caches of JAX keep the rules, and would keep it, too.
      jvp: the rule of `defjvp`; None if none is stated.
      transpose: the rule of `deftranspose`; None if none is stated.
      sharding: the rule of `defsharding`; None if none is stated.
      instead_of_gathers: what callers can do about operands that devices gather; "" for general advice.
    """

    linear: tuple[str, ...] = ()
    callee: Callable[[], Callable[..., Any]] = field(init=False)
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    sharding: Callable[..., str] | None = None
    instead_of_gathers: str = ""

    @property
    def states_none(self) -> bool:
        """True if the author states no derivative, so that derivatives are derived."""
        return not self.linear and self.jvp is None and self.transpose is None


@record
class Definition:
    """The user's declaration of a kernel or op.

    Attributes:
      function: the body.
      out_type: returns the types of the results.
      signature: the parameters.
      donate: names of inputs that the kernel also writes to.
      schedules: the schedules, by the name of a target, or a prefix of it.
      rules: the rules that the author states.
      loc: the place of the `def`.
      residuals: the most bytes of carries that a derived backward pass may save.
      gradient_schedules: the schedules of derived derivatives, by name or prefix; `schedules` serve all other targets.
      derives: for a copy that derivatives are derived from, the source of its blocks: `gradient_schedules` and tuned
        blocks, "stated", or the model of the target, "modelled"; "" for the definition itself.
    """

    function: Callable[..., Any]
    out_type: Callable[..., Any]
    signature: Signature
    donate: tuple[str, ...]
    schedules: dict[str, Schedule]
    rules: Rules
    loc: source.Loc
    residuals: int = RESIDUALS
    gradient_schedules: dict[str, Schedule] = field(default_factory=dict[str, Schedule])
    derives: Literal["", "stated", "modelled"] = ""

    def settings(self) -> _jax.Settings:
        """The caller's settings of JAX; prebuilt kernels have only their `x64`, for checks are of the user's code."""
        settings = _jax.settings()
        return _jax.Settings(settings.x64) if source.is_prebuilt(self.loc) else settings

    def declared_type(self, arguments: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """The result of `out_type` for arguments of given types."""
        try:
            return self.out_type(*arguments, **select(self.out_type, statics))
        except TilekernError:
            raise
        except Exception as error:
            shown = ", ".join(str(jax.tree.map(describe, a)).replace("'", "") for a in arguments)
            raise ArgumentError(
                f"out_type of {self.signature.name} fails on these arguments",
                expected="arrays of the ranks and shapes that out_type is written for",
                got=f"{type(error).__name__}: {error}; arguments: {shown}",
                fix="check the number, the order and the shapes of the arguments",
            ) from error

    def stated_blocks(
        self,
        target: Target,
        arguments: Sequence[Any],
        statics: Mapping[str, Any],
        blocks_of_call: Mapping[str, Tunable],
    ) -> dict[str, Tunable]:
        """Blocks, choices and launch options on a target that somebody chose: the call's, else the schedule's.

        Args:
          target: the target.
          arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
          statics: the static arguments.
          blocks_of_call: the blocks, choices and launch options that the call gives.
        """
        return {**self._scheduled(target, arguments, statics), **blocks_of_call}

    def with_defaults(self, stated: Mapping[str, Tunable], target: Target) -> dict[str, Tunable]:
        """The stated blocks and choices, and the defaults of all others.

        Raises:
          ArgumentError: a block or a choice has neither.
        """
        signature = self.signature
        chosen = {**signature.defaults, **stated}
        for name in signature.tunables:
            if name not in chosen:
                choice = signature.choices.get(name)
                raise ArgumentError(
                    f"{signature.name} needs the {'choice' if choice else 'block'} {name}",
                    expected=f"{name}=..., a default, or a schedule for {target.name}",
                    got="no value",
                    fix=f"call {signature.name}(..., {name}={repr(choice.values[0]) if choice else 128})",
                )
        return chosen

    def _scheduled(self, target: Target, arguments: Sequence[Any], statics: Mapping[str, Any]) -> dict[str, Tunable]:
        schedule, device = self._schedule_for(target), device_of(target)
        similar = TARGETS[target.like] if schedule is None and target.like else target
        schedule = schedule or self._schedule_for(similar)
        if schedule is None:
            return {}
        keywords = {**statics, "target": target.name, "device": device}
        values = schedule(*arguments, **select(schedule, keywords))
        blocks = self.signature.check_blocks(values, f"the schedule {schedule.__name__}")
        if similar is not target and "num_warps" in blocks:
            # As many threads, whose warps are larger.
            blocks["num_warps"] = max(1, int(blocks["num_warps"]) * device_of(similar).lanes // device.lanes)
        return blocks

    def _schedule_for(self, target: Target) -> Schedule | None:
        own = _for_target(self.gradient_schedules, target) if self.derives else None
        return own or _for_target(self.schedules, target)


def _for_target(schedules: Mapping[str, Schedule], target: Target) -> Schedule | None:
    """The schedule of the longest name with which a target's name begins; None if there is none."""
    names = [name for name in schedules if target.name.startswith(name)]
    return schedules[max(names, key=len)] if names else None


# --- calls ------------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What a call gives besides arrays.

    Attributes:
      statics: the static arguments.
      blocks: the blocks, choices and launch options.
      asked: the target that the call names; None if it names none.
    """

    statics: Mapping[str, Any]
    blocks: Mapping[str, Tunable]
    asked: Target | None


@record(eq=False)
class TypedCall:
    """A call of a kernel or op on arguments of given types.

    Attributes:
      definition: the definition of the kernel or op.
      arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
      options: what the call gives besides arrays.
      target: the target that the body is traced for first, which decides what arrays it closes over.
      results: the types of the results.
      settings: the settings of JAX under which the body and the rules are traced.
      tuned: the tuned blocks of the place of the call; None for none.
    """

    definition: Definition
    arguments: tuple[Any, ...]
    options: Options
    target: Target
    results: Results
    settings: _jax.Settings
    tuned: Tuned | None = None

    @property
    def name(self) -> str:
        """The name of the kernel or op."""
        return self.definition.signature.name

    @property
    def asked(self) -> Target | None:
        """The target that the call names; None if it names none."""
        return self.options.asked

    @property
    def signature(self) -> Signature:
        """The parameters of the kernel or op."""
        return self.definition.signature

    @property
    def rules(self) -> Rules:
        """The rules for derivatives."""
        return self.definition.rules

    @property
    def keywords(self) -> dict[str, Any]:
        """Static arguments, then blocks, choices and launch options, as the call gives them."""
        return {**self.options.statics, **self.options.blocks}

    def stated_blocks(self, target: Target) -> dict[str, Tunable]:
        """Blocks, choices and launch options on a target that somebody chose: the call's, else the schedule's.

        A schedule sees a number in the place of a size that is a symbol.
        """
        arguments = self.arguments
        if _jax.has_symbols(arguments):
            arguments = jax.tree.map(with_sizes, arguments)
        return self.definition.stated_blocks(target, arguments, self.options.statics, self.options.blocks)

    def blocks_for(self, target: Target) -> dict[str, Tunable]:
        """Blocks, choices and launch options on a target: the call's, else the schedule's, else the defaults."""
        return self.definition.with_defaults(self.stated_blocks(target), target)

    def again(self, *args: Any) -> Any:
        """The results of the same call on inputs of any types: with its static arguments, blocks and target."""
        target = {} if self.asked is None else {"target": self.asked.asked_as}
        return self.rules.callee()(*args, **self.keywords, **target)


_expected: ContextVar[Target | None] = ContextVar("tilekern_expected_target", default=None)


def likely_target(asked: Target | None) -> Target:
    """The target that a call will most likely be lowered for: its body is traced for this target first.

    It is the target that the call names, `asked`, or the target of the op around the call; else the target of JAX's
    default device.
    """
    # There is no code for this GPU, or JAX has no device here; the call may be lowered for another one.
    with suppress(TargetError, RuntimeError):
        return asked or _expected.get() or on_platform(_machine.default_platform(), None)
    return DEFAULT


_inherited: ContextVar[str | None] = ContextVar("tilekern_inherited_target", default=None)


def inherited_target() -> str | None:
    """The name of the target for calls that do not name one, inside of an op or of a rule for derivatives."""
    return _inherited.get()


@contextmanager
def expecting(target: Target) -> Generator[None]:
    """Calls inside that name no target will be lowered for this one."""
    token = _expected.set(target)
    try:
        yield
    finally:
        _expected.reset(token)


@contextmanager
def inherit_target(target: Target | None) -> Generator[None]:
    """Calls inside that name no target use this one; None for the best target of the platform."""
    token = _inherited.set(None if target is None else target.asked_as)
    try:
        yield
    finally:
        _inherited.reset(token)
