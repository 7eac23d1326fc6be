"""The gradients of linear recurrences at their defaults: derived kernels hold many tiles, and spill few registers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import pytest

from bench.gpu.item import lowerings_of
from tilekern.kernels.gated_delta_rule import gated_delta_rule
from tilekern.kernels.gated_delta_rule.cases import CASES as RULES
from tilekern.kernels.linear_attention import linear_attention
from tilekern.kernels.linear_attention.cases import CASES as ATTENTIONS
from tilekern.lower.target import resolve
from tilekern.lower.triton.lowering import TritonLowering

FUNCTIONS: dict[str, tuple[Any, Any]] = {case.name: (linear_attention, case) for case in ATTENTIONS} | {
    case.name: (gated_delta_rule, case) for case in RULES
}

# Bytes of registers of a thread that the worst kernel of a gradient spills on sm_90, with Triton 3.6 or 3.9.
SPILLS = {"mamba2_130m": 576, "square": 784, "qwen3_next": 400}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SPILLS)
@pytest.mark.slow
def test_gradients_spill_no_more_than_they_did(name: str) -> None:
    """Compiling also refuses a program with too much shared memory."""
    pytest.importorskip("triton", reason="needs triton")
    function, case = FUNCTIONS[name]
    arrays = jax.eval_shape(partial(case.arrays, dtype="bfloat16"), jax.random.key(0))

    def step(out: Any, state: Any, *arrays: Any) -> Any:
        return jax.vjp(function, *arrays)[1]((out, state))

    spills: list[int] = []
    for lowering in lowerings_of(step, [*jax.eval_shape(function, *arrays), *arrays], resolve("cuda:sm_90")):
        assert isinstance(lowering, TritonLowering)
        spills.append(lowering.compile().resources.spills or 0)
    assert len(spills) >= 3 and max(spills) <= SPILLS[name]
