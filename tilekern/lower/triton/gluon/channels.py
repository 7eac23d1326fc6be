"""Channels: the loads that share a ring of places in shared memory, the products that read it, and casts on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tilekern import source
from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.shape import Transpose
from tilekern.ir.types import DType
from tilekern.lower.triton.gluon.groups import Group, folds_of
from tilekern.lower.triton.gluon.refusals import refusal
from tilekern.lower.triton.gluon.rotation import loaded
from tilekern.lower.triton.plan.tma import TmaCopy


@record(eq=False)
class Channel:
    """The tiles that one product reads, on their way through shared memory.

    Attributes:
      name: for variables.
      loads: the loads that fill a place.
      fold: the loop around the loads; None outside of loops.
      readers: the products that read the tiles.
      shared: True if the programs of a group have barriers in common, because they share a tile.
      stages: places of the ring.
    """

    name: str
    loads: tuple[Load, ...]
    fold: Fold | None
    readers: frozenset[Dot]
    shared: bool
    stages: int = 1


@record
class Widened:
    """Places of a program's own for a tile of 8 bits that is cast before its product.

    Attributes:
      dtype: the dtype there.
      places: 2 where a product stays in flight while the next tile is cast, else 1.
    """

    dtype: DType
    places: int


def is_own(op: Load, varying: frozenset[Value]) -> bool:
    """True if each program of a group loads another tile."""
    return not varying.isdisjoint(op.operands)


def tile_bytes(value: Value) -> int:
    """The size of a tile in bytes."""
    return value.tile.size * value.tile.dtype.itemsize


def visible(func: Func, fold: Fold | None) -> list[Op]:
    """The ops whose results a loop's body may use: ops of the blocks around the loop, and of the body itself."""
    around = [op for op in folds_of(func.body) if fold is not None and fold in op.walk()]
    return [*func.body.ops, *(inner for op in around for inner in op.body.ops)]


def channels_of(func: Func, group: Group, copies: Mapping[Op, TmaCopy], cluster: int) -> dict[Load, Channel]:
    """The channel of each load that feeds a product; loads in one block for the same products share a channel."""
    readers: dict[Load, list[Dot]] = {}
    blocks: list[tuple[Fold | None, Block]] = [(None, func.body)]
    blocks += [(op, op.body) for op in folds_of(func.body)]
    ops = [op for _, block in blocks for op in block.ops]
    folds = {op: fold for fold, block in blocks for op in block.ops if isinstance(op, Load) and op in copies}
    for dot in (op for op in ops if isinstance(op, Dot)):
        for side, value in enumerate(dot.operands):
            load = loaded(value, ops)
            plain = load is not None and load.result.tile.dtype == value.tile.dtype
            if load is not None and load in folds and (plain or _cast_once(load, value, folds[load])):
                readers.setdefault(load, []).append(dot)
            elif side or load is not None or not _is_computed(value, ops):
                with source.at(dot.loc):
                    raise refusal(
                        f"the {'right' if side else 'left'} side of a product is no tile that TMA copies",
                        "a load without a mask, of dims that are multiples of 16 bytes"
                        + (f", and without a cast where num_ctas = {cluster}" if cluster > 1 else ""),
                        str(value.tile),
                    )
    loads_by_readers: dict[tuple[Fold | None, frozenset[Dot]], list[Load]] = {}
    for load, dots in readers.items():
        loads_by_readers.setdefault((folds[load], frozenset(dots)), []).append(load)
    for load in folds:
        _check_users(load, ops)
    return {load: channel for channel in _named(loads_by_readers, group) for load in channel.loads}


def _check_users(load: Load, ops: Sequence[Op]) -> None:
    """Only products may use a tile that TMA copies: it never comes to registers."""
    values = {load.result}
    for op in ops:
        if isinstance(op, (Transpose, Convert)) and op.operands[0] in values:
            values.add(op.result)
        elif not isinstance(op, (Dot, Fold)) and not values.isdisjoint(op.uses()):
            with source.at(op.loc):
                raise refusal("a tile of a product that is used besides", "tiles that products alone read", op.name)


def _cast_once(load: Load, value: Value, fold: Fold | None) -> bool:
    """True if the loop that loads a tile casts it for its products, on the right side for one product alone."""
    if fold is None:
        return False
    dots = [op for op in fold.body.ops if isinstance(op, Dot) and loaded(op.operands[1], fold.body.ops) is load]
    return len(dots) == 1 or all(value is not dot.operands[1] for dot in dots)


def widened_tiles(channels: Mapping[Load, Channel]) -> dict[Load, Widened]:
    """For each tile that is cast for the right side of a product, its second places; left sides need none."""
    widened: dict[Load, Widened] = {}
    for load, channel in channels.items():
        ops = channel.fold.body.ops if channel.fold else ()
        for dot in (op for op in ops if op in channel.readers):
            right = dot.operands[1]
            if right.tile.dtype != load.result.tile.dtype and loaded(right, ops) is load:
                alone = sum(isinstance(op, Dot) for op in ops) == 1
                flows = alone and any(isinstance(op, Elementwise) and adds(op, dot) for op in ops)
                widened[load] = Widened(right.tile.dtype, 2 if flows else 1)
    return widened


def _is_computed(value: Value, ops: Sequence[Op]) -> bool:
    """True if the value depends on another product, so it has the layout of a product."""
    return any(isinstance(op, Dot) for op in backward_slice(ops, [value]))


def _named(
    loads_by_readers: Mapping[tuple[Fold | None, frozenset[Dot]], list[Load]], group: Group
) -> Iterator[Channel]:
    for (fold, dots), loads in loads_by_readers.items():
        shared = any(not is_own(op, group.varying) for op in loads)
        yield Channel("_".join(op.ref.name for op in loads), tuple(loads), fold, dots, shared)


def check_positions(func: Func, group: Group, channels: Mapping[Load, Channel]) -> None:
    """The warp that loads computes places by scalars, bounds of loops also by vectors, and no carries."""
    for load, channel in channels.items():
        ops = visible(func, channel.fold)
        bounds = channel.fold.operands[:2] if channel.fold else ()
        varies = not group.varying.isdisjoint(bounds)
        with source.at(load.loc):
            of_place = backward_slice(ops, load.positions)
            for op in backward_slice(ops, [*load.positions, *bounds]):
                tiles = [v for v in op.results if len(v.tile.shape) > (op not in of_place)]
                if isinstance(op, (Dot, Fold, Switch)) or tiles:
                    raise refusal(
                        "a load at a place that tiles decide",
                        "a place of scalars",
                        f"{op.name} of {op.results[0].tile}",
                    )
            if channel.fold and not set(channel.fold.body.args[1:]).isdisjoint(load.positions):
                raise refusal("a load at a place that a loop carries", "a place by the loop's index", load.ref.name)
            if varies and is_own(load, group.varying):
                raise refusal(
                    "tiles of one program's own in a loop whose bounds depend on the program",
                    "tiles that the programs of a thread block share",
                    load.ref.name,
                )


def adds(op: Elementwise, dot: Op) -> bool:
    """True if an op adds a product to a sum, which takes no registers of its own."""
    return isinstance(dot, Dot) and op.function == "add" and dot.result in op.operands
