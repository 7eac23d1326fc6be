"""The record of the backend for GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from tilekern.errors import CompileError, DependencyError, ResourceError, TargetError
from tilekern.ir.core import Array, Func
from tilekern.lower.backend import Backend, Device, FuzzMode, Lowering, Target
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.lower.triton.targets import AMD, BACKEND_NAME, CUSTOM_CALL, NVIDIA, check_runs_here, detect, is_here
from tilekern.passes.pipeline import Pass, Rounds


def _lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
    from tilekern.lower.triton.lowering import TritonLowering

    return TritonLowering(func, target, launch)


def _specialize(func: Func, target: Target, launch: Mapping[str, int], always: bool) -> Lowering | None:
    """Lower a Func to a warp-specialised program; None if it has no such form, does not compile, or is not worth it.

    With `always` it is taken as worth it.
    """
    from tilekern.lower.triton.gluon.choice import pays
    from tilekern.lower.triton.lowering import TritonLowering

    try:
        lowering = TritonLowering(func, target, launch)
        if not always and not pays(func, lowering.program, lowering.chip):
            return None
        with suppress(DependencyError):  # without Triton there is the text
            lowering.compile()
    except (TargetError, ResourceError, CompileError):
        return None
    return lowering


def _device(target: Target) -> Device:
    from tilekern.lower.triton.chip import chip_of
    from tilekern.lower.triton.compile import toolchain
    from tilekern.lower.triton.gluon.clusters import LARGEST

    chip, gluon = chip_of(target), target.emitter == "gluon"
    return Device(
        target.name,
        target.platform,
        cores=chip.cores,
        fast_memory=chip.shared_bytes,
        registers=chip.registers_per_core,
        lanes=chip.vendor.lanes,
        gpu=chip.gpu,
        matrix_unit=chip.matrix_unit,
        bandwidth=chip.bandwidth,
        flops=chip.flops,
        emitter="gluon" if gluon else "triton",
        cluster=LARGEST if gluon and toolchain.has_clusters() else 1,
    )


def _passes(target: Target) -> Sequence[Pass | Rounds]:
    from tilekern.lower.triton.chip import chip_of
    from tilekern.lower.triton.legalize import passes

    return passes(chip_of(target))


def _capabilities() -> Capabilities:
    from tilekern.lower.triton.legalize.dtypes import TRITON

    return TRITON


def _simulated_gluon(func: Func, inputs: Sequence[Array], seed: int) -> Sequence[Array]:
    """The outputs by the simulator of warp-specialised programs, with warps, stages and thread blocks by the seed."""
    from tilekern.lower.triton.chip import CHIPS
    from tilekern.lower.triton.gluon.build import build_gluon
    from tilekern.lower.triton.gluon.simulator.run import simulate

    digits, warps = divmod(seed // 2, 3)
    digits, stages = divmod(digits, 4)
    hints = {"num_warps": (8, 4, 12)[warps], **({"num_stages": stages} if stages else {})}
    return simulate(build_gluon(func, CHIPS["cuda:sm_90"], hints), inputs, seed=seed, blocks=1 + digits % 3)


# Of some dtypes; programs with one are left out.
_NO_ATOMIC = "has no atomic"

BACKEND = Backend(
    BACKEND_NAME,
    (*NVIDIA.values(), *AMD.values()),
    _lower,
    specialize=_specialize,
    detect=detect,
    is_here=is_here,
    check_runs_here=check_runs_here,
    device=_device,
    passes=_passes,
    capabilities=_capabilities,
    representative="cuda:sm_90",
    hardware="GPU",
    package="triton",
    install="pip install 'tilekern[cuda]'",
    custom_call=CUSTOM_CALL,
    estimator="tilekern.estimate.on_gpu",
    explainer="tilekern.estimate.explain.on_gpu",
    fuzz=(
        FuzzMode("cuda:sm_90 index vectors", "index vectors", lacks=_NO_ATOMIC),
        FuzzMode("cuda:sm_90 gluon", "products", batch=1, outputs=_simulated_gluon),
        FuzzMode("cuda:sm_90", lacks=_NO_ATOMIC),
        FuzzMode("cuda:sm_90 ptx", batch=1, lacks="has no ", machine_code=("cuda:sm_80", "cuda:sm_90")),
    ),
)
