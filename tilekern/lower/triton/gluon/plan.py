"""The plan of a warp-specialised program: rings of tiles in shared memory, and the loops that multiply them.

One warp loads, by the Tensor Memory Accelerator (TMA); the warpgroups beside it compute, one program of the grid each
(`groups`). They meet in *channels*. A channel is a ring of places in shared memory for the tiles that one product of
matrices reads, with two barriers for each place: `filled`, at which the copies arrive, and `freed`, at which the
programs arrive that have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilekern import source
from tilekern.errors import ResourceError, TargetError
from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Broadcast, Iota, Transpose
from tilekern.ir.types import F32, DType, kind_of
from tilekern.lower.triton.calibration import MAX_RING_STAGES, OTHER_REGISTERS_OF_ROLES
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.gluon.clusters import ROWS, divided, is_whole
from tilekern.lower.triton.gluon.groups import Group, group_programs, multiplies
from tilekern.lower.triton.gluon.leading_rows import Bound, leading_rows
from tilekern.lower.triton.gluon.rotation import Rotation, loaded, rotations
from tilekern.lower.triton.plan.access_order import barriers
from tilekern.lower.triton.plan.tma import TmaCopy, plan_tma_copies

WARPS = 4
"""Warps of a warpgroup."""

_COLUMNS = 256  # of the widest product

# Registers of a thread: of all threads when a program starts, of threads that compute, and of threads that load. A
# multiprocessor has 65,536, and a warpgroup gets them in units of 8 for each of its threads (PTX ISA, `setmaxnreg`).
REGISTERS = {1: (248, 248, 40), 2: (168, 240, 24), 3: (128, 160, 32)}
"""For each number of warpgroups that compute."""

_BARRIER_BYTES = 1024  # for all barriers, and alignment

_OPS = (
    *(Bitcast, Broadcast, Constant, Convert, Dot, Elementwise, Fold, Iota, Load, Reduce, Select, Store, Switch),
    Transpose,
)


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True)
class Widened:
    """Places of a program's own for a tile of 8 bits that is cast before its product.

    Attributes:
      dtype: the dtype there.
      places: 2 where a product stays in flight while the next tile is cast, else 1.
    """

    dtype: DType
    places: int


@dataclass(frozen=True)
class Plan:
    """The plan of a legal Func.

    Attributes:
      group: the programs of a thread block.
      copies: the loads and stores that TMA does.
      trimmed: for each load by TMA whose mask keeps the first rows, the bounds of the rows.
      channels: the channel of each load by TMA.
      stages: places of the rings of loops.
      delayed: for each loop whose last product is computed an iteration later, the parts of its body.
      widened: for each load of a tile of 8 bits on the right side of a product, the second places of the tile.
      staging: for each store by TMA, the channel in whose place the tile waits; None for a place of its own.
      shared_bytes: shared memory of a thread block, by the sizes of tiles.
      cluster: thread blocks that compute a program together.
    """

    group: Group
    copies: Mapping[Op, TmaCopy]
    trimmed: Mapping[Load, tuple[Bound, ...]]
    channels: Mapping[Load, Channel]
    stages: int
    delayed: Mapping[Fold, Rotation]
    widened: Mapping[Load, Widened]
    staging: Mapping[Store, Channel | None]
    shared_bytes: int
    cluster: int

    def copied_bytes(self, op: Load | Store) -> int:
        """Bytes of a tile that are in the shared memory of one thread block."""
        return copied_bytes(op, self.copies, self.cluster)

    def is_whole(self, load: Load) -> bool:
        """True if all thread blocks of a cluster get the same tile, by one copy."""
        return is_whole(self.copies[load], self.cluster)

    def copies_to_all(self, channel: Channel) -> bool:
        """True if a tile of a channel is the same in all thread blocks of a cluster."""
        return any(map(self.is_whole, channel.loads))

    @property
    def takes_turns(self) -> bool:
        """True if the programs of a group take turns to multiply: one computes exponentials, say, beside the other."""
        return self.group.count == 2 and bool(self.delayed)

    def trims_together(self, channel: Channel) -> bool:
        """True if a tile of a channel that all programs of a group share is trimmed: one program does it for all."""
        shared = [op for op in channel.loads if not is_own(op, self.group.varying)]
        return self.group.count > 1 and not self.trimmed.keys().isdisjoint(shared)

    @property
    def unique(self) -> list[Channel]:
        """All channels, in the order of their loads."""
        return list(dict.fromkeys(self.channels.values()))


def is_own(op: Load, varying: frozenset[Value]) -> bool:
    """True if each program of a group loads another tile."""
    return not varying.isdisjoint(op.operands)


def tile_bytes(value: Value) -> int:
    """The size of a tile in bytes."""
    return value.tile.size * value.tile.dtype.itemsize


def copied_bytes(op: Load | Store, copies: Mapping[Op, TmaCopy], cluster: int) -> int:
    """Bytes of a copied tile in the shared memory of one thread block."""
    parts = 1 if copies[op].descriptor.divided is None else cluster
    return tile_bytes(op.result if isinstance(op, Load) else op.value) // parts


def plan_group(
    func: Func, chip: Chip, ranges: Mapping[Value, Interval], warps: int, stages: int | None, cluster: int = 1
) -> Plan:
    """Plan a legal Func.

    Args:
      func: the Func.
      chip: the GPU.
      ranges: intervals of its scalars.
      warps: warps that compute, four for each program.
      stages: places of the rings of loops; None for as many as fit.
      cluster: thread blocks that compute a program together.

    Raises:
      TargetError: it does something that this emitter does not, at the user's line.
      ResourceError: its tiles do not fit the shared memory or the registers.
    """
    check(func, chip, warps)
    # The zeros that trim a tile are stored by one thread block, for itself. So are tiles that are cast.
    alone = cluster == 1
    leading = leading_rows(func, ranges) if alone else {}
    trimmed = {op: bounds for op, bounds in leading.items() if op.result.tile.dtype.itemsize > 1}
    copies = divided(func, plan_tma_copies(func, chip, ranges, trimmed, casts=alone), cluster)
    group = group_programs(func, warps // WARPS, copies, chip.cores // cluster)
    channels = _channels(func, group, copies, cluster)
    _check_positions(func, group, channels)
    _check_registers(func, group, cluster)
    delayed = {
        op: rotation
        for op in _folds(func.body)
        if multiplies(op.body) and (rotation := _delayed(op, group, channels, stages, cluster)) is not None
    }
    plan = _fitted(func, chip, group, copies, channels, delayed, stages, cluster)
    return replace(plan, trimmed={op: bounds for op, bounds in trimmed.items() if op in channels})


# --- refusals ---------------------------------------------------------------------------------------------------------


def check(func: Func, chip: Chip, warps: int) -> None:
    """Refuse a Func outside of the forms that this emitter takes."""
    with source.at(func.loc):
        if chip.matrix_unit != "wgmma":
            raise _refusal("warp specialisation is for Hopper", "target cuda:sm_90", f"target {chip.name}")
        if warps % WARPS or not 1 <= warps // WARPS <= max(REGISTERS):
            raise _refusal("a number of warps that is of no warpgroups", "num_warps = 4, 8 or 12", f"{warps}")
        if not any(isinstance(op, Dot) for op in func.walk()):
            raise _refusal("there is no product of matrices to run beside the loads", "a tk.dot in a loop", "none")
        written = [p for p in func.outputs if p.ref.role != "out"]
        if written:
            raise _refusal("an output that is updated", "outputs that are stored once", str(written[0].type))
        ordered = next(iter(barriers(func)), None)
        if ordered is not None:
            raise _refusal("an element that is stored twice", "stores to different elements", str(ordered.type))
    _check_block(func.body, depth=0)


def _check_block(block: Block, depth: int) -> None:
    for op in block.ops:
        with source.at(op.loc):
            if not isinstance(op, _OPS):
                raise _refusal(f"{op.name} is not taken", "elementwise functions, reductions, dots", op.name)
            if isinstance(op, Fold) and depth > 1 and any(isinstance(inner, Dot) for inner in op.walk()):
                raise _refusal("loops of products inside of two others", "one loop around them", "loops three deep")
            if isinstance(op, Fold) and multiplies(op.body) and any(multiplies(f.body) for f in _folds(op.body)):
                raise _refusal("products in a loop and in one inside of it", "products in the inner loop", "in both")
            if isinstance(op, Dot):
                _check_dot(op)
            if isinstance(op, Switch) and any(isinstance(inner, (Dot, Store)) for inner in op.walk()):
                raise _refusal("a product or a store in a branch", "one that always runs", "one in a branch")
        for region in op.regions:
            _check_block(region, depth + 1)


def _folds(block: Block) -> list[Fold]:
    """All loops of a block, inner loops included."""
    return [op for op in block.walk() if isinstance(op, Fold)]


def visible(func: Func, fold: Fold | None) -> list[Op]:
    """The ops whose results a loop's body may use: ops of the blocks around the loop, and of the body itself."""
    around = [op for op in _folds(func.body) if fold is not None and fold in op.walk()]
    return [*func.body.ops, *(inner for op in around for inner in op.body.ops)]


