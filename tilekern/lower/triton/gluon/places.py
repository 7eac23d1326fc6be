"""Places in shared memory: as many stages of the rings as fit, and the places in which stored tiles wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tilekern import source
from tilekern.errors import ResourceError
from tilekern.ir.core import Func, Op
from tilekern.ir.memory import Load, Store
from tilekern.ir.records import record
from tilekern.lower.triton.calibration import MAX_RING_STAGES
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.gluon.channels import Channel, Widened, is_own, tile_bytes, widened_tiles
from tilekern.lower.triton.gluon.groups import Group
from tilekern.lower.triton.plan.tma import TmaCopy

_BARRIER_BYTES = 1024  # for all barriers, and alignment


def copied_bytes(op: Load | Store, copies: Mapping[Op, TmaCopy], cluster: int) -> int:
    """Bytes of a copied tile in the shared memory of one thread block."""
    parts = 1 if copies[op].descriptor.divided is None else cluster
    return tile_bytes(op.result if isinstance(op, Load) else op.value) // parts


@record
class Places:
    """The shared memory of a thread block, with the fields of a `Plan`."""

    channels: Mapping[Load, Channel]
    stages: int
    widened: Mapping[Load, Widened]
    staging: Mapping[Store, Channel | None]
    shared_bytes: int


def fitted_places(
    func: Func,
    chip: Chip,
    group: Group,
    copies: Mapping[Op, TmaCopy],
    channels: Mapping[Load, Channel],
    stages: int | None,
    cluster: int,
    *,
    delays: bool,
) -> Places:
    """Rings with as many stages as fit, and places of their own for stored tiles if they fit, too.

    `stages` is the number of places of each ring in a loop; None for the most that fit, up to MAX_RING_STAGES. With
    `delays` some product is computed an iteration later.

    Raises:
      ResourceError: the tiles do not fit with the fewest places: `stages`, else 1, or 2 if products are delayed.
    """
    unique = list(dict.fromkeys(channels.values()))
    stores = [op for op in copies if isinstance(op, Store)]
    sizes = {op: copied_bytes(op, copies, cluster) for op in (*stores, *channels)}
    own = sum(group.count * sizes[op] for op in stores)
    places = {c: sum(sizes[op] * (group.count if is_own(op, group.varying) else 1) for op in c.loads) for c in unique}
    once = sum(places[c] for c in unique if c.fold is None)
    widened = widened_tiles(channels)
    once += sum(group.count * w.places * op.result.tile.size * w.dtype.itemsize for op, w in widened.items())
    per_stage = sum(places[c] for c in unique if c.fold is not None)
    limit = chip.shared_bytes - _BARRIER_BYTES
    reused: dict[Store, Channel | None] = {op: _place(op, unique, group, copies) for op in stores}
    saved = sum(group.count * sizes[op] for op, channel in reused.items() if channel)
    apart: dict[Store, Channel | None] = dict.fromkeys(stores)
    fewest = 2 if delays and stages is None else 1
    for count in (stages,) if stages else range(MAX_RING_STAGES, fewest - 1, -1):
        for staging, less in ((apart, 0), (reused, saved)):
            total = once + per_stage * count + own - less
            # Two places are worth more than stores that wait for nothing.
            if total <= limit and (stages or count > 1 or staging is reused):
                staged = {c: replace(c, stages=count if c.fold else 1) for c in unique}
                by_load = {op: staged[c] for op, c in channels.items()}
                stored = {op: None if c is None else staged[c] for op, c in staging.items()}
                return Places(by_load, count, widened, stored, total)
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
