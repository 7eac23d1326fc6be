"""The dtypes that each target computes in, for tests of the legalisation that they share."""

from __future__ import annotations

from tilekern.ir.types import DTYPES
from tilekern.lower.mosaic.legalize.casts import MOSAIC
from tilekern.lower.target import BACKENDS

TARGETS = {name: backend.capabilities() for name, backend in BACKENDS.items() if backend.capabilities is not None}

NAMES = {
    name: [n for n, d in DTYPES.items() if has is not MOSAIC or (d.itemsize <= 4 and n != "f16")]
    for name, has in TARGETS.items()
}
"""The dtypes of a target. Mosaic has none of 64 bits, and its float16 is emulated before."""
