"""Float16 by float32: bitcasts from and to float16 keep the bits of all numbers."""

from __future__ import annotations

import pytest

from tests.ir.funcs import edges
from tests.lower.mosaic.legalize.legality import assert_stays
from tests.lower.triton.legalize.meaning import one
from tilekern.ir.compute import Bitcast
from tilekern.ir.types import BF16, DTYPES, F16


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["i16", "u16", "bf16", "f16"])
def test_bitcasts_of_float16_keep_all_bits(name: str) -> None:
    """But for NaN, of which float32 keeps no bits."""
    x = edges(F16)
    x = x[(x == x) & (x.view(BF16) == x.view(BF16))]
    assert_stays(*one(Bitcast, x, dtype=DTYPES[name]), zeros=True)
    assert_stays(*one(Bitcast, x.view(DTYPES[name]), dtype=F16), zeros=True)
