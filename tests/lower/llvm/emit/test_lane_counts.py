"""Every number of elements from 1 to two blocks and one more: values, and stray stores.

Tiles have half of AVX2's vector of 32-bit lanes, one and two. Both dims of the array are ragged, so that masks
combine a bit for a row with bits for columns. Elements are 0, 1 and -1, so that sums and products are exact in any
order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.machines import here
from tests.lower.llvm.running import Canaries, run
from tilekern.ir.interpret import interpret
from tilekern.ir.types import DTYPES, DType, kind_of
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.target import TARGETS

pytest.importorskip("llvmlite", reason="needs llvmlite")

ROWS, BLOCK_ROWS = 6, 4
BLOCKS = (4, 8, 16)
CASES = [(block, count) for block in BLOCKS for count in range(1, 2 * block + 2)]
NUMBERS = {name: dtype for name, dtype in DTYPES.items() if dtype.itemsize and kind_of(dtype) in ("float", "signed")}


@tk.kernel(out_type=lambda x, order: (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 7)
def moves(x, order, copied, flipped, sorted_, taken, gathered, scattered, masked, *, block: tk.Block = 8):
    i, j = tk.parallel(x.shape[0], BLOCK_ROWS), tk.parallel(x.shape[1], block)
    t = x[i, j]
    copied[i, j] = t
    flipped[i, j] = t[::-1, ::-1]
    sorted_[i, j] = jnp.sort(t, 1)
    taken[i, j] = jnp.take_along_axis(t, jnp.argsort(t, 1), 1)
    gathered[i, j] = x[i, order[j]]
    scattered[i, order[j]] = t
    some = jnp.broadcast_to(jnp.arange(block) % 4 < 2, (BLOCK_ROWS, block)) & (t != 0)
    masked[i, j] = t
    masked.store((i, j), x.load((i, j), mask=some, fill=1), mask=~some)


@tk.kernel(out_type=lambda x, order: (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 5)
def sums(x, order, rows, columns, running, largest, products, *, block: tk.Block = 8):
    i, j = tk.parallel(x.shape[0], BLOCK_ROWS), tk.parallel(x.shape[1], block)
    t = x[i, j]
    rows[i, j] = t + t.sum(1, keepdims=True).astype(t.dtype)
    columns[i, j] = t + t.sum(0, keepdims=True).astype(t.dtype)
    running[i, j] = jnp.cumsum(t, 1).astype(t.dtype)
    largest[i, j] = t - t.max(1, keepdims=True)
    products[i, j] = t if t.dtype == jnp.int64 else tk.dot(tk.dot(t, t.T).astype(t.dtype), t).astype(t.dtype)


def agrees(kernel: tk.Kernel, dtype: DType, block: int, count: int) -> None:
    """The outputs for so many columns are those of the interpreter, bit for bit, and nothing around them is touched."""
    rng = np.random.default_rng(count)
    x = rng.integers(0 if kind_of(dtype) in ("bool", "unsigned") else -1, 2, (ROWS, count)).astype(dtype)
    order = rng.permutation(count).astype(np.int32)
    func = kernel.trace(x, order, block=block)._kernel.func(TARGETS["cpu:llvm"])
    wanted = interpret(func, x, order)
    for machine in (None, *here()):
        place = Canaries()
        found = run(LlvmLowering(func, machine), [x, order], place)
        for param, one, other in zip(func.outputs, found, wanted, strict=True):
            assert one.tobytes() == other.tobytes(), (param.name, machine)
        assert place.untouched(), machine


@pytest.mark.sweep(96)
@pytest.mark.parametrize(("block", "count"), CASES)
@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.itemsize])
def test_moves_of_every_number_of_elements(dtype: str, block: int, count: int) -> None:
    with jax.enable_x64(True):
        agrees(moves, DTYPES[dtype], block, count)


@pytest.mark.sweep(96)
@pytest.mark.parametrize(("block", "count"), CASES)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_sums_of_every_number_of_elements(dtype: str, block: int, count: int) -> None:
    with jax.enable_x64(True):
        agrees(sums, NUMBERS[dtype], block, count)
