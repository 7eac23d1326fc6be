"""The static estimate of tiny programs, from libtpu's own dumps: what it must be is known beforehand."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
import pytest

from tilekern.estimate.tpu.bundles import DumpError
from tilekern.estimate.tpu.chips import CHIPS
from tilekern.estimate.tpu.estimate import CompileError, KernelEstimate, call, estimate
from tilekern.estimate.tpu.simulate import SimulationError

pytest.importorskip("libtpu", reason="needs libtpu")

HEAD = """
import jax, jax.numpy as jnp, numpy as np
import jax.experimental.pallas as pl
from jax.experimental.pallas import tpu as pltpu
array = jax.ShapeDtypeStruct
ROWS, COLUMNS = 256, 512
"""
BYTES = 256 * 512 * 4  # of a block


def copy(blocks: int) -> str:
    """Reads and writes each of its blocks once."""
    return f"""{HEAD}
def body(x, o):
    o[...] = x[...] + 1.0
spec = pl.BlockSpec((ROWS, COLUMNS), lambda i: (i, 0))
shape = array(({blocks} * ROWS, COLUMNS), "float32")
fn = pl.pallas_call(body, grid=({blocks},), in_specs=[spec], out_specs=spec, out_shape=shape)
args = [shape]
"""


def prefetched(trips: str, steps: int = 4) -> str:
    """Step i of the grid loops t[i] times; `t` comes by scalar prefetch."""
    return f"""{HEAD}
def body(t, x, o):
    o[...] = jax.lax.fori_loop(0, t[pl.program_id(0)], lambda j, c: c * 2.0, x[...])
spec = pl.BlockSpec((8, 128), lambda i, t: (i, 0))
shape = array(({steps} * 8, 128), "float32")
grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=({steps},), in_specs=[spec], out_specs=spec)
fn = pl.pallas_call(body, grid_spec=grid, out_shape=shape)
args = [{trips}, shape]
"""


def guarded(active: int) -> str:
    """Four of eight steps at most do something."""
    return f"""{HEAD}
def body(x, o):
    @pl.when(pl.program_id(0) < {active})
    def _():
        o[...] = jnp.exp(x[...])
