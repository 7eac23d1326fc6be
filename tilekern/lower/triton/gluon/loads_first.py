"""The order of a loop's ops: vectors are loaded before the first product.

A load by pointers takes as long as several products. Behind a product it would be waited for in each iteration; in
front it comes while the product is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Dot
from tilekern.ir.core import Op
from tilekern.ir.memory import Load


def loads_first(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops of a loop's body in another order: loads of vectors, and the ops that compute their places, come first.

    Loads of tiles stay, for they would keep many registers busy. So do loads whose places need products or tiles.
    """
    first: set[Op] = set()
    for load in (op for op in ops if _is_vector(op)):
        needed = backward_slice(ops, load.results)
        if all(_is_vector(op) or (op.pure and not op.regions and not isinstance(op, Dot)) for op in needed):
            first.update(needed)
    return (*(op for op in ops if op in first), *(op for op in ops if op not in first))


def _is_vector(op: Op) -> bool:
    return isinstance(op, Load) and op.ref.ref.role == "in" and len(op.result.tile.shape) <= 1
