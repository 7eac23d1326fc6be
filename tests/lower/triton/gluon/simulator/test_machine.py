"""Roles, barriers, clocks and asynchronous operations of a simulated thread block."""

from __future__ import annotations

import pytest

from tilekern.lower.triton.gluon.simulator.machine import Barrier, Clock, FaultError, Machine, merge

SEEDS = range(8)


def machine(seed: int = 0) -> Machine:
    return Machine(0, 1, seed, __file__)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_orders_roles(seed: int) -> None:
    block, seen = machine(seed), list[str]()
    barrier = Barrier(block, "done")
    barrier.init(1)

    def first() -> None:
        block.pause()
        seen.append("first")
        barrier.arrive(1)

    def second() -> None:
        barrier.wait(0)
        seen.append("second")

    block.run_roles([("second", second), ("first", first)])
    assert seen == ["first", "second"] and barrier.phases == 1


def test_a_fresh_barrier_is_in_the_phase_behind_an_odd_one() -> None:
    block = machine()
    barrier = Barrier(block, "free")
    barrier.init(2)
    block.run_roles([("one", lambda: barrier.wait(1))])
    with pytest.raises(FaultError, match="wait for one another") as info:
        machine_ = machine()
        other = Barrier(machine_, "full")
        other.init(1)
        machine_.run_roles([("stuck", lambda: other.wait(0))])
    assert "stuck waits" in info.value.error.got and "full" in info.value.error.got


def test_clocks_go_from_who_arrives_to_who_waits() -> None:
    block, clocks = machine(), dict[str, Clock]()
    barrier = Barrier(block, "done")
    barrier.init(1)

    def first() -> None:
        clocks["arrived"] = dict(block.role.clock)
        barrier.arrive(1)

    def second() -> None:
        barrier.wait(0)
        clocks["waited"] = dict(block.role.clock)

    block.run_roles([("first", first), ("second", second)])
    assert all(clocks["waited"].get(key, 0) >= time for key, time in clocks["arrived"].items())
    merged = {1: 3}
    merge(merged, {1: 2, 4: 5})
    assert merged == {1: 3, 4: 5}


@pytest.mark.parametrize("seed", SEEDS)
def test_operations_of_one_queue_keep_their_order(seed: int) -> None:
    block, seen = machine(seed), list[int]()

    def role() -> None:
        events = [block.start(lambda _, n=n: seen.append(n), "queue") for n in range(3)]
        block.join(events, "all")

    block.run_roles([("role", role)])
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda barrier: barrier.arrive(2), "more arrivals"),
        (lambda barrier: barrier.bring(8, {}), "more bytes"),
        (lambda barrier: barrier.init(1), "initialised twice"),
        (lambda barrier: barrier.wait(2), "does not exist"),
    ],
)
def test_misuse_of_a_barrier_is_found(wrong, says: str) -> None:
    block = machine()
    barrier = Barrier(block, "done")
    barrier.init(1)
    with pytest.raises(FaultError, match=says):
        block.run_roles([("role", lambda: wrong(barrier))])


def test_bytes_end_a_phase_together_with_arrivals() -> None:
    block = machine()
    barrier = Barrier(block, "full")
    barrier.init(1)
    barrier.expect(16)
    assert barrier.phases == 0
    with pytest.raises(FaultError, match="16 bytes never come"):
        barrier.check_end()
    barrier.bring(16, {})
    assert barrier.phases == 1
    barrier.check_end()


def test_a_barrier_needs_a_count() -> None:
    with pytest.raises(FaultError, match="not initialised"):
        Barrier(machine(), "done").arrive(1)


def test_an_error_of_a_role_is_raised_and_the_others_end() -> None:
    block = machine()
    barrier = Barrier(block, "never")
    barrier.init(1)

    def fails() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        block.run_roles([("waits", lambda: barrier.wait(0)), ("fails", fails)])
