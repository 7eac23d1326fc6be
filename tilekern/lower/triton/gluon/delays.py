"""Products that are computed an iteration later: they run beside the exponentials of the next tile, say."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern import source
from tilekern.errors import ResourceError
from tilekern.ir.compute import Dot, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.lower.triton.calibration import OTHER_REGISTERS_OF_ROLES
from tilekern.lower.triton.gluon.channels import Channel, adds, tile_bytes
from tilekern.lower.triton.gluon.groups import REGISTERS, WARPS, Group, folds_of
from tilekern.lower.triton.gluon.rotation import Rotation, rotations


def rotation_of(
    op: Fold, group: Group, channels: Mapping[Load, Channel], stages: int | None, cluster: int
) -> Rotation | None:
    """The rotation of a loop that delays as many products as have operands that registers hold; None for no delay."""
    if any(keeps_order(op, channels) for keeps_order in _KEEP_ORDER):
        return None
    _, registers, _ = REGISTERS[group.count]
    for rotation in rotations(op):
        # With one place for each tile, the late product would keep the next tile from being loaded.
        waits = any(
            len({dot in rotation.late for dot in channel.readers}) == 2
            for channel in channels.values()
            if channel.fold is op
        )
        if registers_of(op, rotation, cluster) <= registers and not (waits and stages == 1):
            return rotation
    return None


def _casts(op: Fold, channels: Mapping[Load, Channel]) -> bool:
    """True for a loop that casts tiles of 8 bits: a tile that is cast an iteration later is not built."""
    return any(load.result.tile.dtype.itemsize == 1 and channel.fold is op for load, channel in channels.items())


def _masks_for_two_sums(op: Fold, channels: Mapping[Load, Channel]) -> bool:
    """True for a loop of two sums that masks its tiles.

    With one product delayed, key gradients of heads of 64 spill up to 1,024 bytes, and none in their own order
    (compiled on 2026-11-25).
    """
    masks = any(isinstance(o, (Select, Switch)) and len(o.results[0].tile.shape) == 2 for o in op.body.ops)
    return masks and sum(len(v.tile.shape) == 2 for v in op.results) > 1


_KEEP_ORDER = (_casts, _masks_for_two_sums)
"""The loops that compute all products in their own order; the reason stands at each function."""


def registers_of(op: Fold, rotation: Rotation | None, cluster: int) -> int:
    """Registers of a thread for a loop's sums, products and held operands."""
    sums = {dot for add in op.body.ops if isinstance(add, Elementwise) for dot in op.body.ops if adds(add, dot)}
    products = [inner.result for inner in op.body.ops if isinstance(inner, Dot) and inner not in sums]
    nbytes = sum(v.tile.size * max(4, v.tile.dtype.itemsize) for v in (*op.results, *products))
    nbytes += sum(tile_bytes(v) for v in (rotation.held if rotation else ()) if len(v.tile.shape) == 2)
    return nbytes // (4 * 32 * WARPS * cluster) + OTHER_REGISTERS_OF_ROLES


def check_registers(func: Func, group: Group, cluster: int) -> None:
    """Refuse loops whose sums and products do not fit the registers of a warpgroup."""
    _, registers, _ = REGISTERS[group.count]
    for op in folds_of(func.body):
        if (needed := registers_of(op, None, cluster)) > registers:
            with source.at(op.loc):
                raise ResourceError(
                    f"a loop of {func.name} needs more registers than a warpgroup has",
                    expected=f"at most {registers} registers of a thread, with {group.count} warpgroups that compute",
                    got=f"about {needed} for its sums and products",
                    fix="make the blocks smaller, 64 rows at least, or have fewer warpgroups: num_warps = 4 or 8",
                )
