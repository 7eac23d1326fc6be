"""One `pallas_call` for a plan, and the XLA ops around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tilekern import _jax
from tilekern.ir.analysis.costs import Cost
from tilekern.ir.core import Array, Value
from tilekern.ir.quote import visible
from tilekern.ir.types import DType, accumulator, kind_of
from tilekern.lower.mosaic.emit.emit_pallas import Emitter
from tilekern.lower.mosaic.emit.index_maps import block_index, decode_step, live_step, when
from tilekern.lower.mosaic.emit.scalars import flat_table
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.scratch_buffers import Scratch
from tilekern.lower.mosaic.stored_dtypes import stored_dtype

Evaluate = Callable[..., Sequence[jax.Array]]
"""(func, *inputs) → the outputs of `func`; traceable by JAX."""


def call(
    plan: KernelPlan, cost: Cost, evaluate: Evaluate, *inputs: jax.Array, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """The outputs of a planned Func; traceable by JAX.

    Args:
      plan: the plan.
      cost: for XLA's scheduler and for profiles.
      evaluate: runs the Funcs that compute tables of prefetched scalars.
      inputs: the inputs of the Func, without constant arrays and tables.
      interpret: True if Pallas shall interpret the kernel, or `pltpu.InterpretParams`.
    """
    func = plan.func
    arrays = dict(zip(func.inputs, (*inputs, *map(_as_array, plan.constants)), strict=False))
    results = {p: arrays[p] if p in arrays else jnp.zeros(p.ref.shape, p.ref.dtype) for p in func.outputs}
    with _jax.tracing_under(_jax.Settings(x64=False)):  # TPUs have nothing of 64 bits
        if plan.table_programs:
            typed = [jnp.asarray(x, p.ref.dtype) for p, x in arrays.items()]
            tables = [evaluate(program, *typed)[-1] for program in plan.table_programs]
            arrays.update(zip(func.inputs[len(arrays) :], tables, strict=True))
        if 0 not in func.grid and plan.outputs:
            results.update(_Kernel(plan, cost, interpret).run(arrays))
    return tuple(jnp.asarray(results[p]) for p in func.outputs)


class _Kernel:
    """The kernel of a plan. Its operands, in order: tables, blocked inputs, HBM inputs, zeros aliased to outputs."""

    def __init__(self, plan: KernelPlan, cost: Cost, interpret: Any) -> None:
        self._plan, self._cost, self._interpret = plan, cost, interpret
        self._tables = plan.scalars.tables
        self._has_step_table = plan.grid_loop is not None and plan.grid_loop.table is not None
        self._zeroed = plan.zeroed_outputs

    def run(self, arrays: Mapping[Value, Any]) -> dict[Value, Any]:
        """The array of each output, from the arrays of the inputs."""
        plan = self._plan
        tables = [flat_table(p, arrays[p]) for p in self._tables]
        if self._has_step_table:
            assert plan.grid_loop is not None
            tables.append(jnp.asarray(plan.grid_loop.table))
        blocks = [layout.rearrange(_typed(arrays, layout.window.param)) for layout in plan.inputs]
        hbm_inputs = [layout.rearrange(_typed(arrays, layout.window.param)) for layout in plan.hbm_inputs]
        zeros = [jnp.zeros(plan.outputs[p].shape, kernel_dtype(p)) for p in self._zeroed]
        specs = [self._spec(layout) for layout in plan.inputs]
        anywhere = [pl.BlockSpec(memory_space=pl.ANY) for _ in (*plan.hbm_inputs, *self._zeroed)]
        results = pl.pallas_call(
            self._body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=plan.grid or (1,),
                in_specs=[*specs, *anywhere],
                out_specs=[self._out_spec(p) for p in plan.outputs],
                scratch_shapes=[_memory_of(s) for s in plan.scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(out.shape, kernel_dtype(p)) for p, out in plan.outputs.items()],
            input_output_aliases=self._aliases(len(tables)),
            compiler_params=pltpu.CompilerParams(dimension_semantics=plan.semantics, vmem_limit_bytes=plan.vmem_limit),
            cost_estimate=pl.CostEstimate(**asdict(self._cost)),
            interpret=self._interpret,
            name=visible(plan.func.name),
        )(*tables, *blocks, *hbm_inputs, *zeros)
        pairs = zip(plan.outputs.items(), results, strict=True)
        return {p: out.restore(x).astype(p.ref.dtype) for (p, out), x in pairs}

    def _aliases(self, offset: int) -> dict[int, int]:
        """The output whose memory each aliased operand takes, by their numbers."""
        plan = self._plan
        outputs = list(plan.outputs)
        aliases: dict[int, int] = {}
        for n, layout in enumerate(plan.inputs):
            if layout.window.param in plan.outputs:
                aliases[offset + n] = outputs.index(layout.window.param)
        for n, param in enumerate(self._zeroed):
            aliases[offset + len(plan.inputs) + len(plan.hbm_inputs) + n] = outputs.index(param)
        return aliases

    def _spec(self, layout: Layout) -> pl.BlockSpec:
        return pl.BlockSpec(layout.block, partial(self._index_map, layout))

    def _out_spec(self, param: Value) -> pl.BlockSpec:
        if param in self._plan.pipelined_outputs:
            return pl.BlockSpec(memory_space=pl.ANY)
        return self._spec(self._plan.outputs[param])

    def _split(self, refs: Sequence[Any]) -> tuple[dict[Value, Any], Any, Sequence[Any]]:
        """The tables by their inputs, the step table, and the remaining refs."""
        count = len(self._tables)
        steps = refs[count] if self._has_step_table else None
        return dict(zip(self._tables, refs, strict=False)), steps, refs[count + self._has_step_table :]

    def _index_map(self, layout: Layout, *arguments: Any) -> tuple[Any, ...]:
        rank = max(1, len(self._plan.grid))
        tables, steps, _ = self._split(arguments[rank:])
        step = decode_step(self._plan, arguments[:rank], tables, steps)
        return block_index(layout, live_step(step) if self._plan.skips_dead_steps(layout) else step)

    # --- the body ---

    def _body(self, *arguments: Any) -> None:
        plan = self._plan
        tables, steps, refs = self._split(arguments)
        inputs = dict(zip(plan.inputs, refs, strict=False))
        hbm_inputs = dict(zip(plan.hbm_inputs, refs[len(plan.inputs) :], strict=False))
        refs = refs[len(plan.inputs) + len(plan.hbm_inputs) + len(self._zeroed) :]
        outputs = dict(zip(plan.outputs, refs, strict=False))
        scratch = refs[len(plan.outputs) :]
        ids = [pl.program_id(n) for n in range(len(plan.grid))]
        for param, out in outputs.items():
            self._initialize(param, out, inputs, ids)
        step = decode_step(plan, ids, tables, steps)
        named: dict[str, Mapping[Any, Any]] = {"inputs": {**inputs, **hbm_inputs}, "outputs": outputs, "tables": tables}
        Emitter(plan, step, named, scratch, bool(self._interpret)).run()

    def _initialize(self, param: Value, out: Any, inputs: Mapping[Layout, Any], ids: Sequence[Any]) -> None:
        """Initialise an output's block, in the first step that writes it."""
        if param.ref.role == "out":
            return

        def first() -> None:
            if param.ref.role == "inout":
                out[...] = inputs[self._plan.outputs[param]][...]
            else:
                out[...] = jnp.zeros(out.shape, out.dtype)

        axes = zip(
            ids, self._plan.grid, self._plan.output_blocks.moving_axes(self._plan.outputs[param].window), strict=True
        )
        when(*(i == 0 for i, steps, changes in axes if not changes and steps > 1))(first)


def _memory_of(scratch: Scratch) -> Any:
    return pltpu.VMEM(scratch.shape, scratch.dtype) if scratch.shape else pltpu.SMEM((1,), scratch.dtype)


def _as_array(constant: Array) -> jax.Array:
    return jnp.asarray(constant)


def _typed(arrays: Mapping[Value, Any], param: Value) -> jax.Array:
    """The array of an input in its dtype of the kernel, which may be wider: float16 becomes float32."""
    return jnp.asarray(arrays[param], stored_dtype(param.ref.dtype))


def kernel_dtype(param: Value) -> DType:
    """The dtype of an output inside of the kernel: a sum of narrow floats is accumulated wide, and rounded once."""
    wide = param.ref.role == "sum" and kind_of(param.ref.dtype) == "float"
    return accumulator(param.ref.dtype) if wide else stored_dtype(param.ref.dtype)
