"""Carries of one loop that another loop continues, in the same buffer and in the same form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Value


def continued_carries(func: Func) -> frozenset[Value]:
    """The results of folds whose only use is as an initial value of another fold in the same block.

    The other fold overwrites the buffer. With a second use, by another carry, a later fold or an op, or in a loop
    around the other fold, the overwritten value would still be needed.
    """
    return frozenset(_continued(func))


def _continued(func: Func) -> Iterator[Value]:
    uses = Counter(use for op in func.body.ops for use in op.uses())
    for block in (func.body, *(region for op in func.walk() for region in op.regions)):
        folds = [op for op in block.ops if isinstance(op, Fold)]
        results = {result for op in folds for result in op.results}
        yield from (init for op in folds for init in op.inits if init in results and uses[init] == 1)
