"""Block IR → block IR whose pure ops Mosaic has; each step is a rewrite whose result the interpreter runs as well.

refuse            what no TPU does
pointwise         index vectors that go together
without_empty     no tile without elements
shifts            loads at any place, by loads of tiles at multiples of their sizes
bits              shifts, counts of bits, neighbours of floats, by plain bit operations
without_float16   float16 as float32 that is rounded after every op
widen             computing in 32 bits
sines             and cosines of tiles, of one angle both at once
functions         of float32, by those that there are
dots              of matrices of the dtypes that are multiplied
expand            sorts, scans, gathers, ..., by cutting, joining and selecting
forms             reshapes, and what becomes of vectors
"""

from __future__ import annotations

from tilekern.ir.core import Func
from tilekern.ir.verify import verify
from tilekern.lower.mosaic.legalize.dots import dots
from tilekern.lower.mosaic.legalize.expand import expand
from tilekern.lower.mosaic.legalize.expand_bits import bits
from tilekern.lower.mosaic.legalize.forms import forms
from tilekern.lower.mosaic.legalize.functions import functions
from tilekern.lower.mosaic.legalize.pointwise import pointwise
from tilekern.lower.mosaic.legalize.refuse import refuse
from tilekern.lower.mosaic.legalize.sines import sines
from tilekern.lower.mosaic.legalize.unaligned_loads import shifts
from tilekern.lower.mosaic.legalize.widen import widen
from tilekern.lower.mosaic.legalize.without_float16 import without_float16
from tilekern.lower.rewrite.without_empty import without_empty
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.cse import cse
from tilekern.passes.dce import dce


def legalize(func: Func, chip_name: str) -> Func:
    """The Func in the form that `lower.mosaic.ops` has functions for.

    Refs of float16 become refs of float32: the caller widens the arrays before, and narrows them after, which is exact.
    Constants of several elements stay; the body of a Pallas kernel takes them as inputs.

    Args:
      func: went through the pipeline of passes.
      chip_name: "v5e", "v5p", "v6e" or "7x".

    Raises:
      TargetError: the Func does something that TPUs do not have.
    """
    refuse(func, chip_name)
    func = pointwise(func)
    for rewrite in (without_empty, dce, shifts, bits, without_float16, widen, sines, functions):
        func = rewrite(func)
    func = dots(func, chip_name)
    for rewrite in (expand, canonicalize, cse, dce, forms, cse, dce):
        func = rewrite(func)
    verify(func)
    return func
