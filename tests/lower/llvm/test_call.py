"""Native code in programs of JAX, with tasks that are written by hand."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lower.llvm import tasks
from tests.lower.llvm.tasks import add_up, like, numbers, process, run, scale, through_scratch
from tilekern.lower.llvm.call import call
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import F32, Reg

pytest.importorskip("llvmlite", reason="needs llvmlite")


# --- a call ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_all_tasks_run(count: int) -> None:
    x = numbers(count)
    np.testing.assert_array_equal(jax.jit(lambda x: run(scale(count), x))(x), 2 * x)
    np.testing.assert_array_equal(run(scale(count), x), 2 * x)  # without jit


def test_no_task_runs() -> None:
    np.testing.assert_array_equal(call(add_up(0), [like(jnp.zeros(3))], {})[0], np.zeros(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn", "complex64"])
def test_results_that_start_as_zeros(dtype: str) -> None:
    made = add_up(7, zeroed=(0, 2))
    types = [like(jnp.zeros(5)), like(jnp.zeros(7)), jax.ShapeDtypeStruct((3, 100, 7), dtype)]
    function = jax.jit(lambda: call(made, types, {}))
    for _ in range(20):
        total, _, zeros = function()
        np.testing.assert_array_equal(total, [7, 0, 0, 0, 0])
        np.testing.assert_array_equal(np.asarray(zeros).view(np.uint8), 0)
        np.full(3 * 100 * 7, 255, np.uint8)  # dirty what the next call may get


def test_zeros_of_bits() -> None:
    made = add_up(0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="tilekern cannot run by_hand: a result that starts as zeros"):
        jax.block_until_ready(call(made, [jax.ShapeDtypeStruct((8,), "int4")], {}))


def test_many_buffers() -> None:
    def body(code: Code, buffer: Any, number: Reg, scratch: Reg) -> None:
        total = code.load(F32, buffer(0))
        for n in range(1, 200):
            total = code.binary("fadd", total, code.load(F32, buffer(n)))
        code.store(total, buffer(200))
        code.store(total, buffer(201))

    inputs = [jnp.float32(n) for n in range(200)]
    both = jax.jit(lambda *x: call(tasks.program(body), [like(x[0])] * 2, {}, *x))(*inputs)
    assert [float(x) for x in both] == [199 * 100] * 2


@pytest.mark.parametrize("donate", [False, True])
def test_a_result_replaces_an_input(donate: bool) -> None:
    def body(code: Code, buffer: Any, number: Reg, scratch: Reg) -> None:
        with code.when(code.compare("icmp ne", *(code.cast("ptrtoint", buffer(n), "i64") for n in (1, 2)))):
            code.store(Reg("0.0", F32), buffer(0))  # a trap: not the same memory
        place = code.gep(buffer(1), number, "float")
        code.store(code.binary("fadd", code.load(F32, place), 1.0), place)

    made = tasks.program(body, tasks=4)
    function = jax.jit(lambda x, y: call(made, [like(y)], {1: 0}, x, y)[0], donate_argnums=[1] if donate else [])
    x, y = jnp.ones(1), jnp.arange(4.0)
    np.testing.assert_array_equal(function(x, y), [1, 2, 3, 4])
    assert float(x[0]) == 1
    assert y.is_deleted() == donate
    if not donate:
        np.testing.assert_array_equal(y, [0, 1, 2, 3])


@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("scratch", [4, 100, 16 << 10, (16 << 10) + 4, 3 << 20])
def test_every_thread_has_its_own_scratch(count: int, scratch: int) -> None:
    function, x = jax.jit(lambda x: run(through_scratch(count, scratch), x)), numbers(count, 1)
    for _ in range(10):
        np.testing.assert_array_equal(function(x), x)


@pytest.mark.parametrize("count", [1, 100])
def test_subnormals(count: int) -> None:
    """XLA flushes them, before and after the call, on every thread."""
    x = jnp.full(64 * count, 3e-39, jnp.float32)

    @jax.jit
    def function(x: jax.Array) -> Any:
        y = run(scale(count, 0.5), x)
        return y, y * jnp.float32(0.5), lax.map(lambda row: row * 0.5, y.reshape(count, 64)), x * jnp.float32(0.5)

    for _ in range(20):
        inside, *outside = map(np.asarray, function(x))
        np.testing.assert_array_equal(inside, np.float32(1.5e-39))
        for flushed in outside:
            np.testing.assert_array_equal(flushed, 0)


# --- around the call -------------------------------------------------------------------------------------------------


def test_inside_loops() -> None:
    one = scale(8, 1.5)

    def scanned(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (run(one, c) - c, None), x, None, length=40)[0]

    def counted(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 40, lambda i, c: run(one, c) - c, x)

    for function in (scanned, counted):
        np.testing.assert_array_equal(jax.jit(function)(numbers(8)), numbers(8) * np.float32(2.0**-40))


def test_inside_vmap() -> None:
    x = jnp.stack([numbers(3), -numbers(3)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: run(scale(3), x)))(x), 2 * x)


def _many(x: jax.Array) -> jax.Array:
    """Calls that XLA may run at the same time."""
    return sum(run(scale(16, float(2 + n % 5)), x + n) for n in range(24))  # pyright: ignore[reportReturnType]


def test_several_calls_and_threads_at_once() -> None:
    x, function = numbers(16), jax.jit(_many)
    expected = sum((2 + n % 5) * (np.asarray(x) + n) for n in range(24))

    def repeat(_: int) -> None:
        for _ in range(30):
            np.testing.assert_array_equal(function(x), expected)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(repeat, range(6)))


def test_more_threads_than_cores() -> None:
    """XLA's pool has 8 threads, all of them busy with calls that want its help."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from tests.lower.llvm.test_call import _many