def _check_dot(op: Dot) -> None:
    """`wgmma` multiplies 64 rows by up to 256 columns, of 16-bit floats here; the right side in shared memory."""
    left = op.operands[0].tile
    whole = len(left.shape) == 2 and op.contract == ((1,), (0,)) and op.result.tile.dtype == F32
    rows, columns = op.result.tile.shape[-2:]
    if not whole or kind_of(left.dtype) != "float" or left.dtype.itemsize != 2:
        raise _refusal("a product of other matrices than of bfloat16 or float16", "dots of two matrices", f"{left}")
    if rows % ROWS or columns % 8 or columns > _COLUMNS or left.shape[1] % 16:
        raise _refusal(
            "a product of a size that `wgmma` does not have", "64 rows, up to 256 columns", f"{op.result.tile}"
        )


def _refusal(summary: str, expected: str, got: str) -> TargetError:
    return TargetError(
        f"the Gluon emitter does not take it: {summary}",
        expected=expected,
        got=got,
        fix='leave the emitter out, or say emitter="auto": then Triton compiles what this one does not take',
    )


def _delayed(
    op: Fold, group: Group, channels: Mapping[Load, Channel], stages: int | None, cluster: int
) -> Rotation | None:
    """The rotation of a loop that delays as many products as have operands that registers hold; None for no delay.

    A loop of two sums that masks its tiles keeps its order: with one product delayed, key gradients of heads of 64
    spill up to 1,024 bytes, and none in their own order (compiled on 2026-11-25).
    """
    if any(load.result.tile.dtype.itemsize == 1 and channel.fold is op for load, channel in channels.items()):
        return None  # a tile that is cast an iteration later is not built
    masks = any(isinstance(o, (Select, Switch)) and len(o.results[0].tile.shape) == 2 for o in op.body.ops)
    if masks and sum(len(v.tile.shape) == 2 for v in op.results) > 1:
        return None
    _, registers, _ = REGISTERS[group.count]
    for rotation in rotations(op):
        # With one place for each tile, the late product would keep the next tile from being loaded.
        waits = any(
            len({dot in rotation.late for dot in channel.readers}) == 2
            for channel in channels.values()
            if channel.fold is op
        )
        if _registers(op, rotation, cluster) <= registers and not (waits and stages == 1):
            return rotation
    return None


