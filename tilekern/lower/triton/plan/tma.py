"""TMA copies: the loads and stores that the Tensor Memory Accelerator does, and their descriptors.

The hardware copies boxes of arrays between global and shared memory. Elements outside the array are read as 0, and not
written. Its limits (CUDA driver API, `cuTensorMapEncodeTiled`): at most 5 dims, a contiguous innermost dim, all other
strides and the box's innermost size multiples of 16 bytes, and sizes of a box of at most 256. Triton adds one: the box
begins at a multiple of 16 bytes. The dims of a descriptor may be in any order. Dims that the tile lacks come first, so
that the box is the tile.

Tensor cores of sm_90 multiply tiles in shared memory. So loads that feed their dots become copies, and in programs with
such loads, stores of large tiles do, too. All other loads use pointers:

- Operands of arithmetic, which get to registers faster that way.
- Operands of float32 dots. Triton loads a copied operand into registers at once, and they spill: 1,828 bytes for a
  matmul with blocks of 128 × 128 × 32 on sm_90, and none with pointers.
- Operands from outside the loop of a dot with fewer rows than instructions on shared memory take. They would stay in
  registers for the whole loop: 1,392 bytes of spills in attention's backward kernel with 32 keys and heads of 256.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod

from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Dim, Load, MemoryOp, Store
from tilekern.ir.records import record
from tilekern.ir.shape import Reshape, Transpose
from tilekern.ir.types import BOOL, F32, F64, strides_of
from tilekern.lower.triton.calibration import MIN_TMA_BYTES
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.plan.access_order import barriers
from tilekern.lower.triton.program import Descriptor

_ALIGNMENT = 16  # bytes, of strides and of the box's innermost size
_MAX_BOX = 256  # elements along one dim
_MAX_DIMS = 5
_MIN_ROWS = 64  # of a `wgmma`, and of the smallest `tcgen05.mma` (PTX ISA, "Matrix shape")
_INT32 = 2**31 - 1


@record
class TmaCopy:
    """The copy of one load or store.

    Attributes:
      descriptor: descriptor of the array and the box.
      dims: for each dim of the descriptor, the number of the array's dim.
    """

    descriptor: Descriptor
    dims: tuple[int, ...]


def plan_tma_copies(
    func: Func, chip: Chip, ranges: Mapping[Value, Interval], trimmed: Collection[Op] = (), casts: bool = False
) -> dict[Op, TmaCopy]:
    """The loads and stores of a legal Func that become copies; none on chips without the accelerator.

    Args:
      func: the Func.
      chip: the GPU.
      ranges: intervals of its scalars.
      trimmed: loads that are copied without their masks: the program sets masked lanes to 0 itself.
      casts: copy operands of 8 bits that are cast before their product, too.
    """
    if not chip.tma:
        return {}
    operands = _dot_operands(func)
    cast = _dot_operands(func, casts=True) if casts else set[Value]()
    copies: dict[Op, TmaCopy] = {}
    for op in func.walk():
        feeds_dot = isinstance(op, Load) and (op.result in operands or (op.result in cast and _is_byte(op.result)))
        if isinstance(op, Load) and op.ref.ref.role == "in" and feeds_dot:
            copy = _copy(op, ranges, op in trimmed)
            if copy is not None:
                copies[op] = copy
    if copies:
        copies.update(_stores(func, ranges))
    return copies


def _stores(func: Func, ranges: Mapping[Value, Interval]) -> Iterator[tuple[Op, TmaCopy]]:
    """Stores to outputs whose accesses are all copies with one descriptor, because an output is one argument.

    Stores that need barriers stay stores: no barrier orders copies of the accelerator.
    """
    ordered = barriers(func)
    for param in func.outputs:
        users = [op for op in func.walk() if isinstance(op, MemoryOp) and op.ref is param]
        copies = [_copy(op, ranges) if isinstance(op, Store) else None for op in users]
        first = copies[0] if copies else None
        plain = param.ref.role == "out" and param not in ordered
        if plain and first is not None and all(copy == first for copy in copies):
            yield from ((op, first) for op in users)


def _is_byte(value: Value) -> bool:
    return value.tile.dtype.itemsize == 1


def _dot_operands(func: Func, casts: bool = False) -> set[Value]:
    """The operands of dots on tensor cores, before they are transposed, or cast.

    A dot of few rows counts only operands that are loaded in its own block.
    """
    operands: set[Value] = set()

    def visit(block: Block) -> None:
        defined = {v for op in block.ops for v in op.results}
        for op in reversed(block.ops):
            for region in op.regions:
                visit(region)
            if isinstance(op, Dot) and _on_tensor_cores(op):
                operands.update(v for v in op.operands if op.result.tile.shape[-2] >= _MIN_ROWS or v in defined)
            elif isinstance(op, (Transpose, Reshape, *((Convert,) if casts else ()))) and op.result in operands:
                operands.update(op.operands)

    visit(func.body)
    return operands


def _on_tensor_cores(op: Dot) -> bool:
    """True if tensor cores multiply operands of this dtype, in this precision."""
    dtype = op.operands[0].tile.dtype
    return dtype != F64 and (dtype != F32 or op.precision != "ieee")


def _copy(op: MemoryOp, ranges: Mapping[Value, Interval], trimmed: bool = False) -> TmaCopy | None:
    shape, itemsize = op.extents, op.ref.ref.dtype.itemsize
    dims = op.access.dims
    plain = (trimmed or not op.masked) and not op.trailing and op.ref.ref.dtype != BOOL
    if not plain or not 2 <= len(shape) <= _MAX_DIMS or any(n == 0 or n > _INT32 for n in shape):
        return None
    if dims[-1].kind != "block" or any(d.kind == "gather" for d in dims):
        return None
    if not all(_fits(d, op, ranges) for d in dims):
        return None
    strides = strides_of(shape)
    inner = dims[-1].position
    steps = (*strides[:-1], inner.const, *(term.stride for term in inner.terms))
    aligned = all(step * itemsize % _ALIGNMENT == 0 for step in steps)
    box = dims[-1].size * itemsize
    if not aligned or box % _ALIGNMENT or prod(op.access.shape) * itemsize < MIN_TMA_BYTES:
        return None
    order = (
        *(d for d, dim in enumerate(dims) if dim.kind == "index"),
        *(d for d, dim in enumerate(dims) if dim.kind == "block"),
    )
    block = tuple(dims[d].size for d in order)
    descriptor = Descriptor(tuple(shape[d] for d in order), tuple(strides[d] for d in order), block)
    return TmaCopy(descriptor, order)


def _fits(dim: Dim, op: MemoryOp, ranges: Mapping[Value, Interval]) -> bool:
    """True if a dim of a box is small enough, and its position is an int32."""
    where = position_interval(dim.position, [ranges.get(v) for v in op.positions])
    return dim.size <= _MAX_BOX and where is not None and where.within(-_INT32, _INT32 - dim.size)
