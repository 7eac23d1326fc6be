"""Derivatives that follow from the block IR, for kernels whose author states no rule.

The tangent of a kernel is a kernel: `tangent_of`. The transpose of a kernel is a backward pass of one or several
kernels: `BackwardPass`. Both are called like any other kernel, so that they have derivatives, and go under `jax.vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax

from tilekern.ir.core import Func, Value
from tilekern.ir.records import record
from tilekern.kernel.composite import Composite, Rules, filled, is_float
from tilekern.kernel.dispatch import call
from tilekern.kernel.instance import UNDIVIDED, Derivatives, Instance, Version
from tilekern.kernel.primitive import Divisible, Types
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.lower.target import Target
from tilekern.passes import pipeline

if TYPE_CHECKING:
    from tilekern.autodiff.backward import Backward

# `tilekern.autodiff` is imported by the functions that differentiate, because most programs with `import tilekern`
# derive nothing at first.


def jvp(of: Instance, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of a kernel and their tangents, by the kernel's tangent kernel.

    Raises:
      NotDifferentiableError: an op of the kernel has no derivative, at the user's line.
    """
    moving = tuple(t is not None for t in tangents)
    results = call(of, *primals)
    result_tangents = iter(call(tangent_of(of, moving), *primals, *(t for t in tangents if t is not None)))
    return results, [next(result_tangents) if is_float(o) else None for o in of.outputs]


