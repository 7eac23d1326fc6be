"""`Instance`: a block program for each target, as `kernel_call_p` carries it.

An instance is a kernel for arguments of given types. Its constructors say where the Funcs come from:

- `traced.instance`: a body is traced with the blocks of the target, also for the parts of operands that devices have;
- `file_format.decode`: a file has the Func of each target;
- `batched`, here: `jax.vmap` of an instance, one more parallel axis of its Funcs;
- `derived_rules.tangent_of`, `derived_rules.stage_of`: a tangent kernel, and one kernel of a backward pass, from the
  Funcs of another instance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax

from tilekern.debug_options import interprets
from tilekern.errors import DependencyError, FallbackWarning, TargetError
from tilekern.ir.core import Func
from tilekern.ir.debug import Assert, Print
from tilekern.ir.records import record
from tilekern.kernel.choice import Tunable
from tilekern.kernel.composite import mapped
from tilekern.kernel.divided import on_explicit_mesh
from tilekern.kernel.packed import before_pairs, packed, unpacked
from tilekern.kernel.primitive import Callee, Calls, Dims, Divisible, Program, Types
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.kernel.signature import Signature
from tilekern.kernel.tuned import Key
from tilekern.kernel.vmapped_rules import stacked, vmapped_jvp, vmapped_transpose
from tilekern.lower.backend import OPEN
from tilekern.lower.lowering import Lowering, lower, specialized
from tilekern.lower.target import DEFAULT, Target, backend_of
from tilekern.passes.batch import batch, places


@record
class Version:
    """The block program of a kernel for one target.

    Attributes:
      func: the block IR, after the passes of all targets.
      reads: for each input of `func` the index of its array in (*operands of the call, *constants).
      constants: known arrays that the body closes over, and that are no operands of the call.
    """

    func: Func
    reads: tuple[int, ...]
    constants: tuple[Any, ...] = ()

    def inputs(self, operands: Sequence[Any]) -> list[Any]:
        """The inputs of `func` for the operands of a call."""
        arrays = (*operands, *self.constants)
        return [arrays[number] for number in self.reads]

    @property
    def only_read(self) -> list[int]:
        """The numbers of the inputs of `func` that no output replaces."""
        return [number for number, param in enumerate(self.func.inputs) if param not in self.func.outputs]


class Derivatives(NamedTuple):
    """Rules for the derivatives of an instance.

    Attributes:
      jvp: `Callee.jvp`, with the instance as first argument.
      transpose: `Callee.transpose`, with the instance as first argument.
      residuals: the most bytes of carries that a derived backward pass may save.
      are_stated: True if the author states derivatives, so that none is derived from the block IR.
      have_blocks: True if the author chose blocks and launch options for derived derivatives.
      source: returns the instance with such blocks, which derivatives are derived from; None for the instance itself.
    """

    jvp: Callable[[Instance, Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
    transpose: Callable[[Instance, Sequence[Any], Sequence[Any]], Sequence[Any]]
    residuals: int
    are_stated: bool = False
    have_blocks: bool = False
    source: Callable[[], Instance] | None = None


class Tuning(NamedTuple):
    """Blocks, choices and launch options of a kernel, to try others.

    Attributes:
      settings: returns the blocks, choices and launch options on a target.
      varied: returns the kernel with other ones, for a call that names a target; None for the call's own target.
      key: returns the key of the call in files of tuned blocks, for a target.
      shipped_key: returns the key of the call in the table of a target that tilekern ships.
      signature: the parameters of the kernel.
      fixed: the blocks, choices and launch options that the call itself gives.
      for_derivatives: returns the kernel with the blocks that its derived derivatives have.
    """

    settings: Callable[[Target], Mapping[str, Tunable]]
    varied: Callable[[Mapping[str, Tunable], Target | None], Instance]
    key: Callable[[Target], Key]
    shipped_key: Callable[[Target], Key]
    signature: Signature
    fixed: Mapping[str, Tunable]
    for_derivatives: Callable[[], Instance]


def _no_part(parts: Mapping[str, int]) -> str:
    raise AssertionError(f"parts of a call without a sharding rule: {parts}")


def _leaves_open(target: Target) -> str:
    """No emitter, "": no file of tuned blocks names an emitter."""
    return ""


UNDIVIDED = Divisible(lambda: None, _no_part)
"""For instances without a sharding rule."""


@record(eq=False, kw_only=True, repr=False)
class Instance(Callee):
    """A block program for each target.

    Attributes:
      types_of_operands: returns the types of the operands; a body is traced for them, for it may close over arrays.
      version: returns the block program for a target, after the passes of all targets.
      launch: returns the launch options on a target that the schedule or the call gives.
      derivatives: the rules for derivatives.
      tuning: the blocks and launch options that may be replaced; None if there are none.
      emitter: returns the emitter that a file of tuned blocks chose for a target that leaves it open, or "".
    """

    types_of_operands: Callable[[], Types]
    version: Callable[[Target], Version]
    launch: Callable[[Target], Mapping[str, int]]
    derivatives: Derivatives
    tuning: Tuning | None = None
    emitter: Callable[[Target], str] = _leaves_open

    @property
    def types(self) -> Types:
        """The types of the operands."""
        return self.types_of_operands()

    @property
    def source_of_derivatives(self) -> Instance:
        """The instance that derivatives are derived from: itself, or a copy with blocks for derivatives."""
        source = self.derivatives.source
        return self if source is None else self.once(("source of derivatives",), source)

    # --- programs ---

    def func(self, target: Target | None = None) -> Func:
        """The block IR for a target, by default for the target that the call names, or else the portable one."""
        return self.version(target or self.asked or DEFAULT).func

    def lowered(self, target: Target) -> Lowering:
        """The version for a target, lowered to it."""
        return lower(self.func(target), target, self.launch(target))

    def served(self, target: Target) -> tuple[Target, Lowering]:
        """The version lowered to a target; for the emitter "auto" by Gluon, if that takes the kernel and is worth it.

        If a file of tuned blocks names the emitter, that one serves. A kernel that Gluon refuses is Triton's all the
        same, for an entry serves arrays of a range of sizes.

        Returns:
          The target with the emitter that serves, and the lowered version.
        """
        if target.emitter != OPEN:
            return target, self.lowered(target)
        emitter = self.emitter(target)
        special, target = replace(target, emitter="gluon"), replace(target, emitter="")
        if emitter != target.emitters[0]:
            with suppress(TargetError):  # a saved kernel may have no blocks for it
                func, launch = self.func(special), self.launch(special)
                lowering = specialized(func, special, launch, always=emitter == special.emitter)
                if lowering is not None:
                    return special, lowering
        return target, self.lowered(target)

    def lowered_or_portable(self, target: Target) -> tuple[Target, Lowering]:
        """The version lowered to a target; if the target refuses it, to the portable backend, with a warning.

        Too large a block is an error: the portable backend would need the memory, too.

        Returns:
          The target that serves, and the lowered version.
        """
        try:
            return self.served(target)
        except (TargetError, DependencyError) as error:
            if target.fallback == "never" or target.name == DEFAULT.name:
                raise
            message = f"{self.name} runs on {target.platform} by the portable backend, which is slower.\n{error}"
            warnings.warn(message, FallbackWarning, stacklevel=2)
            return DEFAULT, self.lowered(DEFAULT)

    def program(self, target: Target) -> Program:
        if interprets():
            return jax.jit(partial(self._interpreted, self.version(target))), "refused"
        by_name = self.asked is not None and self.asked.fallback != "always"
        served, lowering = self.served(target) if by_name else self.lowered_or_portable(target)
        version = self.version(served)
        in_place = version.only_read if backend_of(served).reads_four_bits else ()

        def program(*operands: jax.Array) -> Sequence[jax.Array]:
            return unpacked(lowering.run(*packed(version.inputs(operands), in_place)), self.outputs)

        program.__name__ = self.name
        return jax.jit(program), lowering.partitioning

    def _interpreted(self, version: Version, *operands: jax.Array) -> Sequence[jax.Array]:
        """The results by the interpreter of the block IR, which the host runs within a program of JAX."""
        from tilekern.ir.interpret import interpret

        types = [jax.ShapeDtypeStruct(output.ref.shape, output.ref.dtype) for output in version.func.outputs]
        results = jax.pure_callback(partial(interpret, version.func), types, *packed(version.inputs(operands)))
        return unpacked(results, self.outputs)

    def on_mesh(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        return partial(on_explicit_mesh, self)

    def kernels(self, target: Target, operands: Types) -> Calls:
        return [(self, target)]

    def calls_host(self, target: Target) -> bool:
        return any(isinstance(op, (Assert, Print)) for op in self.func(target).walk())

    # --- rules of JAX ---

    def batched(self, size: int, dims: Dims) -> tuple[Callee, Dims]:
        if jax.export.is_symbolic_dim(cast(Any, size)):  # without narrowing the type of size
            leading = tuple(None if d is None else 0 for d in dims)
            return mapped(self, size, leading), leading
        placed = places(self.func(self.target), tuple(map(before_pairs, self.types, dims)))
        return self.once(("batched", size, placed), lambda: batched(self, size, placed)), placed

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return self.derivatives.jvp(self, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return self.derivatives.transpose(self, cotangents, operands)


def batched(of: Instance, size: int, dims: Dims) -> Instance:
    """`size` calls of a kernel at once, operand number n stacked along `dims[n]`, by one more parallel axis."""

    def types() -> Types:
        shapes = (
            t.shape if d is None else (*t.shape[:d], size, *t.shape[d:]) for t, d in zip(of.types, dims, strict=True)
        )
        return [jax.ShapeDtypeStruct(shape, t.dtype) for t, shape in zip(of.types, shapes, strict=True)]

    @cache
    def version(target: Target) -> Version:
        single = of.version(target)
        dims_of_arrays = (*dims, *(None for _ in single.constants))
        return replace(single, func=batch(single.func, size, tuple(dims_of_arrays[n] for n in single.reads)))

    def rule() -> ShardingRule | None:
        return None if of.rule is None else of.rule.batched(dims, size)

    def part(parts: Mapping[str, int]) -> Callee | str:
        name = cast(ShardingRule, of.rule).batch_name
        single = of.part({factor: count for factor, count in parts.items() if factor != name})
        return single if isinstance(single, str) else batched(cast(Instance, single), size // parts.get(name, 1), dims)

    def jvp(_: Instance, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return vmapped_jvp(of, size, dims, primals, tangents)

    def transpose(_: Instance, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return vmapped_transpose(of, size, dims, cotangents, operands)

    def source() -> Instance:
        return batched(of.source_of_derivatives, size, dims)

    rules, has_source = of.derivatives, of.derivatives.source is not None
    derivatives = Derivatives(
        jvp, transpose, rules.residuals, rules.are_stated, rules.have_blocks, source if has_source else None
    )
    return Instance(
        name=of.name,
        asked=of.asked,
        target=of.target,
        outputs=stacked(of.outputs, size),
        divisible=Divisible(rule, part),
        types_of_operands=types,
        version=version,
        launch=of.launch,
        derivatives=derivatives,
        emitter=of.emitter,
    )