def _registers(op: Fold, rotation: Rotation | None, cluster: int) -> int:
    """Registers of a thread for a loop's sums, products and held operands."""
    sums = {dot for add in op.body.ops if isinstance(add, Elementwise) for dot in op.body.ops if _adds(add, dot)}
    products = [inner.result for inner in op.body.ops if isinstance(inner, Dot) and inner not in sums]
    nbytes = sum(v.tile.size * max(4, v.tile.dtype.itemsize) for v in (*op.results, *products))
    nbytes += sum(tile_bytes(v) for v in (rotation.held if rotation else ()) if len(v.tile.shape) == 2)
    return nbytes // (4 * 32 * WARPS * cluster) + OTHER_REGISTERS_OF_ROLES


def _check_registers(func: Func, group: Group, cluster: int) -> None:
    """Refuse loops whose sums and products do not fit the registers of a warpgroup."""
    _, registers, _ = REGISTERS[group.count]
    for op in _folds(func.body):
        if (needed := _registers(op, None, cluster)) > registers:
            with source.at(op.loc):
                raise ResourceError(
                    f"a loop of {func.name} needs more registers than a warpgroup has",
                    expected=f"at most {registers} registers of a thread, with {group.count} warpgroups that compute",
                    got=f"about {needed} for its sums and products",
                    fix="make the blocks smaller, 64 rows at least, or have fewer warpgroups: num_warps = 4 or 8",
                )


def _adds(op: Elementwise, dot: Op) -> bool:
    """True if an op adds a product to a sum, which takes no registers of its own."""
    return isinstance(dot, Dot) and op.function == "add" and dot.result in op.operands


# --- channels ---------------------------------------------------------------------------------------------------------