def transpose(of: Instance, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """For each operand that is a `jax.ShapeDtypeStruct`, its cotangent by the kernel's backward pass; else None."""
    linear = tuple(isinstance(x, jax.ShapeDtypeStruct) for x in operands)
    backward_pass = of.once(("backward", linear), lambda: BackwardPass(of, linear).composite())
    fixed = [x for x, is_linear in zip(operands, linear, strict=True) if not is_linear]
    results = iter(call(backward_pass, *fixed, *filled(cotangents, of.outputs)))
    return [next(results) if is_linear else None for is_linear in linear]


def tangent_of(of: Instance, moving: tuple[bool, ...]) -> Instance:
    """The tangent kernel of a kernel, made once; `moving` has a flag for each operand, True if it has a tangent.

    It computes the tangents of the float results, for the kernel's operands and the tangents of operands that move.
    """
    return of.once(("tangent", moving), lambda: _tangent_of(of.source_of_derivatives, moving))


def _tangent_of(of: Instance, moving: tuple[bool, ...]) -> Instance:
    operands, moved = len(moving), [n for n, moves in enumerate(moving) if moves]

    def types() -> Types:
        return [*of.types, *(of.types[n] for n in moved)]

    @functools.cache
    def version(target: Target) -> Version:
        from tilekern.autodiff.tangent import tangent

        primal = of.version(target)
        wrt = [number < operands and moving[number] for number in primal.reads]
        reads = [number if number < operands else number + len(moved) for number in primal.reads]
        reads += [operands + moved.index(number) for number, moves in zip(primal.reads, wrt, strict=True) if moves]
        return Version(pipeline.run(tangent(primal.func, wrt)), tuple(reads), primal.constants)

    def rule() -> ShardingRule | None:
        return None if of.rule is None else of.rule.tangent(moving, [is_float(o) for o in of.outputs])

    def part(parts: Mapping[str, int]) -> Instance | str:
        part = of.part(parts)
        return part if isinstance(part, str) else _tangent_of(cast(Instance, part), moving)

    outputs = [o for o in of.outputs if is_float(o)]
    kernel = _derived(of, f"{of.name}_tangent", outputs, types, version, Divisible(rule, part))
    kernel.version(kernel.target)  # so that an error comes with the call
    return kernel


def gradient_funcs(func: Func, residuals: int) -> list[Func]:
    """The Funcs that compute the gradient by all float inputs of a Func, for estimates of their time.

    Args:
      func: the Func, after the passes of all targets.
      residuals: the most bytes of carries that the backward pass may save.

    Raises:
      NotDifferentiableError: an op has no derivative.
    """
    from tilekern.autodiff import activity
    from tilekern.autodiff.backward import backward
    from tilekern.autodiff.tangent import tangent

    wrt = [activity.is_float(param) for param in func.inputs]
    moving = pipeline.run(tangent(func, wrt))
    linear = [number >= len(wrt) for number in range(len(moving.inputs))]
    return [stage.func for stage in backward(moving, linear, residuals).stages]


def stage_of(of: Instance, func: Func) -> Instance:
    """A kernel of the backward pass of a kernel."""
    version = Version(func, tuple(range(len(func.inputs))))
    inputs, outputs = (
        [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in params] for params in (func.inputs, func.outputs)
    )
    return _derived(of, func.name, outputs, lambda: inputs, lambda _: version, UNDIVIDED)


def _derived(
    of: Instance,
    name: str,
    outputs: Types,
    types: Callable[[], Types],
    version: Callable[[Target], Version],
    divisible: Divisible,
) -> Instance:
    """A kernel that is derived from a kernel, with derivatives that are derived from it in turn."""
    have_blocks = of.derivatives.have_blocks
    return Instance(
        name=name,
        asked=of.asked,
        target=of.target,
        outputs=outputs,
        divisible=divisible,
        types_of_operands=types,
        version=version,
        launch=of.launch if have_blocks else lambda _: {},
        derivatives=Derivatives(jvp, transpose, of.derivatives.residuals, have_blocks=have_blocks),
    )


@record
class BackwardPass:
    """The backward pass of a kernel: the cotangents of operands in which the kernel is linear.

    It is a function of the other operands and of the results' cotangents.

    Attributes:
      of: the kernel.
      linear: one flag for each operand of the kernel.
    """

    of: Instance
    linear: tuple[bool, ...]

    def composite(self) -> Composite:
        """The pass as a function of kernels."""
        pairs = [*zip(self.of.types, self.linear, strict=True)]
        self.funcs(self.of.target)  # so that an error comes with the call
        return Composite(
            name=f"{self.of.name.removesuffix('_tangent')}_backward",
            asked=self.of.asked,
            target=self.of.target,
            types=[*(t for t, is_linear in pairs if not is_linear), *self.of.outputs],
            outputs=self._outputs,
            make=self._function,
            rules=Rules(None, self._transpose),
            divisible=Divisible(self._rule, self._part),
        )

    def funcs(self, target: Target) -> Backward:
        """The Funcs of the backward pass for a target, in their order, and the way of arrays from one to the next."""
        return self.of.once(("backward pass", self.linear, target), lambda: self._funcs(target))

    def _funcs(self, target: Target) -> Backward:
        from tilekern.autodiff.backward import backward

        version, operands = self.of.version(target), len(self.linear)
        linear = [n < operands and self.linear[n] for n in version.reads]
        return backward(version.func, linear, self.of.derivatives.residuals)

    def stages(self, target: Target) -> list[Instance]:
        """The kernels of the pass for a target, in their order."""
        return [stage_of(self.of, stage.func) for stage in self.funcs(target).stages]

    @property
    def _outputs(self) -> list[jax.ShapeDtypeStruct]:
        return [t for t, is_linear in zip(self.of.types, self.linear, strict=True) if is_linear]

    def _function(self, target: Target, on_mesh: bool) -> Callable[..., list[jax.Array]]:
        version, backward_pass = self.of.version(target), self.funcs(target)
        kernels = self.stages(target)
        operands, fixed_numbers = len(self.linear), [n for n, is_linear in enumerate(self.linear) if not is_linear]

        def run(*operands_and_cotangents: jax.Array) -> list[jax.Array]:
            by_number = dict(zip(fixed_numbers, operands_and_cotangents, strict=False))
            by_number |= {operands + n: x for n, x in enumerate(version.constants)}
            read = [by_number[n] for n in version.reads if n in by_number]
            arrays: dict[Value, Any] = dict(zip(backward_pass.known, read, strict=True))
            arrays |= dict(zip(backward_pass.cotangents, operands_and_cotangents[len(fixed_numbers) :], strict=True))
            for stage, kernel in zip(backward_pass.stages, kernels, strict=True):
                results = call(kernel, *(arrays[p] for p in stage.func.inputs))
                arrays |= dict(zip(stage.results, results, strict=True))
            return self._in_order(version, [_total([arrays[p] for p in parts]) for parts in backward_pass.results])

        return run

    def _in_order(self, version: Version, cotangents: Sequence[jax.Array | None]) -> list[jax.Array]:
        """One array for each linear operand, in the order of the operands and in the dtype of the operand.

        `cotangents` has an entry for each input of the Func that reads a linear operand, in the order of the inputs. An
        operand without an entry, or whose entry is None, gets zeros.
        """
        order = [n for n in version.reads if n < len(self.linear) and self.linear[n]]
        by_number = dict(zip(order, cotangents, strict=True))
        linear = [n for n, is_linear in enumerate(self.linear) if is_linear]
        outputs = self._outputs
        arrays = filled([by_number.get(n) for n in linear], outputs)
        return [x.astype(o.dtype) for x, o in zip(arrays, outputs, strict=True)]

    def _transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any] | None:
        """The kernel itself, for cotangents of the results: its transpose is the pass, whose transpose it then is."""
        unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in operands]
        first = len(self.linear) - sum(self.linear)
        if any(unknown[:first]) or not all(unknown[first:]):
            return None
        fixed, moving = iter(operands[:first]), iter(filled(cotangents, self._outputs))
        results = call(self.of, *(next(moving) if is_linear else next(fixed) for is_linear in self.linear))
        return [*[None] * first, *results]

    def _rule(self) -> ShardingRule | None:
        rule = self.of.rule
        return None if rule is None else rule.transposed(self.linear)

    def _part(self, parts: Mapping[str, int]) -> Composite | str:
        part = self.of.part(parts)
        return part if isinstance(part, str) else BackwardPass(cast(Instance, part), self.linear).composite()


def _total(parts: Sequence[jax.Array]) -> jax.Array | None:
    """The sum of arrays; None if there are none."""
    return functools.reduce(jax.lax.add, parts) if parts else None
