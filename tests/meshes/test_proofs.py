"""Kernels that a mesh may not divide as their accesses suggest: the results are those of one device, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tests.lang.checks import like_first
from tilekern.errors import GatherWarning
from tilekern.kernel.divided import gather_warnings
from tilekern.lower.target import resolve

MESHES = {
    (kind, devices): jax.make_mesh((devices,), ("d",), (getattr(AxisType, kind),), devices=jax.devices()[:devices])
    for kind in ("Auto", "Explicit")
    for devices in (2, 4, 8)
}
everywhere = pytest.mark.parametrize(("kind", "devices"), MESHES, ids=lambda x: str(x))
RANDOM = np.random.default_rng(0)


def on_mesh(function: Callable[..., Any], kind: str, devices: int, *arrays: Any) -> tuple[Any, list[str]]:
    """The results with all arrays divided along their first dim, and the warnings about gathers."""
    mesh = MESHES[kind, devices]
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in arrays]
        found = jax.tree.map(np.asarray, jax.jit(function)(*placed))
    return found, [str(w.message) for w in caught if issubclass(w.category, GatherWarning)]


def value_and_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, *others: Any) -> Any:
        out, pull = jax.vjp(lambda x: kernel(x, *others), x)
        return out, pull(jnp.cos(out))[0]

    return run


def expect(kernel: Callable[..., Any], kind: str, devices: int, *arrays: Any, gathers: bool) -> None:
    function = value_and_gradient(kernel)
    gather_warnings.clear()
    wanted = jax.tree.map(np.asarray, jax.jit(function)(*arrays))
    found, warned = on_mesh(function, kind, devices, *arrays)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert bool(warned) == gathers, warned


@everywhere
def test_lanes_that_know_their_place(kind: str, devices: int) -> None:
    @like_first
    def ramp(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = jnp.sin(x[i]) + jnp.arange(4, dtype=x.dtype)

    expect(ramp, kind, devices, RANDOM.standard_normal(24, np.float32), gathers=6 % devices != 0)
    expect(ramp, kind, devices, RANDOM.standard_normal(32, np.float32), gathers=False)


@everywhere
def test_signs_of_a_constant_tile(kind: str, devices: int) -> None:
    signs = np.array([1, -1, -1, 1], np.float32)

    @like_first
    def signed(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] * signs

    expect(signed, kind, devices, RANDOM.standard_normal(8 * 3, np.float32), gathers=6 % devices != 0)


@everywhere
def test_sums_with_a_number_behind_the_end(kind: str, devices: int) -> None:
    """Lanes outside of the array read 0, and add exp(0) = 1: on one device 8 of them, for 24 in tiles of 16."""

    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((), x.dtype)))
    def exponentials(x, out):
        i = tk.parallel(x.shape[0], 16)
        out.at[()].add(jnp.exp(x[i]).sum())

    expect(exponentials, kind, devices, RANDOM.standard_normal(24, np.float32), gathers=True)


@everywhere
def test_data_compared_with_a_size(kind: str, devices: int) -> None:
    @like_first
    def valid_ids(x, ids, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = jnp.where(ids[i] < x.shape[0], x[i], -1)

    ids = RANDOM.permutation(64)[:32].astype(np.int32)
    expect(valid_ids, kind, devices, RANDOM.standard_normal(32, np.float32), ids, gathers=True)


@everywhere
def test_the_end_of_a_loop_over_another_array(kind: str, devices: int) -> None:
    @like_first
    def begun(x, table, out):
        i = tk.parallel(x.shape[0], 2)
        rows = tk.serial(table.shape[0], 2, stop=x.shape[0])
        out[i] = x[i] * tk.fold(rows, lambda k, total: total + jnp.square(table[k]).sum(), jnp.zeros((), x.dtype))

    x, table = (RANDOM.standard_normal(n, np.float32) for n in (16, 32))
    expect(begun, kind, devices, x, table, gathers=True)


@everywhere
def test_a_size_that_the_body_computes_with(kind: str, devices: int) -> None:
    @like_first
    def mean(x, out):
        i = tk.parallel(x.shape[0], 2)
        out[i] = x[i] / x.shape[0]

    expect(mean, kind, devices, RANDOM.standard_normal(16, np.float32), gathers=True)


@everywhere
def test_tiles_and_devices_that_share_a_factor(kind: str, devices: int) -> None:
    """12 tiles on 8 devices: half of the axis could divide them, which JAX has no name for."""

    @like_first
    def row_softmax(x, out):
        i = tk.parallel(x.shape[0], 2)
        out[i] = jax.nn.softmax(x[i])

    expect(row_softmax, kind, devices, RANDOM.standard_normal(24, np.float32), gathers=devices == 8)


def test_a_part_has_blocks_that_are_proved() -> None:
    """The schedule of a GPU has other blocks for a part: there the blocks of the whole count, whose tiles are whole."""

    @like_first
    def tile_softmax(x, out, *, block: tk.Block = 2):
        i = tk.parallel(x.shape[0], block)
        out[i] = jax.nn.softmax(x[i])

    @tile_softmax.schedule("cuda")
    def _(x):
        return {"block": 8 if x.shape[0] == 64 else 3}

    part = tile_softmax.trace(jnp.zeros(64))._kernel.part({"i": 2})
    (axis,) = part.func(part.target).axes
    assert (axis.extent, axis.block) == (32, 2)
    (axis,) = part.func(resolve("cuda:sm_90")).axes
    assert (axis.extent, axis.block) == (32, 8)


def test_a_part_closes_over_the_arrays_of_the_whole() -> None:
    """With the blocks of a GPU the body takes another table for a part: there it has the blocks that are proved."""
    shared = jnp.ones((64, 64))  # too large for a constant of the body
    tables = {64: 3 * shared, 32: 5 * shared}

    @like_first
    def scaled(x, out, *, block: tk.Block = 2):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * jnp.asarray(tables[x.shape[0]] if block == 4 else shared)[0, 0]

    scaled.schedule("cuda")(lambda x: {"block": 4})
    part, cuda = scaled.trace(jnp.zeros(64))._kernel.part({"i": 2}), resolve("cuda:sm_90")
    assert part.func(cuda).axes[0].block == 2


def test_a_body_that_fails_on_parts_is_gathered() -> None:
    @like_first
    def strict(x, out):
        if x.shape[0] != 16:
            raise ValueError("16 elements, please")
        i = tk.parallel(x.shape[0], 4)
        out[i] = -x[i]

    for kind in ("Auto", "Explicit"):
        expect(strict, kind, 2, RANDOM.standard_normal(16, np.float32), gathers=True)
    reason = strict.sharding_rule(jnp.zeros(16)).reasons["i"]
    assert reason == "the kernel does not take parts of it (ValueError: 16 elements, please)"


@pytest.mark.parametrize(("kind", "result"), [("Auto", P("a", "b")), ("Explicit", P("a", None))], ids=str)
def test_what_is_proved_is_divided_beside_what_is_not(kind: str, result: P) -> None:
    """Halves of the columns would do, quarters do not: rows are divided, and columns gathered.

    On an automatic mesh XLA divides the result as the operand: each device keeps its quarter of the columns.
    """
    gather_warnings.clear()

    @like_first
    def partly(x, out):
        i, j = tk.parallel(x.shape[0], 2), tk.parallel(x.shape[1], 2)
        out[i, j] = jnp.exp(x[i, j]) if x.shape[1] > 3 else x[i, j]

    mesh = jax.make_mesh((2, 4), ("a", "b"), (getattr(AxisType, kind),) * 2)
    x = RANDOM.standard_normal((8, 12), np.float32)
    assert set(partly.sharding_rule(x).sizes) == {"axis0", "axis1"}
    with jax.set_mesh(mesh), pytest.warns(GatherWarning, match=r"operand 0 of partly.* is needed as P\('a', None\)"):
        out = jax.jit(partly)(jax.device_put(x, NamedSharding(mesh, P("a", "b"))))
    np.testing.assert_array_equal(out, partly(x))
    assert out.sharding.spec == result
