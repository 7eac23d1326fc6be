"""A plan → one `pallas_call`, and what XLA does around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tilekern import _jax
from tilekern.ir.core import Value
from tilekern.ir.types import DType, accumulator, kind_of
from tilekern.lower.mosaic.emit import Emitter
from tilekern.lower.mosaic.layout import Layout
from tilekern.lower.mosaic.plan import Plan, Scratch
from tilekern.lower.mosaic.scalars import flat_table, locate
from tilekern.lower.mosaic.steps import Step, next_tile, step_of


def call(plan: Plan, *inputs: Any, interpret: Any = False) -> tuple[jax.Array, ...]:
    """The outputs of a Func, by its plan; traceable by JAX.

    Args:
      plan: the plan.
      inputs: of the Func, without constants.
      interpret: whether Pallas shall interpret the kernel; or how, `pltpu.InterpretParams`.
    """
    func = plan.func
    arrays = dict(zip(func.inputs, (*inputs, *plan.constants), strict=True))
    results = {p: arrays[p] if p in arrays else jnp.zeros(p.ref.shape, p.ref.dtype) for p in func.outputs}
    if 0 not in func.grid and plan.outputs:
        with _jax.neutral_tracing(x64=False):  # TPUs have nothing of 64 bits
            results.update(_Kernel(plan, interpret).run(arrays))
    return tuple(results[p] for p in func.outputs)


class _Kernel:
    """The kernel of a plan and its operands, in the order of Pallas: scalar memory, inputs, aliased zeros; outputs."""

    def __init__(self, plan: Plan, interpret: Any) -> None:
        self._plan, self._interpret = plan, interpret
        self._tables = plan.scalars.tables
        self._pairs = plan.serial is not None and plan.serial.table is not None
        self._fresh = tuple(p for p in plan.outputs if _starts_at_zero(p) and not plan.visits.covers(p))

    def run(self, arrays: Mapping[Value, Any]) -> dict[Value, Any]:
        """The results for arrays."""
        plan = self._plan
        tables = [flat_table(p, arrays[p]) for p in self._tables]
        if self._pairs:
            assert plan.serial is not None
            tables.append(jnp.asarray(plan.serial.table))
        blocks = [found.forward(_typed(arrays, found.window.param)) for found in plan.inputs]
        zeros = [jnp.zeros(plan.outputs[p].shape, stored_dtype(p)) for p in self._fresh]
        specs = [self._spec(found) for found in plan.inputs]
        anywhere = [pl.BlockSpec(memory_space=pl.ANY) for _ in self._fresh]
        found = pl.pallas_call(
            self._body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=plan.grid or (1,),
                in_specs=[*specs, *anywhere],
                out_specs=[self._spec(out) for out in plan.outputs.values()],
                scratch_shapes=[_memory_of(s) for s in plan.scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(out.shape, stored_dtype(p)) for p, out in plan.outputs.items()],
            input_output_aliases=self._aliases(len(tables)),
            compiler_params=pltpu.CompilerParams(dimension_semantics=plan.semantics, vmem_limit_bytes=plan.vmem_limit),
            interpret=self._interpret,
            name=plan.func.name,
        )(*tables, *blocks, *zeros)
        pairs = zip(plan.outputs.items(), found, strict=True)
        return {p: out.backward(x).astype(p.ref.dtype) for (p, out), x in pairs}

    def _aliases(self, offset: int) -> dict[int, int]:
        """Which operand's memory an output takes."""
        plan = self._plan
        outputs = list(plan.outputs)
        found: dict[int, int] = {}
        for n, layout in enumerate(plan.inputs):
            if layout.window.param in plan.outputs:
                found[offset + n] = outputs.index(layout.window.param)
        for n, param in enumerate(self._fresh):
            found[offset + len(plan.inputs) + n] = outputs.index(param)
        return found

    def _spec(self, found: Layout) -> pl.BlockSpec:
        return pl.BlockSpec(found.block, partial(self._index_map, found))

    def _split(self, refs: Sequence[Any]) -> tuple[dict[Value, Any], Any, Sequence[Any]]:
        """Tables, the table of steps, and what follows."""
        count = len(self._tables)
        steps = refs[count] if self._pairs else None
        return dict(zip(self._tables, refs, strict=False)), steps, refs[count + self._pairs :]

    def _index_map(self, found: Layout, *arguments: Any) -> tuple[Any, ...]:
        rank = len(self._plan.grid)
        tables, steps, _ = self._split(arguments[rank:])
        step = next_tile(step_of(self._plan, arguments[:rank], tables, steps))
        roles = found.window.roles
        index: list[Any] = []
        for view in found.dims:
            role = roles[view.dim - (view.use == "fold")] if view.dim >= 0 else None
            knows = role is not None and (view.use == "fold" or role.kind == ("at" if view.use == "place" else "tiled"))
            if role is None or not knows or (view.use == "lane" and view.length == view.block):
                index.append(0)
                continue
            place = locate(role.position, [self._operand(step, v) for v in role.operands], None)
            count = view.length if view.use in ("place", "tile") else -(-view.length // view.block)
            size = role.size if role.kind == "tiled" else 1
            index.append(jnp.clip(jax.lax.div(place, jnp.int32(size)), 0, count - 1))
        return tuple(index)

    @staticmethod
    def _operand(step: Step, value: Value) -> Any:
        """An operand of the access; those of other dims may be unknown."""
        known = step.plan.scalars.key(value) is not None
        return jnp.asarray(step.evaluate(value) if known else 0, jnp.int32)

    # --- the body ---

    def _body(self, *arguments: Any) -> None:
        plan = self._plan
        tables, steps, refs = self._split(arguments)
        inputs = dict(zip(plan.inputs, refs, strict=False))
        refs = refs[len(plan.inputs) + len(self._fresh) :]
        outputs = dict(zip(plan.outputs, refs, strict=False))
        scratch = refs[len(plan.outputs) :]
        ids = [pl.program_id(n) for n in range(len(plan.grid))]
        for param, out in outputs.items():
            self._start(param, out, inputs, ids)
        step = step_of(plan, ids, tables, steps)
        named: dict[str, Mapping[Any, Any]] = {"inputs": inputs, "outputs": outputs, "tables": tables}
        Emitter(plan, step, named, scratch, bool(self._interpret)).run()

    def _start(self, param: Value, out: Any, inputs: Mapping[Layout, Any], ids: Sequence[Any]) -> None:
        """What an output's block holds before the first program writes it."""
        if param.ref.role == "out":
            return

        def first() -> None:
            if param.ref.role == "inout":
                out[...] = inputs[self._plan.outputs[param]][...]
            else:
                out[...] = jnp.zeros(out.shape, out.dtype)

        axes = zip(ids, self._plan.grid, self._plan.visits.changes(self._plan.outputs[param].window), strict=True)
        still = [i for i, steps, changes in axes if not changes and steps > 1]
        _when_all([i == 0 for i in still], first)


def _when_all(conditions: Sequence[Any], body: Callable[[], None]) -> None:
    if not conditions:
        body()
        return
    condition = conditions[0]
    for other in conditions[1:]:
        condition = condition & other
    pl.when(condition)(body)


def _memory_of(scratch: Scratch) -> Any:
    return pltpu.VMEM(scratch.shape, scratch.dtype) if scratch.shape else pltpu.SMEM((1,), scratch.dtype)


def _typed(arrays: Mapping[Value, Any], param: Value) -> jax.Array:
    """The array of an input, which may be wider in the kernel than it is: float16 is float32 there."""
    return jnp.asarray(arrays[param], param.ref.dtype)


def _starts_at_zero(param: Value) -> bool:
    return param.ref.role in ("zeros", "sum")


def stored_dtype(param: Value) -> DType:
    """The dtype of an output while the kernel runs: a sum of narrow floats is kept wide, and rounded once."""
    wide = param.ref.role == "sum" and kind_of(param.ref.dtype) == "float"
    return accumulator(param.ref.dtype) if wide else param.ref.dtype
