"""Replace the index of a grid axis of one tile by 0, its value in all programs.

    grid i of 1, j of 4; load x[2 * i + j]        → grid i of 1, j of 4; load x[2 * 0 + j]

Bodies often leave out such an index by themselves: after this pass and `pipeline.run`, both forms are equal. The axis
stays. It is no pass of every Func, because backends read the grid's indices in accesses.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilekern.ir.compute import Constant
from tilekern.ir.core import Func, Value
from tilekern.ir.rewrite import Rewriter


def pin_indices(func: Func) -> Func:
    """Apply the rewrite above."""
    single = [index for index, axis in zip(func.body.args, func.axes, strict=True) if axis.tiles == 1]
    if not single:
        return func
    rewriter = Rewriter(lambda op, rewriter: None)

    def body(*_: Value) -> tuple[Value, ...]:
        zero = rewriter.one(Constant(array=np.zeros((), np.int32), shape=()))
        for index in single:
            rewriter.replace(index, zero)
        return rewriter.inline(func.body)

    return replace(func, body=rewriter.block(func.body.args, body))
