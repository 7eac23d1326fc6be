"""Pallas' TPU interpreter with two cores: it finds races, blocks that return, and reads of what nobody wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.passes import pipeline
from tilekern.testing import assert_close
from tilekern.testing.programs import inputs_of

TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=0)


@dataclass(frozen=True)
class Call:
    """A kernel as it was called."""

    func: Func
    arrays: tuple[Array, ...]


def on_two_cores(lowering: MosaicLowering, call: Call) -> None:
    """Run a call, and check its results.

    Raises:
      JaxRuntimeError: there is a race, an index out of bounds, or a block that returns.
    """
    wanted = interpret(call.func, *call.arrays, orders=1)
    for got, right in zip(lowering.interpret(*call.arrays, params=TWO_CORES), wanted, strict=True):
        assert_close(got, right.astype(np.float64), right, length=64)


def assert_every_plan_agrees(func: Func, *arrays: Array) -> list[str]:
    """Run each candidate plan of a Func on two cores, and check its results; gives the forms of the plans."""
    func = pipeline.run(func)
    call = Call(func, arrays or inputs_of(func, 0))
    forms: list[str] = []
    for lowering in every_plan(func):
        forms.append(kind_of_plan(lowering.planned))
        try:
            on_two_cores(lowering, call)
        except Exception as error:
            pltpu.reset_tpu_interpret_mode_state()  # an error leaves the interpreter's memory as it was
            error.add_note(f"the plan is {forms[-1]}")
            raise
    return forms
