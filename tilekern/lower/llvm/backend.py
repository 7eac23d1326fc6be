"""The record of the backend for CPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence

from tilekern.ir.core import Func
from tilekern.lower.backend import Backend, FuzzMode, Lowering, Target
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.passes.pipeline import Pass, Rounds

_NAME, _PACKAGE = "llvm", "llvmlite"
_TARGET = Target("cpu:llvm", "cpu", _NAME, fallback="unnamed")


def _lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
    from tilekern.lower.llvm.lowering import LlvmLowering

    return LlvmLowering(func)


def _detect(platform: str, exporting: bool) -> Target | None:
    """Code for this CPU if llvmlite is installed; exported programs have portable code."""
    serves = platform == "cpu" and not exporting and importlib.util.find_spec(_PACKAGE) is not None
    return _TARGET if serves else None


def _machine(target: Target) -> str:
    from tilekern.lower.llvm.compile.toolchain import host

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{host().cpu}, {threads} threads"


def _passes(target: Target) -> Sequence[Pass | Rounds]:
    """The passes: every CPU has the same ones, whose effect depends on the CPU."""
    from tilekern.lower.llvm.legalize import passes
    from tilekern.lower.llvm.runtime.machine import Machine

    return passes(Machine("aarch64-unknown-linux-gnu", "generic", "", vector_bytes=16, registers=32))


def _capabilities() -> Capabilities:
    from tilekern.lower.llvm.legalize.dtypes import LLVM

    return LLVM


BACKEND = Backend(
    _NAME,
    (_TARGET,),
    _lower,
    detect=_detect,
    machine=_machine,
    passes=_passes,
    capabilities=_capabilities,
    simulated=lambda lowering: lowering.run,
    package=_PACKAGE,
    install="pip install 'tilekern[cpu]'",
    process_bound="machine code of this process",
    estimator="tilekern.estimate.on_cpu",
    explainer="tilekern.estimate.explain.on_cpu",
    takes_extents=True,
    reads_four_bits=True,
    fuzz=(
        FuzzMode("cpu:llvm"),
        FuzzMode("cpu:llvm without x64", "plain", narrow=True, x64=False),
        FuzzMode("cpu:llvm with prints", "debug"),
        FuzzMode("cpu:llvm in one op", "plain", in_one_op=True),
        FuzzMode("cpu:llvm index vectors", "index vectors"),
    ),
)
