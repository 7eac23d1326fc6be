"""The ways to run random programs: backends, passes, the text form, batches, orders, derivatives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.errors import ResourceError, TargetError
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import DTYPES, F64
from tilekern.ir.verify import verify
from tilekern.kernel.dispatch import call
from tilekern.kernel.file_format import instance
from tilekern.kernel.instance import Version
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.passes import pipeline
from tilekern.passes.batch import batch
from tilekern.passes.delay_dots import delay_dots
from tilekern.passes.guard_masks import guard_masks
from tilekern.passes.sink_scales import sink_scales
from tilekern.passes.skew_carries import skew_carries
from tilekern.passes.split_loops import split_loops
from tilekern.testing.fuzz import derivatives, verdicts
from tilekern.testing.programs import FEATURES, Program
from tilekern.testing.programs.batches import Backend
from tilekern.testing.programs.control import Generator
from tilekern.testing.programs.divisible import Divisible
from tilekern.testing.programs.index_vectors import Chains
from tilekern.testing.programs.parts import assert_parts_agree
from tilekern.testing.programs.products import Products

type Outputs = Sequence[Sequence[Array]]

NARROW = tuple(d for d in DTYPES.values() if d.itemsize <= 4)
"""The dtypes that every target has."""

# XLA compiles in half of the time without LLVM's optimisations, which are not what is under test.
_FAST = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Mode:
    """A way to run random programs.

    Attributes:
      name: of a target, or of a transformation.
      backend: from programs to their outputs, which must be the interpreter's.
      options: of the programs; see `tilekern.testing.programs.build`.
      batch: how many programs run at once.
      package: the package that it needs.
    """

    name: str
    backend: Backend
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: int = 30
    package: str = ""


# --- backends -------------------------------------------------------------------------------------------------------


def compiled(functions: Sequence[Callable[..., Any]], programs: Sequence[Program], *, x64: bool = True) -> Outputs:
    """The outputs of programs that are compiled as one function, of which each is a part."""

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(tuple(f(*inputs)) for f, inputs in zip(functions, arrays, strict=True))

    arrays = [p.arrays for p in programs]
    with jax.enable_x64(x64):
        return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


def by_xla(programs: Sequence[Program], *, optimize: bool = True, x64: bool = True) -> Outputs:
    """The outputs by the portable backend."""
    funcs = [pipeline.run(p.func) if optimize else p.func for p in programs]
    return compiled([partial(run, func) for func in funcs], programs, x64=x64)


def by_llvm(programs: Sequence[Program], *, machine: Machine | None = None, x64: bool = True) -> Outputs:
    """The outputs by machine code for this CPU, or a lesser one."""
    return compiled([LlvmLowering(pipeline.run(p.func), machine).run for p in programs], programs, x64=x64)


def by_triton(programs: Sequence[Program]) -> Outputs:
    """The outputs by Triton's interpreter; the expected outputs for a program whose atomic the target does not have."""
    return [_triton(program) or program.expected for program in programs]


def _triton(program: Program) -> Sequence[Array]:
    try:
        source = build(pipeline.run(program.func), CHIPS["cuda:sm_90"], {})
    except TargetError as error:
        assert "has no atomic" in error.summary
        return ()
    return triton_interpret(source, program.arrays)


def by_gluon(programs: Sequence[Program]) -> Outputs:
    """The outputs by the simulator of warp-specialised programs, each with some warps, stages, and thread blocks."""
    return [_gluon(program) for program in programs]


