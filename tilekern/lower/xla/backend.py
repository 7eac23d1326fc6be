"""The record of the portable backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from tilekern.ir.core import Func
from tilekern.lower.backend import Backend, FuzzMode, Lowering, Target
from tilekern.passes.pipeline import Pass, Rounds

_NAME = "xla"


def _lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
    from tilekern.lower.xla.lowering import XlaLowering

    return XlaLowering(func)


def _passes(target: Target) -> Sequence[Pass | Rounds]:
    from tilekern.lower.xla import legalize

    return legalize.PASSES


def run(func: Func, *inputs: jax.Array) -> Sequence[jax.Array]:
    """The outputs of a Func as operations of JAX, for backends that compute tables outside of their kernels."""
    from tilekern.lower.xla.emit import emit_xla

    return emit_xla.run(func, *inputs)


BACKEND = Backend(
    _NAME,
    (Target("cpu:xla", "cpu", _NAME),),
    _lower,
    passes=_passes,
    simulated=lambda lowering: lowering.run,
    takes_extents=True,
    fuzz=(
        FuzzMode("cpu:xla"),
        FuzzMode("cpu:xla without passes", "plain", optimize=False),
        FuzzMode("cpu:xla without x64", "plain", narrow=True, x64=False),
        FuzzMode("cpu:xla with prints", "debug"),
        FuzzMode("cpu:xla in one op", "plain", in_one_op=True),
        FuzzMode("cpu:xla index vectors", "index vectors"),
    ),
)
