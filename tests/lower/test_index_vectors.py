"""Index vectors with lanes from outside of an array, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests import seeds
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla.emit.emit_xla import run
from tilekern.testing.programs.index_vectors import Chain, chain

Outputs = Sequence[np.ndarray]
# XLA compiles in half of the time without LLVM's optimisations, which are not what is under test.
_FAST = {"xla_backend_optimization_level": 0}


def _together(programs: Sequence[Callable[..., Any]], chains: Sequence[Chain]) -> Sequence[Outputs]:
    """The outputs of programs that are compiled as one function."""

    def together(*arrays: Sequence[jax.Array]) -> Any:
        return tuple(tuple(program(*x)) for program, x in zip(programs, arrays, strict=True))

    arrays = [c.arrays for c in chains]
    return jax.device_get(jax.jit(together).lower(*arrays).compile(_FAST)(*arrays))


def by_xla(chains: Sequence[Chain]) -> Sequence[Outputs]:
    return _together([partial(run, c.func) for c in chains], chains)


def by_llvm(chains: Sequence[Chain]) -> Sequence[Outputs]:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    return _together([LlvmLowering(c.func, None).run for c in chains], chains)


def by_triton(chains: Sequence[Chain]) -> Sequence[Outputs]:
    pytest.importorskip("triton", reason="needs triton")
    return [triton_interpret(build(c.func, CHIPS["cuda:sm_90"], {}), c.arrays) for c in chains]


def by_mosaic(chains: Sequence[Chain]) -> Sequence[Outputs]:
    lowerings = [MosaicLowering(c.func, TARGETS["tpu:v5e"], run) for c in chains]
    return _together([partial(lowering.run, interpret=True) for lowering in lowerings], chains)


# --- kernels of their own --------------------------------------------------------------------------------------------

X = np.array([3, 1, 0, 5, 1, 1, 2, 0, 4, 5], np.int32)
Y = np.array([1, 0, 0, 2, 3, 3, 1], np.int32)
ROWS = np.arange(5 * 7, dtype=np.int32).reshape(5, 7) * 11 % 6
TABLE = np.arange(6 * 20, dtype=np.float32).reshape(6, 20)
FAR = np.array([2**31 - 1, 2**30, -(2**31), 5], np.int32)


def zeros(*shape: int, dtype: Any = np.int32) -> Callable[[Callable[..., None]], tk.Kernel]:
    return tk.kernel(out_type=lambda *_: tk.Zeros(jax.ShapeDtypeStruct(shape, dtype)))


def bins(numbers: Any, size: int = 6) -> np.ndarray:
    """Counts of the first numbers."""
    return np.bincount(np.asarray(numbers, np.int64), minlength=size).astype(np.int32)


def two_vectors() -> Chain:
    @zeros(6, 4)
    def kernel(x, y, out):
        i, j = tk.parallel(x.shape[0], 4), tk.parallel(y.shape[0], 4)
        out.at[x[i], y[j]].add(1)

    return Chain(kernel, (X, Y), (np.outer(bins(X), bins(Y, 4)),))


def rows_of_a_table() -> Chain:
    @zeros(6, 20, dtype=np.float32)
    def kernel(table, x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[x[i]].add(table[x[i]] + 1, ordered=False)

    return Chain(kernel, (TABLE, X), (bins(X)[:, None] * (TABLE + 1),))


def a_view_of_a_view() -> Chain:
    @tk.kernel(out_type=lambda table, x: jax.ShapeDtypeStruct((12, 2), np.float32))
    def kernel(table, x, out):
        i, j = tk.parallel(12, 4), tk.parallel(2)
        out[i, j] = table.at[tk.tile(6, 3, j), 5].load(0 * x[i] + 2, fill=-1)

    expected = np.full((12, 2), -1, np.float32)
    expected[: len(X)] = TABLE[[2, 5], 5]
    return Chain(kernel, (TABLE, X), (expected,))


def the_greatest_of_rows_in_tiles() -> Chain:
    @zeros(7)
    def kernel(rows, out):
        i = tk.parallel(rows.shape[0], 4)

        def step(k: tk.Tile, carry: Any) -> Any:
            best, at = carry
            tile = rows[i, k]
            greatest, place = tile.max(axis=1), tile.argmax(axis=1).astype(jnp.int32) + k.start
            return jnp.maximum(best, greatest), jnp.where(greatest > best, place, at)

        _, at = tk.fold(tk.serial(rows.shape[1], 4), step, (tk.full(i, -1, jnp.int32), tk.zeros(i, jnp.int32)))
        out.at[at].add(1)

    return Chain(kernel, (ROWS,), (bins(ROWS.argmax(axis=1), 7),))


def sorted_rows_and_dots() -> Chain:
    @zeros(8)
    def kernel(rows, out):
        i = tk.parallel(rows.shape[0], 4)
        out.at[jax.lax.top_k(rows[i, tk.tile(8, 8, 0)], 2)[1][:, 1]].add(1)
        one_hot = jax.nn.one_hot(rows[i, 0], 8, dtype=jnp.float32)
        out.at[(one_hot @ jnp.arange(8.0)[:, None])[:, 0].astype(jnp.int32)].add(1)

    second = np.argsort(-np.pad(ROWS, ((0, 0), (0, 1))), axis=1, kind="stable")[:, 1]
    return Chain(kernel, (ROWS,), (bins([*second, *ROWS[:, 0]], 8),))


def a_hoisted_vector() -> Chain:
    @zeros(6)
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[tk.hoist(lambda: x[i] // 2)].add(1)

    return Chain(kernel, (X,), (bins(X // 2),))


def unsigned_indices() -> Chain:
    @zeros(6)
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[x[i].astype(jnp.uint8)].add(1)
        out.at[x[i].astype(jnp.uint32)].add(1)

    return Chain(kernel, (X,), (2 * bins(X),))


def a_donated_array() -> Chain:
    @tk.kernel(out_type=lambda state, x: None, donate=("state",))
    def kernel(state, x, _):
        i = tk.parallel(x.shape[0], 4)
        state[12 * x[i] + i.indices] = i.indices + 1

    expected = np.zeros(80, np.int32)
    expected[12 * X + np.arange(len(X))] = np.arange(len(X)) + 1
    return Chain(kernel, (np.zeros(80, np.int32), X), (expected,))


def places_that_int32_does_not_hold() -> Chain:
    @zeros(6)
    def kernel(x, even, far, out):
        i = tk.parallel(4)
        out.at[x[tk.ds(far[i], 3)]].add(1)
        out.at[x[tk.tile(4, 1, far[i]) * 4]].add(1)
        out.at[x[tk.tile(3, 3, 0) + far[i] + far[i]]].add(1)
        out.at[even[tk.tile(3, 3, 0) + far[i] + far[i]].astype(jnp.int32)].add(1)

    even, found = X % 2 == 0, list[int]()
    for place in FAR.astype(np.int64):
        for start, size in ((place, 3), (4 * place, 4), (2 * place, 3)):
            found += [X[p] for p in range(start, start + size) if 0 <= p < len(X)]
        found += [int(even[p]) for p in range(2 * place, 2 * place + 3) if 0 <= p < len(X)]
    return Chain(kernel, (X, even, FAR), (bins(found),))


KERNELS = (
    two_vectors,
    rows_of_a_table,
    a_view_of_a_view,
    the_greatest_of_rows_in_tiles,
    sorted_rows_and_dots,
    a_hoisted_vector,
    unsigned_indices,
    a_donated_array,
    places_that_int32_does_not_hold,
)


def by_interpreter(chains: Sequence[Chain]) -> Sequence[Outputs]:
    return [jax.tree.leaves(tk.interpret(c.kernel.trace(*c.arrays))(*c.arrays)) for c in chains]


@pytest.mark.parametrize("backend", [by_interpreter, by_xla, by_llvm, by_triton, by_mosaic], ids=lambda b: b.__name__)
def test_kernels_with_tails(backend: Callable[[Sequence[Chain]], Sequence[Outputs]]) -> None:
    chains = [make() for make in KERNELS]
    for make, found, known in zip(KERNELS, backend(chains), chains, strict=True):
        for got, expected in zip(found, known.expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"{make.__name__}:\n{known.func}")


# --- random chains ---------------------------------------------------------------------------------------------------

# How many chains: as many as take some seconds.
BACKENDS = {by_xla: 12, by_llvm: 30, by_triton: 16, by_mosaic: 5}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
@pytest.mark.parametrize("round", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_what_comes_from_outside_addresses_nothing(
    backend: Callable[[Sequence[Chain]], Sequence[Outputs]], round: int
) -> None:
    numbers = seeds.of_chunk(round, BACKENDS[backend])
    chains = [chain(partial(Random(seed).randint, 0)) for seed in numbers]
    for seed, found, made in zip(numbers, backend(chains), chains, strict=True):
        for got, expected in zip(found, made.expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"seed {seed}:\n{made.func}")
