"""Gluon's modules, as far as our programs import them, for one thread block or one cluster of thread blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilekern.ir.types import F32
from tilekern.lower.triton.gluon.simulator.arrays import Box, Pointer, loaded, stored
from tilekern.lower.triton.gluon.simulator.functions import FUNCTIONS, LIBRARY, itself, layout_of_shared
from tilekern.lower.triton.gluon.simulator.machine import Barrier, Clock, Machine
from tilekern.lower.triton.gluon.simulator.shared import Place, Ring, View
from tilekern.lower.triton.gluon.simulator.tiles import Started, Tile, integer


class Language:
    """The modules that a program imports.

    Attributes:
      modules: by the names that the program imports them by.
      rings: all buffers of shared memory.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.rings: list[Ring] = []
        self._met = machine.parts == 1
        of_block = {
            "program_id": self._program_id,
            "allocate_shared_memory": self._allocate,
            "warp_specialize": self._specialize,
            "load": self._read,
            "store": self._write,
        }
        barriers = {"expect": _expect, "wait": _wait, "arrive": _arrive, "MBarrierLayout": layout_of_shared}
        copies = {"async_load": self._load, "async_store": self._store, "store_wait": self._store_wait}
        self.modules: Mapping[str, Any] = {
            "gluon": SimpleNamespace(jit=itself),
            "language": SimpleNamespace(**FUNCTIONS, **of_block),
            "libdevice": SimpleNamespace(**LIBRARY),
            "PropagateNan": SimpleNamespace(ALL=None),
            "fence_async_shared": self._fence,
            "mbarrier": SimpleNamespace(init=self._init, **barriers),
            "cluster": SimpleNamespace(barrier=self._meet),
            "tma": SimpleNamespace(**copies),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait,
        }

    def _program_id(self, axis: int) -> Tile:
        return Tile(np.int32(self._machine.block if axis == 0 else 0))

    def _read(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Tile:
        return loaded(self._machine, pointer, mask, other)

    def _write(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        stored(self._machine, pointer, value, mask)

    # --- shared memory and roles ---

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Ring:
        del layout
        ring = Ring(self._machine, f"buffer {len(self.rings)}", dtype, shape)
        self.rings.append(ring)
        return ring

    def _specialize(
        self, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any
    ) -> None:
        def started(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
            numbers = [Tile(np.int32(a)) if isinstance(a, int) else a for a in arguments]
            return lambda: function(*numbers)

        del warps, registers
        self._machine.run_roles([(f"{f.__name__} {n}", started(f, a)) for n, (f, a) in enumerate(calls)])

    def _init(self, barrier: Barrier, count: int) -> None:
        for ring in self.rings:
            if barrier in ring.barriers:
                for twin in ring.twins(barrier):
                    twin.init(count)

    def _meet(self) -> None:
        """Let all threads of a cluster meet."""
        if not self._machine.is_main():
            self._machine.fail("a role meets all threads of the cluster", expected="cluster.barrier() outside of roles")
        self._met = True

    def check_end(self) -> None:
        """Nothing may be under way when the program ends, nor may one thread block end before the others."""
        for barrier in (barrier for ring in self.rings for barrier in ring.barriers):
            barrier.check_end()
        if not self._met:
            self._machine.fail("a thread block may end before others of its cluster", expected="cluster.barrier()")

    def _fence(self) -> None:
        """Make the role's stores to shared memory visible to copies."""
        for place in (place for ring in self.rings for place in ring.places):
            if place.unfenced is self._machine.role:
                place.unfenced = None

    # --- copies ---

    def _load(self, box: Box, corner: Sequence[Any], barrier: Barrier, view: View, multicast: bool = False) -> None:
        """Copy this thread block's part of a box; by `multicast`, the first thread block copies for all."""
        machine, part = self._machine, self._machine.role.part
        if multicast and part:
            return
        ring = next(ring for ring in self.rings if barrier in ring.barriers)
        for target in range(machine.parts) if multicast else [part]:
            self._copy(box, [integer(x) for x in corner], ring.twins(barrier)[target], view.twins[target], target)
        machine.pause()

    def _copy(self, box: Box, at: list[int], barrier: Barrier, place: Place, part: int) -> None:
        """Start the copy of a box to the shared memory of one thread block."""
        machine, foreign = self._machine, part != self._machine.role.part
        before = dict(machine.role.clock)
        with np.errstate(all="ignore"):
            nothing = np.full(place.data.shape, np.nan).astype(place.data.dtype)

        def arrive(clock: Clock) -> None:
            values, mine = nothing.reshape(box.form.block), machine.slice_of(box.form.divided, box.form.block, part)
            values[mine] = box.read(machine, at)[mine]
            place.write(nothing, clock, before)
            barrier.bring(values[mine].nbytes, clock, foreign)

        # From now on other roles may find half a tile there.
        place.data[...] = nothing
        machine.start(arrive, object())

    def _store(self, box: Box, corner: Sequence[Any], view: View) -> None:
        machine, at, place = self._machine, [integer(x) for x in corner], view.place
        if place.unfenced is not None:
            machine.fail(
                "a copy from shared memory that may not see the store before it", expected="fence_async_shared()"
            )
        before, part = dict(machine.role.clock), machine.role.part

        def copy(clock: Clock) -> None:
            box.write(machine, at, place.reads(clock, before).reshape(box.form.block), part)

        machine.role.stores.append(machine.start(copy, ("stores", machine.role.number)))
        machine.pause()

    def _store_wait(self, pendings: int) -> None:
        role = self._machine.role
        done, role.stores = role.stores[: len(role.stores) - pendings], role.stores[len(role.stores) - pendings :]
        self._machine.join(done, "its stores")

    # --- products ---

    def _multiply(self, left: Any, right: View, acc: Any, use_acc: bool = True, is_async: bool = False) -> Started:
        machine, role = self._machine, self._machine.role
        assert is_async
        for place in (x.place for x in (left, right) if isinstance(x, View)):
            if place.unfenced is not None:
                machine.fail("a product that may not see a store before it", expected="fence_async_shared()")
        started = Started(acc.shape if isinstance(acc, Started) else acc.data.shape)
        before = dict(role.clock)

        def multiply(clock: Clock) -> None:
            sides = [x.seen(x.place.reads(clock, before)) if isinstance(x, View) else x.data for x in (left, right)]
            total = acc.value if isinstance(acc, Started) else acc.data
            product = np.matmul(*(x.astype(F32) for x in sides))
            started.value = product + total if use_acc else product

        role.products.append(machine.start(multiply, ("products", role.number)))
        machine.pause()
        return started

    def _wait(self, count: int, deps: Sequence[Started]) -> Any:
        """Wait until at most `count` products are under way, whose results are not to be used yet."""
        role = self._machine.role
        done = role.products[: max(0, len(role.products) - count)]
        role.products = role.products[len(done) :]
        self._machine.join(done, "its products")
        results = [x if role.products and x.value.size == 0 else Tile(x.value) for x in map(_as_started, deps)]
        return results[0] if len(results) == 1 else tuple(results)


def _expect(barrier: Barrier, nbytes: Any) -> None:
    barrier.expect(integer(nbytes))


def _wait(barrier: Barrier, phase: Any) -> None:
    barrier.wait(integer(phase))


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)


def _as_started(value: Any) -> Any:
    """A product itself, or a tile as a product that is done."""
    if isinstance(value, Started):
        return value
    started = Started(value.data.shape)
    started.value = value.data
    return started
