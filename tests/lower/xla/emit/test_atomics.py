"""Atomic updates of the XLA backend."""

from __future__ import annotations

import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_same


@tk.kernel(out_type=lambda start, *_, **__: None, donate=("start",))
def scatter(start, where, value, mask, _, *, kind: str, block: tk.Block = 4):
    i = tk.parallel(where.shape[0], block)
    getattr(start.at[where[i]], kind)(value[i], mask=mask[i], **({"ordered": False} if kind == "add" else {}))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("kind", "expected"), [("add", [12, 27, 30]), ("max", [10, 20, 30]), ("min", [2, 7, 30])])
def test_masked_lanes_update_nothing(kind: str, expected: list[int]) -> None:
    start, where = np.array([10, 20, 30], np.int32), np.array([0, 0, 1, 2, 2], np.int32)
    value, mask = np.array([2, 1, 7, 99, -99], np.int32), np.array([True, False, True, False, False])
    found, _ = scatter(start, where, value, mask, kind=kind, target="cpu:xla")
    assert_same(np.asarray(found), np.array(expected, np.int32))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["add", "max", "min", "and_", "or_", "xor"])
def test_an_update_is_one_scatter_if_xla_has_it(kind: str) -> None:
    """The others are updates of one lane after the other."""
    numbers, mask = np.zeros(5, np.int32), np.ones(5, bool)
    text = scatter.trace(numbers, numbers, numbers, mask, kind=kind).lower("cpu:xla").text
    in_turn = "while" in text
    assert in_turn == (kind in ("and_", "or_", "xor")), text
