"""Float16 by float32: bitcasts from and to float16 keep the bits of all numbers, products keep all digits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import edges
from tests.lower.mosaic.legalize.legality import assert_stays
from tests.lower.triton.legalize.meaning import one
from tilekern.ir.compute import Bitcast, Dot
from tilekern.ir.types import BF16, DTYPES, F16
from tilekern.lower.mosaic.legalize.emulate_float16 import emulate_float16

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["i16", "u16", "bf16", "f16"])
def test_bitcasts_of_float16_keep_all_bits(name: str) -> None:
    """But for NaN, of which float32 keeps no bits."""
    x = edges(F16)
    x = x[(x == x) & (x.view(BF16) == x.view(BF16))]
    assert_stays(*one(Bitcast, x, dtype=DTYPES[name]), zeros=True)
    assert_stays(*one(Bitcast, x.view(DTYPES[name]), dtype=F16), zeros=True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "precision"), [("f16", "ieee"), ("bf16", "bf16"), ("f32", "bf16")])
def test_products_of_float16_take_all_digits_of_float32(name: str, precision: str) -> None:
    """Cheaper products of float32 round it to bfloat16, which has fewer digits than float16."""
    x = np.ones((8, 8), DTYPES[name])
    func, _ = one(Dot, x, x, contract=((1,), (0,)), precision="bf16")
    (dot,) = (op for op in emulate_float16(func).walk() if isinstance(op, Dot))
    assert dot.precision == precision
