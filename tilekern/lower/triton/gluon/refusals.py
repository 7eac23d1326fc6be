"""The Funcs that this emitter refuses: ops, products and stores of other forms, each with its reason."""

from __future__ import annotations

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Broadcast, Iota, Transpose
from tilekern.ir.types import F32, kind_of
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.gluon.clusters import ROWS
from tilekern.lower.triton.gluon.groups import REGISTERS, WARPS, folds_of, multiplies
from tilekern.lower.triton.plan.access_order import barriers

_COLUMNS = 256  # of the widest product

_OPS = (
    *(Bitcast, Broadcast, Constant, Convert, Dot, Elementwise, Fold, Iota, Load, Reduce, Select, Store, Switch),
    Transpose,
)


def check(func: Func, chip: Chip, warps: int) -> None:
    """Refuse a Func outside of the forms that this emitter takes."""
    with source.at(func.loc):
        if chip.matrix_unit != "wgmma":
            raise refusal("warp specialisation is for Hopper", "target cuda:sm_90", f"target {chip.name}")
        if warps % WARPS or not 1 <= warps // WARPS <= max(REGISTERS):
            raise refusal("a number of warps that is of no warpgroups", "num_warps = 4, 8 or 12", f"{warps}")
        if not any(isinstance(op, Dot) for op in func.walk()):
            raise refusal("there is no product of matrices to run beside the loads", "a tk.dot in a loop", "none")
        written = [p for p in func.outputs if p.ref.role != "out"]
        if written:
            raise refusal("an output that is updated", "outputs that are stored once", str(written[0].type))
        ordered = next(iter(barriers(func)), None)
        if ordered is not None:
            raise refusal("an element that is stored twice", "stores to different elements", str(ordered.type))
    _check_block(func.body, depth=0)


def _check_block(block: Block, depth: int) -> None:
    for op in block.ops:
        with source.at(op.loc):
            if not isinstance(op, _OPS):
                raise refusal(f"{op.name} is not taken", "elementwise functions, reductions, dots", op.name)
            if isinstance(op, Fold) and depth > 1 and any(isinstance(inner, Dot) for inner in op.walk()):
                raise refusal("loops of products inside of two others", "one loop around them", "loops three deep")
            if isinstance(op, Fold) and multiplies(op.body) and any(multiplies(f.body) for f in folds_of(op.body)):
                raise refusal("products in a loop and in one inside of it", "products in the inner loop", "in both")
            if isinstance(op, Dot):
                _check_dot(op)
            if isinstance(op, Switch) and any(isinstance(inner, (Dot, Store)) for inner in op.walk()):
                raise refusal("a product or a store in a branch", "one that always runs", "one in a branch")
        for region in op.regions:
            _check_block(region, depth + 1)


def _check_dot(op: Dot) -> None:
    """`wgmma` multiplies 64 rows by up to 256 columns, of 16-bit floats here; the right side in shared memory."""
    left = op.operands[0].tile
    whole = len(left.shape) == 2 and op.contract == ((1,), (0,)) and op.result.tile.dtype == F32
    rows, columns = op.result.tile.shape[-2:]
    if not whole or kind_of(left.dtype) != "float" or left.dtype.itemsize != 2:
        raise refusal("a product of other matrices than of bfloat16 or float16", "dots of two matrices", f"{left}")
    if rows % ROWS or columns % 8 or columns > _COLUMNS or left.shape[1] % 16:
        raise refusal(
            "a product of a size that `wgmma` does not have", "64 rows, up to 256 columns", f"{op.result.tile}"
        )


def refusal(summary: str, expected: str, got: str) -> TargetError:
    """The error for a Func of a form that this emitter does not take; Triton's emitter may take it."""
    return TargetError(
        f"the Gluon emitter does not take it: {summary}",
        expected=expected,
        got=got,
        fix='leave the emitter out, or say emitter="auto": then Triton compiles what this one does not take',
    )