spec = pl.BlockSpec((64, 128), lambda i: (i, 0))
shape = array((8 * 64, 128), "float32")
fn = pl.pallas_call(body, grid=(8,), in_specs=[spec], out_specs=spec, out_shape=shape)
args = [shape]
"""


DOT = f"""{HEAD}
def body(x, y, o):
    o[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
fn = pl.pallas_call(body, out_shape=array((512, 512), "float32"))
args = [array((512, 512), "bfloat16")] * 2
"""

PROGRAMS = {
    **{f"copy {n}": (copy(n), "v5e") for n in (4, 8, 12)},
    **{f"copy {chip}": (copy(4), chip) for chip in ("v5p", "7x")},
    **{f"trips {n}": (prefetched(f"np.full((4,), {n}, np.int32)"), "v5e") for n in (1, 2, 3)},
    "trips 0 1 2 1": (prefetched("np.array([0, 1, 2, 1], np.int32)"), "v5e"),
    **{f"guarded {n}": (guarded(n), "v6e") for n in (2, 3, 4)},
    **{f"dot {chip}": (DOT, chip) for chip in ("v5e", "v6e", "7x")},
}


@cache
def _estimate(name: str) -> list[KernelEstimate]:
    return estimate(*PROGRAMS[name])


def found(*names: str) -> list[list[KernelEstimate]]:
    """The estimates of some of `PROGRAMS`; two compilers run at once."""
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(_estimate, names)]


def kernels(*names: str) -> list[KernelEstimate]:
    """The Pallas kernel of each of some programs."""
    return [one for made in found(*names) for one in made if one.pallas]


@pytest.mark.slow
def test_bundles_grow_with_the_grid() -> None:
    four, eight, twelve = (made.bundles for made in kernels("copy 4", "copy 8", "copy 12"))
    assert 4 * 128 < four < eight and eight - four == twelve - eight


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["copy 4", "copy 8", "copy v5p", "copy 7x"])
def test_a_copy_reads_and_writes_its_bytes(name: str) -> None:
    blocks = 8 if "8" in name else 4
    (every,), (made,) = found(name), kernels(name)
    assert sum(k.read for k in every) == sum(k.written for k in every) == blocks * BYTES
    # Two windows of two buffers each; without an input window where XLA has put the input into VMEM.
    buffers = 4 if made.read else 2
    assert buffers * BYTES <= made.vmem < (buffers + 0.5) * BYTES


def test_a_copy_is_bound_by_the_memory() -> None:
    (made,) = kernels("copy 12")
    moved = 12 * 2 * BYTES / CHIPS["v5e"].bytes_per_cycle
    assert moved < made.cycles < moved + 2 * (CHIPS["v5e"].latency + made.bundles)


def test_bundles_grow_with_the_trips_of_a_loop() -> None:
    one, two, three = (made.bundles for made in kernels("trips 1", "trips 2", "trips 3"))
    assert two - one == three - two > 0
    assert (two - one) % 4 == 0  # each of four steps


def test_each_step_loops_as_its_own_word_says() -> None:
    """0 + 1 + 2 + 1 trips; skipping a loop may cost or save some bundles."""
    one, two, mixed = (made.bundles for made in kernels("trips 1", "trips 2", "trips 0 1 2 1"))
    assert mixed == pytest.approx(one, abs=two - one)


@pytest.mark.slow
def test_a_step_that_is_not_active_costs_less() -> None:
    two, three, four = kernels("guarded 2", "guarded 3", "guarded 4")
    assert three.bundles - two.bundles == four.bundles - three.bundles > 0
    assert four.use is not None and two.use is not None
    # 64×128 exponentials are 8 registers a step.
    assert four.use["eup"] * four.cycles == pytest.approx(2 * two.use["eup"] * two.cycles)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chip", ["v5e", "v6e", "7x"])
def test_a_dot_keeps_the_matrix_units_for_its_operations(chip: str) -> None:
    (made,), machine = kernels(f"dot {chip}"), CHIPS[chip]
    assert made.use is not None
    busy = 512**3 / (machine.mxus * machine.macs)
    assert made.use["mxu"] * made.cycles == pytest.approx(busy, rel=0.02)


def test_an_estimate_is_deterministic() -> None:
    assert [estimate(*PROGRAMS["trips 2"])] == found("trips 2")


def test_prefetched_words_that_are_not_given_are_asked_for() -> None:
    with pytest.raises(SimulationError, match="operand 0: pass its values, a NumPy array, among the arguments"):
        estimate(prefetched('array((4,), "int32")'), "v5e")


def test_a_program_that_does_not_compile_says_why() -> None:
    with pytest.raises(CompileError, match="NameError: name 'nothing' is not defined"):
        estimate("fn = nothing", "v5e")


@pytest.mark.slow
def test_a_loop_of_xla_counts_as_often_as_it_runs() -> None:
    shape = (1024, 1024), "float32"
    fifty, hundred = (estimate(call(f"{__name__}:repeated", [shape], times=n), "v5e") for n in (50, 100))
    kept = [one for one in fifty if one.name.endswith("×50")]
    assert kept and sum(one.bundles for one in hundred) - sum(one.bundles for one in fifty) == sum(
        one.bundles for one in kept
    )
    with pytest.raises(DumpError, match=r"XLA's own loop .* depends on data"):
        estimate(call(f"{__name__}:repeated", [shape, ((), "int32")]), "v5e")


def repeated(x: jax.Array, times: jax.Array | int) -> jax.Array:
    """A loop of XLA's, not of a kernel."""

    def step(_: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(y)

    return cast(jax.Array, jax.lax.fori_loop(0, times, step, x))
