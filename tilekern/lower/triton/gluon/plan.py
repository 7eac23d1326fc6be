"""The plan of a warp-specialised program: rings of tiles in shared memory, and the loops that multiply them.

`plan_group` takes the decisions in their order. Each has a module, which says why:

| module | decides |
|---|---|
| `refusals` | if this emitter takes the Func at all |
| `leading_rows`, `clusters` | the masked loads that TMA copies, and the tiles that thread blocks of a cluster divide |
| `groups` | the programs of a thread block |
| `channels` | the loads that share a ring |
| `delays` | the products that are computed an iteration later |
| `places` | the stages of the rings, and the places of stored tiles |

One warp loads, by the Tensor Memory Accelerator (TMA); the warpgroups beside it compute, one program of the grid each
(`groups`). They meet in *channels*. A channel is a ring of places in shared memory for the tiles that one product of
matrices reads, with two barriers for each place: `filled`, at which the copies arrive, and `freed`, at which the
programs arrive that have read it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Load, Store
from tilekern.ir.records import record
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.gluon.channels import Channel, Widened, channels_of, check_positions, is_own
from tilekern.lower.triton.gluon.clusters import divided, is_whole
from tilekern.lower.triton.gluon.delays import check_registers, rotation_of
from tilekern.lower.triton.gluon.groups import WARPS, Group, folds_of, group_programs, multiplies
from tilekern.lower.triton.gluon.leading_rows import Bound, leading_rows
from tilekern.lower.triton.gluon.places import copied_bytes, fitted_places
from tilekern.lower.triton.gluon.refusals import check
from tilekern.lower.triton.gluon.rotation import Rotation
from tilekern.lower.triton.plan.tma import TmaCopy, plan_tma_copies


@record
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
    channels = channels_of(func, group, copies, cluster)
    check_positions(func, group, channels)
    check_registers(func, group, cluster)
    delayed = {
        op: rotation
        for op in folds_of(func.body)
        if multiplies(op.body) and (rotation := rotation_of(op, group, channels, stages, cluster)) is not None
    }
    places = fitted_places(func, chip, group, copies, channels, stages, cluster, delays=bool(delayed))
    return Plan(
        group=group,
        copies=copies,
        trimmed={op: bounds for op, bounds in trimmed.items() if op in channels},
        channels=places.channels,
        stages=places.stages,
        delayed=delayed,
        widened=places.widened,
        staging=places.staging,
        shared_bytes=places.shared_bytes,
        cluster=cluster,
    )
