"""`@tilekern.kernel` and `@tilekern.op`: from Python functions to JAX functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from tilekern.errors import ArgumentError, checked
from tilekern.kernel import composite, traced
from tilekern.kernel.body import Body
from tilekern.kernel.composite import Composite
from tilekern.kernel.definition import RESIDUALS, Definition, Options, Registers, Schedule
from tilekern.kernel.entry import Declared, Prepared
from tilekern.kernel.instance import Instance
from tilekern.kernel.interface import of_call
from tilekern.kernel.op_stages import TracedOp
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.kernel.stages import Traced
from tilekern.lang.tiles import describe
from tilekern.lower.target import DEFAULT, Target

if TYPE_CHECKING:
    from tilekern.tuning import Result


@checked
def kernel(
    function: None = None,
    /,
    *,
    out_type: Callable[..., Any] | None = None,
    donate: tuple[str, ...] = (),
    linear: tuple[str, ...] = (),
    residuals: int = RESIDUALS,
) -> Callable[[Callable[..., None]], Kernel]:
    """Make a JAX function of a function over refs.

    The decorated function's positional parameters are pytrees of `Ref`s, inputs first, then outputs; its keyword-only
    parameters are static. A schedule may give parameters annotated with `tk.Block`, which are block sizes, or with
    `tk.Choice`. The function stores every element of every output that is neither `tk.Zeros` nor `tk.Sum`.

    The body is traced once for the types and static arguments of a call, as by `jax.jit`. A global that it reads keeps
    the value of that time. Pass a value that changes as an array or a static argument.

    Args:
      function: never passed: the decorator is written with arguments, `@tk.kernel(out_type=...)`.
      out_type: required; called with the inputs as `jax.ShapeDtypeStruct`s, and with those static arguments (blocks
        and choices excepted) that it has parameters for; returns the type of the output, or a tuple with one entry (a
        type, a pytree of types, or None) for each output parameter. A type is a `jax.ShapeDtypeStruct`, or one in
        `tk.Zeros` or `tk.Sum`.
      donate: names of inputs that the kernel also writes to; they are returned, before the outputs. The caller's array
        does not change: XLA copies it if it is used again.
      linear: names of inputs in which, taken together, the results are linear, None standing for an input of zeros: the
        tangents that a tangent kernel takes. The kernel is then its own derivative in these, see `Kernel.defjvp` and
        `Kernel.deftranspose`.
      residuals: the most bytes of carries that the backward pass may save, where derivatives are derived; see
        `Traced.gradient`.

    A kernel has derivatives of all orders, in forward and reverse mode, which are derived from its body. Rules that the
    author states by `Kernel.defjvp` and `Kernel.deftranspose` win.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
      ... def double(x, out, *, block: tk.Block = 128):
      ...     i = tk.parallel(x.shape[0], block)
      ...     out[i] = x[i] * 2
      >>> double(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """
    return partial(Kernel, _required("kernel", function, out_type), donate, linear, _checked(residuals))


def _required(decorator: str, function: Any, out_type: Callable[..., Any] | None) -> Callable[..., Any]:
    """`out_type`, which a decorator must give.

    Raises:
      ArgumentError: `out_type` is missing, or `function` is given: the decorator was written without arguments.
    """
    if function is None and callable(out_type):
        return out_type
    raise ArgumentError(
        f"tk.{decorator} needs the types of the results, out_type",
        expected=f"@tk.{decorator}(out_type=...) above the function, out_type a function of the inputs' types",
        got=f"@tk.{decorator} without arguments" if function is not None else f"out_type = {describe(out_type)}",
        fix=f"write @tk.{decorator}(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))",
    )


def _checked(residuals: Any) -> int:
    if type(residuals) is not int or residuals < 0:
        raise ArgumentError(
            "residuals is no number of bytes",
            expected="an int that is at least 0",
            got=f"residuals = {describe(residuals)}",
            fix=f"leave it out for {RESIDUALS >> 20} MiB",
        )
    return residuals


class Kernel(Declared):
    """A kernel, made by `kernel`: call it like a function of arrays, inside or outside of `jax.jit`.

    Calls take the inputs and any keyword-only arguments, and `target=` to lower for that target's blocks.
    """

    def __init__(
        self,
        out_type: Callable[..., Any],
        donate: tuple[str, ...],
        linear: tuple[str, ...],
        residuals: int,
        function: Callable[..., None],
    ) -> None:
        super().__init__(out_type, function, donate, linear, residuals)

    @staticmethod
    def _count_outputs(definition: Definition) -> int:
        """The number of positional parameters that `out_type` does not take, at least 1; 1 if it takes `*inputs`."""
        arrays = len(definition.signature.arrays)
        parameters = inspect.signature(definition.out_type).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return 1
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        inputs = [p for p in parameters if p.kind in kinds and p.name not in definition.signature.statics]
        return max(1, arrays - len(inputs))

    @checked
    def gradient_schedule(self, target: str) -> Registers:
        """Declare the blocks of derived derivatives for all targets whose name starts with `target`.

        As `schedule`; without it, derivatives have the blocks of the kernel itself, and the default launch options.
        """

        def register[S: Schedule](schedule: S) -> S:
            self._definition.gradient_schedules[target] = schedule
            return schedule

        return register

    @checked
    def defsharding(self, rule: Callable[..., str]) -> Callable[..., str]:
        """Declare how devices may divide a call, where accesses do not say it: `rule(*inputs)` returns a notation.

        The inputs come as `jax.ShapeDtypeStruct`s, static arguments that the rule has parameters for by keyword. The
        notation has a name for each dim of each array, inputs before results, as in "b i d, b j d -> b i d". Dims of
        one name are divided together. A dim that is whole on each device is a dot. A result without a name is summed
        over the devices among which that name is divided. Nothing is checked but the sizes of results: the kernel on
        parts must compute the parts of its results, or addends.

        Example:
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def reversed_rows(x, out):
          ...     i = tk.parallel(x.shape[0])
          ...     out[i, :] = x[x.shape[0] - 1 - i, :]
          >>> @reversed_rows.defsharding
          ... def _(x):
          ...     return ". j -> . j"
          >>> print(reversed_rows.sharding_rule(jnp.ones((4, 8))))
          x.0 j -> out.0 j
        """
        self._definition.rules.sharding = rule
        return rule

    @checked
    def sharding_rule(self, *args: Any, **keywords: Any) -> ShardingRule | None:
        """The rule by which devices divide a call for arrays or `jax.ShapeDtypeStruct`s and static arguments.

        It follows from the accesses of the body, if `defsharding` states none; None for a body that closes over traced
        values, and for 4-bit arrays.

        Example:
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def doubled_rows(x, out, *, block: tk.Block = 8):
          ...     i = tk.parallel(x.shape[0], block)
          ...     out[i, :] = x[i, :] * 2
          >>> print(doubled_rows.sharding_rule(jnp.ones((16, 4))))
          i x.1 -> i out.1
        """
        inputs, keywords_left = self.signature.positional(args, keywords)
        return self._prepared(inputs, self._check(keywords_left)).callee.sharding

    @checked
    def tune(
        self,
        *args: Any,
        target: str | None = None,
        budget: float = 60,
        candidates: Any = None,
        reference: Callable[..., Any] | None = None,
        gradient: bool = False,
        progress: bool = True,
        **keywords: Any,
    ) -> Result:
        """Find the fastest blocks, choices and launch options for arrays of given types.

        Candidates are compiled and run in processes of their own: one that hangs, crashes or takes all memory is left
        out. Each must compute the same results. If the target is this machine, candidates are timed in turns with the
        fastest so far, and a last race against the schedule's own settings decides. Else estimates decide.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s for random numbers. Give arrays where their values decide how long
            the kernel takes.
          target: the target, by default that of this machine.
          budget: seconds; a candidate that has begun is finished.
          candidates: dicts of settings, or a dict of lists, of which all combinations are tried; by default those
            around the schedule's own.
          reference: the same function in plain JAX, which says what the right results are; by default the first
            candidate that runs, which is the schedule's own, does. Keywords as for `tilekern.testing.check`.
          gradient: True to tune the kernels of the gradient, too; each kernel has the same part of the budget.
          progress: True to show the best so far, if stderr is a terminal.
          **keywords: static arguments; and blocks that stay as they are.

        Returns:
          A result that prints as a table; `result.save(path)` writes a file for `tk.tuned`.

        Raises:
          tilekern.errors.TargetError: there is no such target, or no candidate works on it.
          tilekern.errors.EstimateError: the target is not this machine, and there is no model of it.
          tilekern.errors.ArgumentError: the budget is not above 0, the candidates do not fit the kernel, or the
            reference gives other shapes.
        """
        # The tuner stands above kernels: it calls them. It is imported where it is asked for.
        tuning = import_module("tilekern.tuning")
        request = tuning.Request(tuning.target_of(target), tuning.check_budget(budget), candidates, reference, progress)

        def traced(name: str) -> tuple[Instance, Sequence[Any]]:
            prepared = self._traced(args, {**keywords, "target": name})
            return cast(Instance, prepared.callee), prepared.captured

        inputs, left = self.signature.positional(args, keywords)
        return tuning.tune(traced, inputs, self._check(left).statics, request, gradient)

    @checked
    def trace(self, *args: Any, **keywords: Any) -> Traced:
        """Trace the kernel for arrays or `jax.ShapeDtypeStruct`s and static arguments."""
        prepared = self._traced(args, keywords)
        interface = of_call(prepared.call, prepared.captured)
        return Traced(cast(Instance, prepared.callee), interface, prepared.call.asked or DEFAULT)

    def _prepare(self, args: tuple[Any, ...], options: Options, target: Target) -> Prepared:
        body = Body(traced.kernel_call(self._definition, args, options, target))
        if body.captures_tracers:
            body.trace_early()
        return Prepared(traced.instance(body), body.call, body.captured)


@checked
def op(
    function: None = None, /, *, out_type: Callable[..., Any] | None = None, linear: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Make an op of a JAX function: traced for each target, with that target's blocks, when it is lowered.

    The function takes pytrees of arrays and static keyword-only arguments like a kernel, and returns arrays of the
    types that `out_type` names. Inside, shapes may depend on blocks: split a reduction over programs, then combine.
    A global that it reads keeps its first value, as in a `kernel`.

    Args:
      function: never passed: the decorator is written with arguments, `@tk.op(out_type=...)`.
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
    return partial(CustomOp, _required("op", function, out_type), linear)


class CustomOp(Declared):
    """An op, made by `op`: call it like a function of arrays, inside or outside of `jax.jit`."""

    _takes_symbols = True

    def __init__(self, out_type: Callable[..., Any], linear: tuple[str, ...], function: Callable[..., Any]) -> None:
        super().__init__(out_type, function, linear=linear)

    @checked
    def trace(self, *args: Any, **keywords: Any) -> TracedOp:
        """Trace the op, and the kernels that it calls, for arrays or `jax.ShapeDtypeStruct`s and static arguments."""
        prepared = self._traced(args, keywords)
        return TracedOp(cast(Composite, prepared.callee), prepared.call)

    def _prepare(self, args: tuple[Any, ...], options: Options, target: Target) -> Prepared:
        call = composite.op_call(self._definition, args, options, target)
        return Prepared(composite.op(call), call)
