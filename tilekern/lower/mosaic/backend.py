"""The record of the backend for TPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from tilekern.ir.core import Func
from tilekern.lower.backend import Backend, Device, FuzzMode, Lowering, Target
from tilekern.lower.mosaic.targets import BACKEND_NAME, TARGETS, detect, is_here
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.passes.pipeline import Pass, Rounds


def _device(target: Target) -> Device:
    from tilekern.lower.mosaic.chip import CHIPS, LANES, PORTABLE, SUBLANES

    chip = PORTABLE if target.portable else CHIPS[target.name]
    return Device(
        target.name,
        target.platform,
        cores=chip.cores,
        fast_memory=chip.vmem_budget,
        lanes=LANES,
        sublanes=SUBLANES,
        matrix_size=chip.matrix_size,
        bandwidth=chip.hbm_bandwidth,
        flops=chip.bf16_flops,
    )


def _passes(target: Target) -> Sequence[Pass | Rounds]:
    from tilekern.lower.mosaic.legalize import passes

    return passes(target.name.removeprefix("tpu:"))


def _capabilities() -> Capabilities:
    from tilekern.lower.mosaic.legalize.casts import MOSAIC

    return MOSAIC


def backend(evaluate: Callable[..., Sequence[jax.Array]]) -> Backend:
    """The backend.

    Args:
      evaluate: runs the Funcs that compute tables of prefetched scalars, outside of the kernel: the portable backend's.
    """

    def lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
        from tilekern.lower.mosaic.lowering import MosaicLowering

        return MosaicLowering(func, target, evaluate)

    def simulated(lowering: Any) -> Callable[..., Sequence[jax.Array]]:
        return partial(lowering.run, interpret=True)

    return Backend(
        BACKEND_NAME,
        tuple(TARGETS.values()),
        lower,
        detect=detect,
        is_here=is_here,
        device=_device,
        passes=_passes,
        capabilities=_capabilities,
        simulated=simulated,
        hardware="TPU",
        package="libtpu",
        interprets_without=True,
        install="pip install 'tilekern[tpu]'",
        estimator="tilekern.estimate.on_tpu",
        explainer="tilekern.estimate.explain.on_tpu",
        fuzz=(
            FuzzMode("tpu index vectors", "index vectors", x64=False, every_target=True, batch=8),
            FuzzMode("tpu", narrow=True, x64=False, every_target=True, batch=8),
        ),
    )