def _channels(func: Func, group: Group, copies: Mapping[Op, TmaCopy], cluster: int) -> dict[Load, Channel]:
    """The channel of each load that feeds a product; loads in one block for the same products share a channel."""
    readers: dict[Load, list[Dot]] = {}
    blocks: list[tuple[Fold | None, Block]] = [(None, func.body)]
    blocks += [(op, op.body) for op in _folds(func.body)]
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
                    raise _refusal(
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
                raise _refusal("a tile of a product that is used besides", "tiles that products alone read", op.name)


def _cast_once(load: Load, value: Value, fold: Fold | None) -> bool:
    """True if the loop that loads a tile casts it for its products, on the right side for one product alone."""
    if fold is None:
        return False
    dots = [op for op in fold.body.ops if isinstance(op, Dot) and loaded(op.operands[1], fold.body.ops) is load]
    return len(dots) == 1 or all(value is not dot.operands[1] for dot in dots)


def _widened(channels: Mapping[Load, Channel]) -> dict[Load, Widened]:
    """For each tile that is cast for the right side of a product, its second places; left sides need none."""
    widened: dict[Load, Widened] = {}
    for load, channel in channels.items():
        ops = channel.fold.body.ops if channel.fold else ()
        for dot in (op for op in ops if op in channel.readers):
            right = dot.operands[1]
            if right.tile.dtype != load.result.tile.dtype and loaded(right, ops) is load:
                alone = sum(isinstance(op, Dot) for op in ops) == 1
                flows = alone and any(isinstance(op, Elementwise) and _adds(op, dot) for op in ops)
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


def _check_positions(func: Func, group: Group, channels: Mapping[Load, Channel]) -> None:
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
                    raise _refusal(
                        "a load at a place that tiles decide",
                        "a place of scalars",
                        f"{op.name} of {op.results[0].tile}",
                    )
            if channel.fold and not set(channel.fold.body.args[1:]).isdisjoint(load.positions):
                raise _refusal("a load at a place that a loop carries", "a place by the loop's index", load.ref.name)
            if varies and is_own(load, group.varying):
                raise _refusal(
                    "tiles of one program's own in a loop whose bounds depend on the program",
                    "tiles that the programs of a thread block share",
                    load.ref.name,
                )


# --- shared memory ----------------------------------------------------------------------------------------------------


def _fitted(
    func: Func,
    chip: Chip,
    group: Group,
    copies: Mapping[Op, TmaCopy],
    channels: Mapping[Load, Channel],
    delayed: Mapping[Fold, Rotation],
    stages: int | None,
    cluster: int,
) -> Plan:
    """The plan with as many stages as fit, and with stores in places of their own if the places fit, too.

    `stages` is the number of places of each ring in a loop; None for the most that fit, up to MAX_RING_STAGES. The plan
    trims no load yet.

    Raises:
      ResourceError: the tiles do not fit with the fewest places: `stages`, else 1, or 2 if products are delayed.
    """
    unique = list(dict.fromkeys(channels.values()))
    stores = [op for op in copies if isinstance(op, Store)]
    sizes = {op: copied_bytes(op, copies, cluster) for op in (*stores, *channels)}
    own = sum(group.count * sizes[op] for op in stores)
    places = {c: sum(sizes[op] * (group.count if is_own(op, group.varying) else 1) for op in c.loads) for c in unique}
    once = sum(places[c] for c in unique if c.fold is None)
    widened = _widened(channels)
    once += sum(group.count * w.places * op.result.tile.size * w.dtype.itemsize for op, w in widened.items())
    per_stage = sum(places[c] for c in unique if c.fold is not None)
    limit = chip.shared_bytes - _BARRIER_BYTES
    reused: dict[Store, Channel | None] = {op: _place(op, unique, group, copies) for op in stores}
    saved = sum(group.count * sizes[op] for op, channel in reused.items() if channel)
    apart: dict[Store, Channel | None] = dict.fromkeys(stores)
    fewest = 2 if delayed and stages is None else 1
    for count in (stages,) if stages else range(MAX_RING_STAGES, fewest - 1, -1):
        for staging, less in ((apart, 0), (reused, saved)):
            total = once + per_stage * count + own - less
            # Two places are worth more than stores that wait for nothing.
            if total <= limit and (stages or count > 1 or staging is reused):
                staged = {c: replace(c, stages=count if c.fold else 1) for c in unique}
                by_load = {op: staged[c] for op, c in channels.items()}
                stored = {op: None if c is None else staged[c] for op, c in staging.items()}
                return Plan(group, copies, {}, by_load, count, delayed, widened, stored, total, cluster)
    with source.at(func.loc):
        raise ResourceError(
            f"the tiles of {func.name} do not fit the shared memory of {chip.name}",
            expected=f"at most {limit:,} bytes",
            got=f"{once + per_stage * (stages or 1) + own:,} with {stages or 1} places for each tile of a loop",
            fix="make the blocks smaller",
        )


def _place(op: Store, channels: Sequence[Channel], group: Group, copies: Mapping[Op, TmaCopy]) -> Channel | None:
    """A channel outside of loops whose only tile is like the stored tile, and each program's own; None without."""
    for channel in channels:
        (load, *other_loads) = channel.loads
        alike = load.result.tile == op.value.tile and prod(load.result.tile.shape) > 0
        alike = alike and copies[load].descriptor.divided == copies[op].descriptor.divided
        if channel.fold is None and not other_loads and alike and is_own(load, group.varying):
            return channel
    return None
