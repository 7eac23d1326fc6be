"""Products of few rows: by words of bfloat16 where the CPU has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.gemm.test_dots import Case, exact
from tests.lower.llvm.machines import AVX2, AVX512, BFLOAT16, TILES, here
from tests.lower.llvm.running import run
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.types import BF16
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")

_WORDS = "dpbf16ps"

# Columns and depths: one, words and vectors of words with their ends, several vectors side by side.
_SIZES = ((1, 1), (4, 2), (5, 31), (16, 32), (37, 67), (70, 64), (96, 33), (128, 130))


def results_agree(func: Func, *machines: Any) -> None:
    """The code's results on machines equal the interpreter's: small whole numbers, whose sums are exact."""
    rng = np.random.default_rng(0)
    arrays = [exact(rng, p.ref.shape, p.ref.dtype) for p in func.inputs]
    for machine in (None, *here(), *machines):
        for got, wanted in zip(run(LlvmLowering(func, machine), arrays), interpret(func, *arrays), strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=str(machine))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_sums_of_pairs_are_exact(rows: int, transposed: bool) -> None:
    many = [
        Case(rows, columns, depth, batch, (n % 2 == 0, not transposed), (n % 3 == 0, False), adds=n % 2 == 1)
        for n, (columns, depth) in enumerate(_SIZES)
        for batch in (0, 2)
    ]
    results_agree(func_of(lambda b: [case.op(b, BF16) for case in many]))


@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_are_multiplied_where_the_cpu_has_them(transposed: bool) -> None:
    """Of a right operand that is bfloat16 in memory; one that is computed is multiplied in float32."""

    def text(computed: bool, machine: Any) -> str:
        case = Case(4, 64, 64, 0, (False, not transposed), (False, computed), adds=False)
        return LlvmLowering(func_of(lambda b: [case.op(b, BF16)]), machine).text

    assert _WORDS in text(False, BFLOAT16) and _WORDS not in text(True, BFLOAT16)
    assert not any(_WORDS in text(False, machine) for machine in (AVX2, AVX512, TILES))


def test_a_nan_stays_in_its_row_and_column() -> None:
    """The last element of an odd depth has no neighbour in its word."""
    case = Case(4, 70, 33, 0, (False, True), (False, False), adds=False)
    func = func_of(lambda b: [case.op(b, BF16)])
    left, right = (np.ones(p.ref.shape, BF16) for p in func.inputs)
    left[1, 32], right[31, 69] = np.nan, np.inf
    for machine in (None, *here()):
        (got,) = run(LlvmLowering(func, machine), [left, right])
        wanted = np.full((4, 70), 33.0, np.float32)
        wanted[:, 69], wanted[1] = np.inf, np.nan
        np.testing.assert_array_equal(got, wanted)
