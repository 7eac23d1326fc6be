"""Random programs on the backends: as modules of JAX, in interpreters, and as kernels of one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern import _jax
from tilekern.errors import TargetError
from tilekern.ir.core import Array, Func
from tilekern.kernel.dispatch import call
from tilekern.kernel.file_format import instance
from tilekern.kernel.instance import Version
from tilekern.lower.backend import Backend, FuzzMode, Lowering
from tilekern.lower.target import BACKENDS, DEFAULT, TARGETS
from tilekern.passes import pipeline
from tilekern.testing.programs import Program

type Outputs = Sequence[Sequence[Array]]
"""The outputs of each of several programs."""


def outputs_of(programs: Sequence[Program], *, mode: str) -> Outputs:
    """The outputs of each program on a backend; the expected outputs if the program uses what the mode lacks.

    Args:
      programs: the programs.
      mode: the name of a mode in the record of a backend.
    """
    backend, way = _named(mode)
    if way.in_one_op:
        return in_one_op(programs, target=backend.checked.name)
    if way.outputs is not None:
        return [way.outputs(pipeline.run(p.func), p.arrays, p.seed) for p in programs]
    if backend.simulated is None:
        return [_interpreted(program, backend, way) for program in programs]
    return simulated([_lowering(program, backend, way) for program in programs], programs, mode=mode)


def _named(mode: str) -> tuple[Backend, FuzzMode]:
    """The backend that has a mode, and the mode."""
    return next((b, way) for b in BACKENDS.values() for way in b.fuzz_modes if way.name == mode)


def _lowering(program: Program, backend: Backend, way: FuzzMode) -> Lowering:
    func = pipeline.run(program.func) if way.optimize else program.func
    if way.machine_code:
        target = TARGETS[way.machine_code[program.seed // 2 % len(way.machine_code)]]
    else:
        target = backend.targets[program.seed % len(backend.targets)] if way.every_target else backend.checked
    return backend.lower(func, target, {})


def _interpreted(program: Program, backend: Backend, way: FuzzMode) -> Sequence[Array]:
    try:
        lowering = _lowering(program, backend, way)
        if way.machine_code:
            # Two bits of the seed decide about inputs and target; the next bit decides about races.
            return cast(Any, lowering.compile()).interpret(*program.arrays, races=program.seed // 4 % 2 == 1)
        return lowering.interpret(*program.arrays)
    except TargetError as error:
        if not way.lacks:
            raise
        # Nothing else may be refused: the fuzzer would only count it.
        assert way.lacks in error.summary, f"{backend.name} refuses a program: {error}"
        return program.expected


def simulated(lowerings: Sequence[Lowering], programs: Sequence[Program], *, mode: str) -> Outputs:
    """The outputs of lowered programs, simulated as one function, of which each program is a part."""
    backend, way = _named(mode)
    assert backend.simulated is not None
    return compiled([backend.simulated(lowering) for lowering in lowerings], programs, x64=way.x64)


def compiled(functions: Sequence[Callable[..., Any]], programs: Sequence[Program], *, x64: bool = True) -> Outputs:
    """The outputs of programs that are compiled as one function, of which each is a part."""

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(tuple(f(*inputs)) for f, inputs in zip(functions, arrays, strict=True))

    arrays = [p.arrays for p in programs]
    with jax.enable_x64(x64):
        return jax.device_get(jax.jit(together).lower(*arrays).compile(_jax.UNOPTIMIZED)(*arrays))


def in_one_op(programs: Sequence[Program], *, target: str) -> Outputs:
    """The outputs of each program, as a kernel that one op calls twice; asserts that both calls have equal outputs.

    Kernels of odd seed are batched by `jax.vmap`, behind a call on zeros.
    """
    kernels = [_kernel(p.func) for p in programs]

    def together(arrays: Sequence[Sequence[Any]]) -> Any:
        calls = list(zip(kernels, programs, arrays, strict=True))
        return [[_called(*c) for c in calls] for _ in range(2)]

    with jax.enable_x64(True):
        arrays = [p.arrays for p in programs]
        op = tk.op(out_type=partial(jax.eval_shape, together))(together)
        first, second = jax.device_get(jax.jit(partial(op, target=target))(arrays))
    for output, again in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert output.tobytes() == again.tobytes(), "the second call of a kernel gives other results"
    return first


def _kernel(func: Func) -> Callable[..., Sequence[Any]]:
    """A kernel for every target."""
    types, outputs = (
        [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in params] for params in (func.inputs, func.outputs)
    )
    version = Version(func, tuple(range(len(types))))
    return partial(call, instance(func.name, None, DEFAULT, types, outputs, dict.fromkeys(TARGETS, (version, {})), 0))


def _called(kernel: Callable[..., Any], program: Program, arrays: Sequence[Any]) -> Sequence[Any]:
    if program.seed % 2 == 0:
        return kernel(*arrays)
    stacked = [jnp.stack([jnp.zeros_like(x), x]) for x in arrays]
    return [output[1] for output in jax.vmap(kernel)(*stacked)]
