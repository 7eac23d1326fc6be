"""Shared and global memory of the simulator, tiles in registers, and Gluon's functions of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ir.funcs import assert_same
from tilekern.errors import OutOfBoundsError, WriteConflictError
from tilekern.lower.triton.gluon.simulator import functions
from tilekern.lower.triton.gluon.simulator.arrays import Box, GlobalArray, Pointer, loaded, stored
from tilekern.lower.triton.gluon.simulator.functions import FUNCTIONS, LIBRARY
from tilekern.lower.triton.gluon.simulator.language import Language
from tilekern.lower.triton.gluon.simulator.machine import FaultError, Machine
from tilekern.lower.triton.gluon.simulator.shared import Ring
from tilekern.lower.triton.gluon.simulator.tiles import Started, Tile, elements, integer
from tilekern.lower.triton.program import Descriptor

F32 = np.dtype(np.float32)


def machine() -> Machine:
    return Machine(0, 1, 0, __file__)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_a_place_is_read_as_it_was_stored() -> None:
    ring = Ring(machine(), "tiles", F32, [2, 1, 2, 3])
    view = ring.index(Tile(np.int32(1))).reshape([2, 3])
    view.store(Tile(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert_same(view.permute((1, 0)).seen(view.place.data), np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert np.isnan(ring.places[0].data).all()


def test_places_and_types_are_checked() -> None:
    ring = Ring(machine(), "tiles", F32, [2, 4])
    with pytest.raises(FaultError, match="no such place"):
        ring.index(2)
    with pytest.raises(FaultError, match="another type"):
        ring.index(0).store(Tile(np.zeros(4, np.float64)))
    with pytest.raises(FaultError, match="before anything is written"):
        ring.places[0].reads({}, {})


def test_two_roles_that_nothing_orders_race() -> None:
    block = machine()
    view = Ring(block, "tiles", F32, [1, 4]).index(0)

    def role() -> None:
        view.store(Tile(np.zeros(4, np.float32)))

    with pytest.raises(FaultError, match="a race: place 0 of tiles is written"):
        block.run_roles([("one", role), ("other", role)])


@pytest.mark.parametrize("fence", [True, False])
def test_a_copy_needs_a_fence_behind_a_store(fence: bool) -> None:
    block = machine()
    language = Language(block)
    ring = language.modules["language"].allocate_shared_memory(F32, [1, 4], None)
    box = Box(GlobalArray("y", np.zeros(4, np.float32), True), Descriptor((4,), (1,), (4,)))

    def role() -> None:
        ring.index(0).store(Tile(np.ones(4, np.float32)))
        if fence:
            language.modules["fence_async_shared"]()
        language.modules["tma"].async_store(box, [0], ring.index(0))
        language.modules["tma"].store_wait(0)

    if fence:
        block.run_roles([("role", role)])
        assert (box.array.data == 1).all()
    else:
        with pytest.raises(FaultError, match="may not see the store"):
            block.run_roles([("role", role)])


# --- global memory --------------------------------------------------------------------------------------------------


def test_boxes_end_at_the_edge_of_the_array() -> None:
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    box = Box(GlobalArray("x", data, False), Descriptor((3, 4), (4, 1), (2, 4)))
    got = box.read(machine(), [2, -1])
    assert_same(got, np.array([[0, 8, 9, 10], [0, 0, 0, 0]], np.float32))


def test_stores_are_once_for_each_element_but_for_the_same_bits() -> None:
    array = GlobalArray("y", np.zeros(4, np.float32), True)
    block, other = machine(), Machine(1, 2, 0, __file__)
    array.store(block, np.array([1]), np.array([2.0], np.float32))
    array.store(block, np.array([1]), np.array([2.0], np.float32))
    for who, value in ((block, 3.0), (other, 2.0)):
        with pytest.raises(FaultError) as info:
            array.store(who, np.array([1]), np.array([value], np.float32))
        assert isinstance(info.value.error, WriteConflictError)
    with pytest.raises(Exception, match="3 elements of y are never stored"):
        array.check_written()


def test_pointers_reach_no_further_than_their_array() -> None:
    array = GlobalArray("x", np.arange(4, dtype=np.float32), False)
    pointer = Pointer(array) + Tile(np.arange(6))
    got = loaded(machine(), pointer, Tile(np.arange(6) < 4), 7.0)
    assert_same(got.data, np.array([0, 1, 2, 3, 7, 7], np.float32))
    with pytest.raises(FaultError) as info:
        loaded(machine(), pointer, None, None)
    assert isinstance(info.value.error, OutOfBoundsError)
    with pytest.raises(FaultError, match="a store to the input"):
        stored(machine(), Pointer(array) + 1, Tile(np.float32(1)), None)


# --- tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "n"), [(7, 3), (-7, 3), (7, -3), (-7, -3), (0, 5)])
def test_integers_divide_toward_zero(x: int, n: int) -> None:
    assert integer(Tile(np.int32(x)) // n) == int(x / n)
    assert integer(Tile(np.int32(x)) % n) == x - int(x / n) * n


def test_arithmetic_keeps_the_dtype_of_tiles() -> None:
    x = Tile(np.array([1.5, -2.0], np.float32))
    for got in (x * 0.1, 1.0 / x, x - x[None, :][0], functions.where(x > 0, x, float("-inf")), functions.maximum(x, 0)):
        assert got.dtype == F32
    assert (~(x > 0)).data.tolist() == [False, True]
    assert x.to(np.dtype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    assert x.to(np.dtype(np.int32), bitcast=True).data[0] == 0x3FC00000
    assert elements(3) == 3 and bool(Tile(np.bool_(True))) and list(range(Tile(np.int32(2)))) == [0, 1]


@pytest.mark.parametrize("name", ["exp2", "log2", "rsqrt", "abs"])
def test_functions_are_those_of_the_table(name: str) -> None:
    x = np.array([0.5, 2.0], np.float32)
    expected = {"exp2": np.exp2, "log2": np.log2, "rsqrt": lambda v: 1 / np.sqrt(v), "abs": np.abs}[name](x)
    np.testing.assert_array_max_ulp(FUNCTIONS[name](Tile(x)).data, expected.astype(np.float32), 1)
    assert LIBRARY["tanh"](Tile(x)).dtype == F32


def test_reductions() -> None:
    x = Tile(np.arange(8, dtype=np.float32).reshape(2, 4))
    assert functions.add_up(x, 1).data.tolist() == [6, 22]
    assert functions.largest(x, 0).data.tolist() == [4, 5, 6, 7] and functions.least(x, 1).data.tolist() == [0, 4]
    assert functions.reduce(x, 1, functions.maximum).data.tolist() == [3, 7]
    assert [integer(n) for n in functions.scalars(1, Tile(np.int32(3)))] == [1, 2]
    assert integer(functions.cdiv(functions.to_tensor(7), 3)) == 3
    assert functions.full((2,), 1.5, F32).data.tolist() == [1.5, 1.5] and not functions.zeros((2,), F32).data.any()
    assert functions.arange(0, 3).data.tolist() == [0, 1, 2] and functions.sqrt(Tile(np.float32(4))).data == 2


def test_a_product_is_no_tile_before_it_is_waited_for() -> None:
    started: Any = Started((2, 2))
    with pytest.raises((TypeError, AttributeError)):
        started + Tile(np.zeros((2, 2), np.float32))