x, function = numbers(16), jax.jit(_many)
function(x).block_until_ready()
def repeat(_):
    for _ in range(60): result = function(x)
    return np.asarray(result)
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(repeat, range(8)))
expected = sum((2 + n % 5) * (np.asarray(x) + n) for n in range(24))
assert all(np.array_equal(r, expected) for r in results)
print("done")
"""
    assert process(code, NPROC="8", PJRT_NPROC="8") == "done\n"


def test_inside_shard_map() -> None:
    code = """
from jax.sharding import AxisType, PartitionSpec
mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
spec = PartitionSpec("i")
one = scale(4)
function = jax.jit(jax.shard_map(lambda x: run(one, x), mesh=mesh, in_specs=spec, out_specs=spec))
for _ in range(50):
    np.testing.assert_array_equal(function(numbers(8)), 2 * numbers(8))
print(len(jax.devices()))
"""
    assert process(code, XLA_FLAGS="--xla_force_host_platform_device_count=8") == "8\n"


def test_jax_keeps_compiled_programs(tmp_path: Path) -> None:
    """A second process finds in the cache of JAX what the first has left, and it calls the code of the second."""
    code = """
events = []
jax.monitoring.register_event_listener(lambda event, **more: events.append(event))
for name, value in [("min_compile_time_secs", 0), ("min_entry_size_bytes", 0)]:
    jax.config.update(f"jax_persistent_cache_{name}", value)
np.testing.assert_array_equal(jax.jit(lambda x: run(scale(8, FACTOR), x))(numbers(8)), FACTOR * numbers(8))
found, missed = (events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses"))
print("all" if found and not missed else "some" if found else "none")
"""
    folder = str(tmp_path)
    assert process(code.replace("FACTOR", "2.0"), JAX_COMPILATION_CACHE_DIR=folder) == "none\n"
    assert process(code.replace("FACTOR", "2.0"), JAX_COMPILATION_CACHE_DIR=folder) == "all\n"
    assert process(code.replace("FACTOR", "3.0"), JAX_COMPILATION_CACHE_DIR=folder) == "some\n"


def test_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the time of a call, for people to read."""
    x = numbers(1)
    functions = {"x * 2 by XLA": jax.jit(lambda x: x * 2)}
    functions |= {f"{n} tasks": jax.jit(lambda x, n=n: run(scale(n, rows=64 // n), x)) for n in (1, 4)}
    for name, function in functions.items():
        times: list[float] = []
        for _ in range(1000):
            start = time.perf_counter()
            jax.block_until_ready(function(x))
            times.append(time.perf_counter() - start)
        with capsys.disabled():
            sys.stdout.write(f"\n  dispatch of {name}: {sorted(times)[500] * 1e6:.1f} us")
