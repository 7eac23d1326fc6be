"""Each line's part of the work where no machine code tells it: its operations and bytes over the target's rates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilekern.estimate.explain.lines import Shares, shares
from tilekern.ir.analysis.costs import work_by_op
from tilekern.ir.core import Array, Func, Value

SHARES_OF = "seconds that the line's operations and bytes take at the rates of the units, one after the other"


def shares_of_lines(func: Func, values: Mapping[Value, Array], rates: tuple[float, float, float, float]) -> Shares:
    """The part of each line, and of each region, of the work.

    Args:
      func: the Func.
      values: arrays whose values are known.
      rates: operations of matrix products, of vectors, of functions, and bytes, a second.
    """
    matrix, vector, function, memory = rates
    seconds = {
        op: work.dots / matrix
        + (work.flops - work.dots) / vector
        + work.transcendentals / function
        + min(work.elements, math.prod(work.array.ref.shape) if work.array else 0) * work.itemsize / memory
        for op, work in work_by_op(func, values).items()
    }
    return shares((op.loc, amount) for op, amount in seconds.items())