def _gluon(program: Program) -> Sequence[Array]:
    digits, warps = divmod(program.seed // 2, 3)
    digits, stages = divmod(digits, 4)
    hints = {"num_warps": (8, 4, 12)[warps], **({"num_stages": stages} if stages else {})}
    source = build_gluon(pipeline.run(program.func), CHIPS["cuda:sm_90"], hints)
    return simulate(source, program.arrays, seed=program.seed, blocks=1 + digits % 3)


def by_mosaic(programs: Sequence[Program]) -> Outputs:
    """The outputs by Pallas' interpreter, each program for some TPU."""
    targets = [t for t in TARGETS.values() if t.backend == "mosaic"]
    lowerings = [MosaicLowering(pipeline.run(p.func), targets[p.seed % len(targets)], run) for p in programs]
    return interpreted(lowerings, programs)


def interpreted(lowerings: Sequence[MosaicLowering], programs: Sequence[Program]) -> Outputs:
    """The outputs by Pallas' interpreter, compiled as one function."""
    return compiled([partial(lowering.run, interpret=True) for lowering in lowerings], programs, x64=False)


def in_one_op(programs: Sequence[Program], *, target: str) -> Outputs:
    """The outputs of calls of kernels in one op, which calls each of them twice, on the same arrays.

    Kernels of odd seed are batched by `jax.vmap`, behind a call on zeros.
    """
    kernels = [_kernel(p.func) for p in programs]

    def together(arrays: Sequence[Sequence[Any]]) -> Any:
        calls = list(zip(kernels, programs, arrays, strict=True))
        return [[_called(*c) for c in calls] for _ in range(2)]

    with jax.enable_x64(True):
        arrays = [p.arrays for p in programs]
        made = tk.op(out_type=partial(jax.eval_shape, together))(together)
        first, second = jax.device_get(jax.jit(partial(made, target=target))(arrays))
    for found, again in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert found.tobytes() == again.tobytes(), "the second call of a kernel gives other results"
    return first


def _kernel(func: Func) -> Callable[..., Sequence[Any]]:
    """A kernel for every target."""
    types, outputs = (
        [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in params] for params in (func.inputs, func.outputs)
    )
    version = Version(func, tuple(range(len(types))))
    return partial(call, instance(func.name, None, types, outputs, dict.fromkeys(TARGETS, (version, {})), 0))


def _called(kernel: Callable[..., Any], program: Program, arrays: Sequence[Any]) -> Sequence[Any]:
    if program.seed % 2 == 0:
        return kernel(*arrays)
    stacked = [jnp.stack([jnp.zeros_like(x), x]) for x in arrays]
    return [output[1] for output in jax.vmap(kernel)(*stacked)]


# --- transformations ------------------------------------------------------------------------------------------------


def by_interpreter(programs: Sequence[Program], *, change: Callable[[Func], Func]) -> Outputs:
    """The outputs of changed programs, by the interpreter."""
    return [interpret(change(p.func), *p.arrays, orders=1) for p in programs]


def on_request(func: Func) -> Func:
    """The passes that backends ask for."""
    guard = partial(guard_masks, beside=_always)
    delay = partial(delay_dots, beside=_always, pays=_always)
    for improve in (sink_scales, guard, delay, split_loops, skew_carries):
        func = improve(pipeline.run(func, check=True))
        verify(func)
    return pipeline.run(func, check=True)


def _always(given: Any) -> bool:
    del given
    return True


def through_text(func: Func) -> Func:
    """The text form, and back."""
    text = to_text(func)
    again = parse(text)
    assert to_text(again) == text
    return again


def in_any_order(programs: Sequence[Program]) -> Outputs:
    """The outputs, which do not depend on the order of programs."""
    return [interpret(p.func, *p.arrays, orders=3) for p in programs]


def batched(programs: Sequence[Program]) -> Outputs:
    """The outputs of the second of two runs; the first one is on zeros, and inputs of odd number are shared."""
    return [[output[1] for output in _batched(p)] for p in programs]


def _batched(program: Program) -> Sequence[Array]:
    func, size = program.func, 2
    dims = [0 if n % 2 == 0 or p.ref.role == "inout" else None for n, p in enumerate(func.inputs)]
    pairs = zip(program.arrays, dims, strict=True)
    arrays = [x if d is None else np.stack([np.zeros_like(x), x]) for x, d in pairs]
    return interpret(batch(func, size, dims), *arrays, orders=1)


def judged(programs: Sequence[Program]) -> Outputs:
    """The outputs that programs should have, if the interpreter finds faults that are planted in them."""
    for program in programs:
        verdicts.check(program)
    return [program.expected for program in programs]


def in_parts(programs: Sequence[Program]) -> Outputs:
    """The outputs that programs should have, if each device's part of a program computes its part of the outputs."""
    for program in programs:
        assert_parts_agree(program.func, program.arrays)
    return [program.expected for program in programs]


def differentiated(programs: Sequence[Program]) -> Outputs:
    """The outputs, if the derivatives are JAX's, and each other's transpose."""
    with jax.enable_x64(True):
        for program in programs:
            derivatives.check(program)
    return [program.expected for program in programs]


def _quietly(backend: Backend) -> Backend:
    """The backend, whose prints go nowhere."""

    def quiet(programs: Sequence[Program]) -> Outputs:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return backend(programs)

    return quiet


def modes(wild: type[Generator]) -> list[Mode]:
    """All modes, the quick ones first.

    Args:
      wild: the generator of programs that print and assert, which some backends take, and that mask by ranges.
    """
    narrow = {"dtypes": NARROW}
    debug = {"make": wild, "features": (*FEATURES, "debug")}
    more = {"make": wild, "features": (*FEATURES, "live", "monoids")}
    vectors = {"make": Chains}
    improve = partial(pipeline.run, check=True)
    return [
        Mode("passes", partial(by_interpreter, change=improve), more),
        Mode("passes on request", partial(by_interpreter, change=on_request), more),
        Mode("text", _quietly(partial(by_interpreter, change=through_text)), debug),
        Mode("orders", in_any_order),
        Mode("batches", batched),
        Mode("verdicts", judged),
        Mode("parts", in_parts, {"make": Divisible}),
        Mode("derivatives", differentiated, {"dtypes": (F64,)}, batch=8),
        Mode("cpu:xla", by_xla, more),
        Mode("cpu:xla without passes", partial(by_xla, optimize=False)),
        Mode("cpu:xla without x64", partial(by_xla, x64=False), narrow),
        Mode("cpu:xla with prints", _quietly(by_xla), debug),
        Mode("cpu:llvm", by_llvm, more, package="llvmlite"),
        Mode("cpu:llvm without x64", partial(by_llvm, x64=False), narrow, package="llvmlite"),
        Mode("cpu:llvm with prints", _quietly(by_llvm), debug, package="llvmlite"),
        Mode("cpu:xla in one op", partial(in_one_op, target="cpu:xla")),
        Mode("cpu:llvm in one op", partial(in_one_op, target="cpu:llvm"), package="llvmlite"),
        Mode("cpu:xla index vectors", by_xla, vectors),
        Mode("cpu:llvm index vectors", by_llvm, vectors, package="llvmlite"),
        Mode("cuda:sm_90 index vectors", by_triton, vectors, package="triton"),
        Mode("cuda:sm_90 gluon", by_gluon, {"make": Products}, batch=1),
        Mode("tpu index vectors", by_mosaic, vectors, batch=8),
        Mode("cuda:sm_90", by_triton, more, package="triton"),
        Mode("tpu", by_mosaic, narrow | more, batch=8),
    ]


REFUSALS = (TargetError, ResourceError)
"""Errors by which a target refuses a program."""
