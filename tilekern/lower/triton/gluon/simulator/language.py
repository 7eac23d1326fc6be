"""Gluon's functions, as far as our programs call them, on a machine of this package.

Layouts are ignored: Gluon's compiler checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilekern.ir.elementwise import TABLE
from tilekern.ir.types import BF16, BOOL, F16, F32
from tilekern.lower.triton.emit.expressions import LIBDEVICE
from tilekern.lower.triton.gluon.simulator.arrays import Box, loaded, stored
from tilekern.lower.triton.gluon.simulator.machine import Barrier, Machine
from tilekern.lower.triton.gluon.simulator.shared import Ring, View
from tilekern.lower.triton.gluon.simulator.tiles import Started, Tile, elements, integer

_DTYPES = {"float32": F32, "float16": F16, "bfloat16": BF16, "int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
_DTYPES |= {"int1": BOOL, "int8": np.dtype(np.int8), "int16": np.dtype(np.int16), "float64": np.dtype(np.float64)}
_DTYPES |= {f"uint{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}

_BY_TABLE = ("exp", "exp2", "log", "log2", "sin", "cos", "rsqrt", "floor", "ceil", "erf", "abs")


class Language:
    """The modules that a program imports, for one thread block.

    Attributes:
      modules: by the names that the program imports them by.
      rings: all buffers of shared memory.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.rings: list[Ring] = []
        layouts = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout")
        gl = SimpleNamespace(
            constexpr=lambda value: value,
            program_id=lambda _: Tile(np.int32(machine.block)),
            num_programs=lambda _: Tile(np.int32(machine.blocks)),
            cdiv=lambda x, n: (x + (n - 1)) // n,
            static_range=range,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
            convert_layout=lambda x, _: x,
            set_auto_layout=lambda x, _: x,
            zeros=lambda shape, dtype, layout=None: Tile(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout=None: Tile(np.full(shape, elements(value), dtype)),
            arange=lambda start, stop, layout=None: Tile(np.arange(start, stop, dtype=np.int32)),
            to_tensor=lambda x: x if isinstance(x, Tile) else Tile(np.int32(x)),
            where=_where,
            sum=lambda x, axis: Tile(np.sum(x.data, axis, dtype=x.data.dtype)),
            max=lambda x, axis: Tile(np.max(x.data, axis)),
            min=lambda x, axis: Tile(np.min(x.data, axis)),
            reduce=_reduce,
            maximum=lambda x, y, propagate_nan=None: _pointwise(np.maximum, x, y),
            minimum=lambda x, y, propagate_nan=None: _pointwise(np.minimum, x, y),
            sqrt=lambda x: Tile(np.sqrt(x.data)),
            sqrt_rn=lambda x: Tile(np.sqrt(x.data)),
            load=lambda pointer, mask=None, other=None: loaded(machine, pointer, mask, other),
            store=lambda pointer, value, mask=None: stored(machine, pointer, value, mask),
            **{name: _meaning(name) for name in _BY_TABLE},
            **{name: lambda *_: None for name in layouts},
            **_DTYPES,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, nbytes: barrier.expect(integer(nbytes)),
            wait=lambda barrier, phase: barrier.wait(integer(phase)),
            arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if pred else None,
        )
        tma = SimpleNamespace(async_load=self._load, async_store=self._store, store_wait=self._store_wait)
        self.modules: Mapping[str, Any] = {
            "gluon": SimpleNamespace(jit=lambda function: function),
            "language": gl,
            "libdevice": SimpleNamespace(**{device: _meaning(name) for name, device in LIBDEVICE.items()}),
            "PropagateNan": SimpleNamespace(ALL=None),
            "fence_async_shared": self._fence,
            "mbarrier": mbarrier,
            "tma": tma,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait,
        }

    # --- shared memory and roles ---

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Ring:
        ring = Ring(self._machine, f"buffer {len(self.rings)}", dtype, shape)
        self.rings.append(ring)
        return ring

    def _specialize(
        self, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any
    ) -> None:
        def started(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
            numbers = (Tile(np.int32(a)) if isinstance(a, int) else a for a in arguments)
            return lambda: function(*numbers)

        self._machine.run_roles([(f"{f.__name__} {n}", started(f, a)) for n, (f, a) in enumerate(calls)])

    def _fence(self) -> None:
        """Make the role's stores to shared memory visible to copies."""
        for place in (place for ring in self.rings for place in ring.places):
            if place.unfenced is self._machine.role:
                place.unfenced = None

    # --- copies ---

    def _load(self, box: Box, corner: Sequence[Any], barrier: Barrier, view: View) -> None:
        machine, at, place = self._machine, [integer(x) for x in corner], view.place
        before = dict(machine.role.clock)

        def arrive(clock: dict[int, int]) -> None:
            place.write(box.read(machine, at).reshape(place.data.shape), clock, before)
            barrier.bring(place.data.nbytes, clock)

        # From now on others may find half a tile there.
        with np.errstate(all="ignore"):
            place.data[...] = np.full((), np.nan).astype(place.data.dtype)
        machine.start(arrive, object())
        machine.pause()

    def _store(self, box: Box, corner: Sequence[Any], view: View) -> None:
        machine, at, place = self._machine, [integer(x) for x in corner], view.place
        if place.unfenced is not None:
            machine.fail(
                "a copy from shared memory that may not see the store before it", expected="fence_async_shared()"
            )
        before = dict(machine.role.clock)

        def copy(clock: dict[int, int]) -> None:
            box.write(machine, at, place.reads(clock, before).reshape(box.form.block))

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
        started = Started(acc.shape if isinstance(acc, Started) else acc.data.shape)
        before = dict(role.clock)

        def multiply(clock: dict[int, int]) -> None:
            sides = [x.seen(x.place.reads(clock, before)) if isinstance(x, View) else x.data for x in (left, right)]
            total = acc.value if isinstance(acc, Started) else acc.data
            product = np.matmul(*(x.astype(F32) for x in sides))
            started.value = product + total if use_acc else product

        role.products.append(machine.start(multiply, ("products", role.number)))
        machine.pause()
        return started

    def _wait(self, count: int, deps: Sequence[Started]) -> Any:
        """Wait until `count` products are under way at most. A result of one that may be is not to be used yet."""
        role = self._machine.role
        done = role.products[: max(0, len(role.products) - count)]
        role.products = role.products[len(done) :]
        self._machine.join(done, "its products")
        found = [x if role.products and x.value.size == 0 else Tile(x.value) for x in map(_as_started, deps)]
        return found[0] if len(found) == 1 else tuple(found)


def _as_started(value: Any) -> Any:
    """A product, or a tile as one that is done."""
    if isinstance(value, Started):
        return value
    started = Started(value.data.shape)
    started.value = value.data
    return started


def _meaning(name: str) -> Callable[..., Tile]:
    """A row of the elementwise table as a function of tiles."""
    return lambda *operands: Tile(
        TABLE[name].meaning(*(np.asarray(elements(x), F32) if not isinstance(x, Tile) else x.data for x in operands))
    )


def _pointwise(function: Callable[..., Any], x: Any, y: Any) -> Any:
    if isinstance(x, Tile) or isinstance(y, Tile):
        return Tile(function(elements(x), elements(y)))
    return int(function(x, y)) if isinstance(x, int) else float(function(x, y))


def _where(condition: Any, x: Any, y: Any) -> Tile:
    dtype = next((v.data.dtype for v in (x, y) if isinstance(v, Tile)), np.dtype(np.float32))
    return Tile(np.where(elements(condition), np.asarray(elements(x), dtype), np.asarray(elements(y), dtype)))


def _reduce(x: Tile, axis: int, combine: Callable[[Any, Any], Any]) -> Tile:
    """A reduction by halves, in the order of a tree."""
    lines: list[Any] = [Tile(line) for line in np.moveaxis(x.data, axis, 0)]
    while len(lines) > 1:
        lines = [combine(*pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    return lines[0]


def scalars(*bounds: Any) -> Iterator[Tile]:
    """`range`, of scalars."""
    return (Tile(np.int32(n)) for n in range(*(integer(x) for x in bounds)))
