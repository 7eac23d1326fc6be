"""Every case of the library has an estimate on every kind of target, or a reason why there is none."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from bench.explanations import values_of
from tests.lower.library import CASES, family
from tilekern.errors import TilekernError
from tilekern.estimate import Estimate, estimate
from tilekern.ir.core import Func
from tilekern.lower.target import resolve

PACKAGES = {"cpu:llvm": "llvmlite", "cuda:sm_90": "triton", "tpu:v5e": "libtpu", "tpu:v6e": "libtpu"}


def lowered(name: str, case: str, target: str) -> tuple[Func, Any]:
    lowering: Any = family(name, case, "bfloat16", target).lowered(resolve(target))
    return lowering.func, lowering


def estimated(lowering: Any, target: str, values: dict[str, Any]) -> Estimate:
    return estimate(lowering, resolve(target), [None for _ in lowering.func.inputs], values)


@pytest.mark.sweep(80)
@pytest.mark.parametrize("target", PACKAGES)
@pytest.mark.parametrize(("name", "case"), [(name, case.name) for name, cases in CASES.items() for case in cases])
def test_a_case_has_an_estimate_or_a_reason(name: str, case: str, target: str) -> None:
    if find_spec(PACKAGES[target]) is None:
        pytest.skip(f"needs {PACKAGES[target]}")
    try:
        func, lowering = lowered(name, case, target)
        forecast = estimated(lowering, target, values_of(func))
    except TilekernError as error:
        assert error.summary and error.fix
        return
    assert 0 < forecast.bound <= 1.05 * forecast.seconds and forecast.bytes_moved > 0


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_groups_that_a_sum_of_a_tile_finds_are_counted() -> None:
    """Products of rows of groups: a program counts the groups before it by a sum across its threads."""
    func, lowering = lowered("ragged_dot", "square", "cuda:sm_90")
    rows, groups = func.inputs[0].ref.shape[0], func.inputs[-1].ref.shape[0]

    def flops(ends: Any) -> int | None:
        return estimated(lowering, "cuda:sm_90", {"ends": ends}).flops_done

    block = func.axes[0].block
    whole = (np.arange(groups) + 1) * (rows // groups) // block * block
    whole[-1] = rows
    one_each = 2 * rows * func.inputs[0].ref.shape[1] * func.inputs[1].ref.shape[2]
    assert flops(whole) == pytest.approx(one_each, rel=0.01)
    # Each boundary inside of a tile makes the tile's programs multiply by one more group.
    assert flops(np.minimum(whole + block // 2, rows)) == pytest.approx(
        one_each * (1 + (groups - 1) * block / rows), rel=0.05
    )
