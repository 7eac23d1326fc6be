"""Clusters: two thread blocks that compute one program in two halves, and load the tiles once that both multiply by.

With `num_ctas = 2` a program of the grid is the work of one warpgroup in each of two thread blocks. They divide the
rows of all its products. So each loads its own rows of left sides. Right sides are the same for both: one thread block
asks for them, and the Tensor Memory Accelerator copies them into the shared memory of both (multicast; PTX ISA,
"cp.async.bulk.tensor"). So fewer bytes pass the second-level cache.

Gluon's tiles are tiles of the whole program, and their layouts say which thread block has which rows. A layout without
rows is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilekern import source
from tilekern.errors import TargetError
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Transpose
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.gluon.rotation import loaded
from tilekern.lower.triton.plan.tma import TmaCopy

LARGEST = 2
"""Thread blocks of a cluster, at most."""

ROWS = 64
"""Rows of a `wgmma`, and so of a warpgroup (PTX ISA, "Matrix shape")."""

_FIX = "leave num_ctas out, or say num_ctas = 1"


def cluster_of(func: Func, blocks: int) -> int:
    """The number of thread blocks that compute a program of a Func together: `blocks`, as the hints ask for, or 1.

    Programs stay on one thread block if their products do not have the rows for two, as when a call gives other block
    sizes than the schedule.

    Raises:
      TargetError: this emitter has no clusters of that size, or the installed Triton cannot compile them.
    """
    rows = [op.result.tile.shape[-2] for op in func.walk() if isinstance(op, Dot)]
    with source.at(func.loc):
        if blocks not in (1, LARGEST):
            raise TargetError(
                f"{func.name} cannot run on clusters of this size",
                expected=f"num_ctas = 1 or {LARGEST}",
                got=f"num_ctas = {blocks}",
                fix=_FIX,
            )
        if any(n % (ROWS * blocks) for n in rows):
            return 1
        if blocks > 1 and not toolchain.has_clusters():
            raise TargetError(
                f"{func.name} cannot run on clusters: the installed Triton has no multicast for Gluon",
                expected="triton >= {}.{}".format(*toolchain.CLUSTERS),
                got=f"num_ctas = {blocks}",
                fix=f"pip install --upgrade triton, or {_FIX}",
            )
    return blocks


def divided(func: Func, copies: Mapping[Op, TmaCopy], blocks: int) -> dict[Op, TmaCopy]:
    """The copies, with the dims along which the thread blocks of a cluster divide their boxes.

    Args:
      func: a legal Func.
      copies: its copies by TMA.
      blocks: thread blocks of a cluster.

    Raises:
      TargetError: the program needs rows that only the other thread block has.
    """
    if blocks == 1:
        return dict(copies)
    ops = list(func.walk())
    shapes = {op.result.tile.shape for op in ops if isinstance(op, Dot)}
    for op in ops:
        if isinstance(op, Reduce) and op.operands[0].tile.shape in shapes and 0 in op.dims:
            with source.at(op.loc):
                raise _refusal("a reduction over the rows of a product", "reductions of single rows", f"{op.name}")
    dims: dict[Op, int | None] = {}
    for dot in (op for op in ops if isinstance(op, Dot)):
        for side, value in enumerate(dot.operands):
            load = loaded(value, ops)
            if load is None or load not in copies:
                continue
            dim = _dim_of_rows(load, value, ops) if side == 0 else None
            if dims.setdefault(load, dim) != dim:
                with source.at(dot.loc):
                    raise _refusal("a tile that is a left side and a right side", "tiles for one side", load.ref.name)
    dims.update((op, 0) for op in copies if isinstance(op, Store))
    return {op: _divided(copy, dims.get(op), _rank(op)) for op, copy in copies.items()}


def is_whole(copy: TmaCopy, blocks: int) -> bool:
    """True if one copy brings the whole box to both thread blocks of a cluster."""
    return blocks > 1 and copy.descriptor.divided is None


def _divided(copy: TmaCopy, dim: int | None, rank: int) -> TmaCopy:
    """A copy whose box is divided along a dim of its tile, which has the last dims of the box."""
    if dim is None:
        return copy
    return replace(copy, descriptor=replace(copy.descriptor, divided=len(copy.descriptor.block) - rank + dim))


def _rank(op: Op) -> int:
    assert isinstance(op, (Load, Store))
    return len((op.result if isinstance(op, Load) else op.value).tile.shape)


def _dim_of_rows(load: Load, value: Value, ops: Sequence[Op]) -> int:
    """The dim of a loaded tile that holds the rows of a value, which is the tile or its transpose."""
    dim = 0
    while value is not load.result:
        op = next(o for o in ops if value in o.results)
        assert isinstance(op, Transpose)
        dim, value = op.permutation[dim], op.operands[0]
    return dim


def _refusal(summary: str, expected: str, got: str) -> TargetError:
    return TargetError(
        f"the Gluon emitter does not take it on clusters: {summary}", expected=expected, got=got, fix=_FIX
    )
