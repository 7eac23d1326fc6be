"""The stages of an op: `TracedOp`, `LoweredOp`, `CompiledOp`; each holds the stages of the kernels in the op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import jax

from tilekern import _jax
from tilekern.errors import TargetError, checked
from tilekern.kernel.composite import Composite, op
from tilekern.kernel.definition import TypedCall
from tilekern.kernel.interface import of_call, of_flat_arrays
from tilekern.kernel.primitive import Calls
from tilekern.kernel.stages import Compiled, Lowered, Traced
from tilekern.lower.target import DEFAULT, Target, on_platform, resolve


class TracedOp:
    """An op traced for given argument types; prints as its jaxpr, and the block IR of its kernels.

    Attributes:
      jaxpr: the JAX code around the kernels, with the blocks of the default target.
      kernels: a `Traced` for each different call of a kernel, in the order of the calls, also of calls in ops that the
        op calls. `jax.vmap` around a call is an axis of the kernel. The kernels take flat arrays: the arrays of the
        arguments, then the arrays that the kernel closes over.
    """

    def __init__(self, composite: Composite, call: TypedCall) -> None:
        self._call = call
        self.jaxpr, calls = composite.traced(call.asked or DEFAULT)
        self.kernels: tuple[Traced, ...] = tuple(
            Traced(kernel, of_flat_arrays(kernel, target), target) for kernel, target in calls
        )

    def __str__(self) -> str:
        return "\n\n".join(map(str, (self.jaxpr, *self.kernels)))

    @checked
    def lower(self, target: str = "cpu", emitter: str | None = None) -> LoweredOp:
        """Lower to a target, with the blocks that the schedules of the op and of its kernels have for it.

        Args:
          target: its name.
          emitter: as for `Traced.lower`; all kernels of the op must have a form for "gluon".
        """
        resolved = resolve(target, emitter)
        settings = self._call.settings
        with jax.enable_x64(settings.x64), _jax.checking(settings):
            options = self._call.options._replace(asked=resolved)
            call = replace(self._call, options=options, target=resolved)
            return LoweredOp(op(call), call, resolved)


class LoweredOp:
    """An op whose kernels are lowered to a target.

    Attributes:
      target: its name.
      jaxpr: the JAX code around the kernels, with the target's blocks.
      kernels: a `Lowered` for each kernel, in the order of `TracedOp.kernels`. A kernel that the op calls with a
        `target=` is lowered to that target.
    """

    def __init__(self, composite: Composite, call: TypedCall, target: Target) -> None:
        self._composite, self._call, self._target, self.target = composite, call, target, target.name
        self.jaxpr, calls = composite.traced(target)
        self.kernels: tuple[Lowered, ...] = tuple(_lowered(calls, target))

    @property
    def text(self) -> str:
        """The target's programs, one for each kernel, as in `Lowered.text`."""
        return "\n\n".join(kernel.text for kernel in self.kernels)

    def __str__(self) -> str:
        return self.text

    @property
    def plan(self) -> str:
        """The plans of the kernels, as in `Lowered.plan`."""
        return "\n\n".join(kernel.plan for kernel in self.kernels)

    def compile(self) -> CompiledOp:
        """Compile all kernels for the target. Its hardware need not be here, unless the result is called."""
        return CompiledOp(self._composite, self._call, self._target, tuple(kernel.compile() for kernel in self.kernels))


class CompiledOp:
    """A compiled op: call it with arrays of the types it was traced for.

    Attributes:
      kernels: a `Compiled` for each kernel, with its `asm` and its `resources`.
    """

    def __init__(self, composite: Composite, call: TypedCall, target: Target, kernels: tuple[Compiled, ...]) -> None:
        self._composite, self._call, self._target, self.kernels = composite, call, target, kernels

    @checked
    def __call__(self, *arrays: Any) -> Any:
        return self._call.results.pack(self._program(*of_call(self._call).flat(arrays)))

    @property
    def asm(self) -> Mapping[str, Any]:
        """XLA's program of the whole op, as `asm["hlo"]`."""
        return {"hlo": self._program.as_text()}

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory; `.temp_size_in_bytes` is what the op keeps between its kernels."""
        return self._program.memory_analysis()

    @cached_property
    def _program(self) -> Any:
        """The op compiled by XLA for this machine."""
        platform, name = self._target.platform, self._composite.name
        try:
            device = cast(Any, jax).devices(platform)[0]
        except RuntimeError as error:  # no such platform here
            raise TargetError(
                f"there is no {self._target.name} here to run {name} on",
                expected=f"a machine on which JAX has the platform {platform}",
                got=f"JAX runs on {jax.default_backend()}",
                fix="look at .kernels, each with its .asm; or lower to 'cpu'",
            ) from error
        place = jax.sharding.SingleDeviceSharding(device)
        with jax.enable_x64(self._call.settings.x64):
            program = jax.jit(self._composite.function(self._target), in_shardings=place, out_shardings=place)
            return program.lower(*_jax.flatten(self._call.arguments)[0]).compile()


def _lowered(calls: Calls, target: Target) -> list[Lowered]:
    with_targets = ((kernel, on_platform(target.platform, asked)) for kernel, asked in calls)
    return [Lowered(kernel, of_flat_arrays(kernel, own_target), own_target) for kernel, own_target in with_targets]
