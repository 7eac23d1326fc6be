"""Examples of the ops that mean something to derivatives."""

from tilekern.ir.core import Block, Builder, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import F32, TileType


def product_rule(b: Builder) -> Block:
    """The rule of y(p), with the tangent t * y."""
    y, p, t = (Value(TileType((), F32), name) for name in "ypt")
    return b.block((y, p, t), lambda *_: (b.one(Elementwise(operands=(t, y), function="mul")),))


def derived(b: Builder, x: Value) -> Value:
    """The value, through each of the ops."""
    stopped = b.one(Stop(operands=(x,)))
    ruled = b.one(Custom(operands=(stopped, x), rule=product_rule(b)))
    return b.one(Custom(operands=(ruled,), reason='none "here"'))
