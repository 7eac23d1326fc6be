"""The kernels of the library for the cases that stand next to them, as the library's functions call them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tilekern.kernel.instance import Instance
from tilekern.lower.target import Target, resolve

KERNELS = Path(__file__).parents[2] / "kernels"
NAMES = tuple(sorted(path.parent.name for path in KERNELS.glob("*/cases.py")))
# A kernel that writes in place has no derivative; nobody trains through a cache; a token is an integer.
UNTRAINED = ("adamw_step", "index_scores", "mla_attention", "paged_attention", "sample")
DIFFERENTIABLE = tuple(name for name in NAMES if name not in UNTRAINED)
# A token of temperature 0 is an argmax by XLA, without a kernel.
CASES = {
    name: tuple(
        case
        for case in importlib.import_module(f"tilekern.kernels.{name}.cases").CASES
        if getattr(case, "temperature", 1.0) != 0
    )
    for name in NAMES
}


def family(name: str, case: str, dtype: str, target: str = "cpu:xla") -> Instance:
    """The one kernel that a library function calls for a case, with the schedule's blocks.

    The target decides how an op divides a call; the kernel can be lowered for any.
    """
    (found,) = (c for c in CASES[name] if c.name == case)
    return family_of(name, found, dtype, target)


def family_of(name: str, case: Any, dtype: str, target: str = "cpu:xla") -> Instance:
    """The same for any case, the small one of a real one for example."""
    function = getattr(importlib.import_module(f"tilekern.kernels.{name}"), name)
    arrays = jax.eval_shape(partial(case.arrays, dtype=dtype), jax.random.key(0))
    jaxpr = jax.make_jaxpr(partial(function, **getattr(case, "keywords", {})))(*arrays)
    (call,) = kernels_of(jaxpr, resolve(target))
    return call


def kernels_of(jaxpr: Any, target: Target) -> Iterator[Instance]:
    """The kernels that the equations of a jaxpr call on a target, in their order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "tilekern_call":
            called = equation.params["callee"].kernels(target, [v.aval for v in equation.invars])
            yield from (kernel for kernel, _ in called)
        elif "jaxpr" in equation.params:
            yield from kernels_of(equation.params["jaxpr"], target)
