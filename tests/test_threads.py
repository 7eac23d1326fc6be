"""Many threads and many processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lang.checks import numbers
from tilekern.errors import OutputError
from tilekern.kernels.matmul import matmul

THREADS = 8
ROOT = Path(__file__).parent.parent


def at_once(work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, ... in threads that start together; switch between them often."""
    start, interval = threading.Barrier(THREADS), sys.getswitchinterval()

    def run(number: int) -> None:
        start.wait()
        work(number)

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for future in [pool.submit(run, number) for number in range(THREADS)]:
                future.result()
    finally:
        sys.setswitchinterval(interval)


def make() -> tk.Kernel:
    """Make an untraced kernel with a loop, a branch, a view, a helper that JAX caches, and a captured array."""
    table = np.arange(3000, dtype=np.float32)

    @tk.kernel(out_type=lambda x, **_: (x, tk.Sum(jax.ShapeDtypeStruct((), x.dtype))))
    def f(x, out, total, *, shift: int = 0, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        column = x.at[:, 0]
        sums = tk.fold(tk.serial(x.shape[1]), lambda k, acc: acc + x[i, k], jnp.zeros(block, x.dtype))
        out[i] = x[i] + helper(sums)[:, None] + jnp.asarray(table)[shift].astype(x.dtype)

        @tk.when(i.index == 0)
        def _():
            total.at[()].add(column[...].sum())

    return f


@jax.jit
def helper(sums: jax.Array) -> jax.Array:
    return sums * 2


def check(f: tk.Kernel, rows: int, columns: int, **options: Any) -> None:
    x = numbers(rows, columns)
    out, total = f(x, **options)
    assert_same(np.asarray(out), x + 2 * x.sum(axis=1, keepdims=True) + np.float32(options.get("shift", 0)))
    assert float(total) == x[:, 0].sum()


@pytest.mark.parametrize("different", [False, True], ids=["same shapes", "different shapes"])
def test_threads_trace_and_call_one_kernel(different: bool) -> None:
    f = make()

    def work(number: int) -> None:
        for turn in range(3):
            check(f, 5 + different * number, 3 + turn, shift=turn, block=2 + different * number % 3)

    at_once(work)


def test_threads_with_settings_transformations_and_errors_of_their_own() -> None:
    f = make()

    @tk.kernel(out_type=lambda x: x)
    def broken(x, out):
        i = tk.parallel(x.shape[0])
        out[i] = x[i].astype(jnp.int8)

    def wide(number: int) -> None:
        with jax.enable_x64(True):
            out, _ = f(np.ones((number + 3, 2)))
            assert out.dtype == np.float64 and (np.asarray(out) == 5).all()

    def fails(number: int) -> None:
        for _ in range(4):
            with pytest.raises(OutputError, match="a i8 tile is stored to a f32 output"):
                broken.trace(np.ones(number + 3, np.float32))

    def mapped(number: int) -> None:
        x = np.stack([numbers(4, 2), numbers(4, 2, start=number)])
        out, _ = jax.jit(jax.vmap(f))(x)
        assert_same(np.asarray(out), x + 2 * x.sum(axis=2, keepdims=True))

    def interprets(number: int) -> None:
        x = numbers(6, 2 + number)
        out, _ = tk.interpret(f.trace(x))(x)
        assert_same(out, x + 2 * x.sum(axis=1, keepdims=True))

    at_once(lambda number: (wide, fails, mapped, interprets)[number % 4](number // 4))


def test_threads_share_a_library_kernel() -> None:
    def work(number: int) -> None:
        for k in (8, 33):
            x, w = numbers(7, k) % 5, numbers(k, 9) % 7
            assert_same(np.asarray(jax.jit(matmul)(x, w)), x @ w)
            assert_same(np.asarray(matmul(x, w, block_m=2 + number % 2)), x @ w)

    at_once(work)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul
x = np.arange(600, dtype=np.float32).reshape(20, 30) % 7
assert (np.asarray(jax.jit(matmul)(x, x.T)) == x @ x.T).all()
batched = np.asarray(jax.jit(jax.vmap(matmul, (0, None)))(np.stack([x, 2 * x]), x.T))
assert (batched == np.stack([x @ x.T, 2 * x @ x.T])).all()
q = jnp.ones((1, 9, 2, 4))
assert jnp.allclose(flash_attention(q, q, q, causal=True), q)
print("right")
"""


def test_processes_share_the_compilation_cache(tmp_path: Path) -> None:
    """Two processes start with an empty cache. A third one compiles nothing: programs are equal in all processes."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }

    def start(seed: int) -> subprocess.Popen[str]:
        environment = {**os.environ, **settings, "PYTHONHASHSEED": str(seed)}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes)

    def entries() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}

    def finish(*processes: subprocess.Popen[str]) -> set[str]:
        for process in processes:
            out, errors = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "right\n"), errors
            assert "cache" not in errors, errors
        return entries()

    first = finish(start(0), start(1))
    assert finish(start(2)) == first
    assert any("matmul" in name for name in first)
