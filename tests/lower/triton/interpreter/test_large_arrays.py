"""Arrays of more than 2^31 elements: each access of the last programs finds its place, by pointer and by descriptor."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.interpreter.large_arrays import Job
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.lower.triton.interpret import _request
from tilekern.lower.triton.program import Program

pytest.importorskip("triton", reason="needs triton")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memory that is mapped lazily")

ROOT = Path(__file__).parents[4]
LIKE = jax.ShapeDtypeStruct


@tk.kernel(out_type=lambda x: LIKE(x.shape, x.dtype))
def negate(x, out):
    i = tk.parallel(x.shape[0], 1024)
    out[i] = -x[i]


@tk.kernel(out_type=lambda table, rows: LIKE((rows.shape[0], table.shape[1]), table.dtype))
def embed(table, rows, out):
    i, j = tk.parallel(rows.shape[0]), tk.parallel(table.shape[1], 512)
    out[i, j] = table[rows[i], j]


@tk.kernel(out_type=lambda x, rows, like: tk.Zeros(LIKE(like.shape, x.dtype)))
def scatter_add(x, rows, like, out):
    i, j = tk.parallel(rows.shape[0]), tk.parallel(x.shape[1], 512)
    out.at[rows[i], j].add(x[i, j], ordered=False)


@tk.kernel(out_type=lambda x: (), donate=("x",))
def double_last(x):
    i, j = tk.parallel(2), tk.parallel(x.shape[1], 512)
    x[x.shape[0] - 2 + i, j] = x[x.shape[0] - 2 + i, j] * 2


def program(kernel: Any, *types: Any, target: str = "cuda:sm_90", **options: Any) -> Program:
    return kernel.trace(*types, **options).lower(target)._lowered.program


@cache
def process() -> subprocess.Popen[bytes]:
    """The process that runs the programs."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.lower.triton.interpreter.large_arrays"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    if process.cache_info().currsize:
        process().communicate()
        process.cache_clear()


def run(made: Program, types: Sequence[Any], rows: Any, programs: Sequence[int], wanted: Sequence[int]) -> Any:
    """The wanted rows of the results after some programs, or an error."""
    job = Job(_request(made, "forward"), [t.shape for t in types], rows, programs, wanted)
    child = process()
    assert child.stdin is not None and child.stdout is not None
    pickle.dump(vars(job), child.stdin)
    child.stdin.flush()
    return pickle.load(child.stdout)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def narrowed(made: Program) -> Program:
    """The same program with positions of 32 bits: the fault that the tests must find."""
    assert ".to(tl.int64)" in made.text
    return replace(made, text=made.text.replace(".to(tl.int64)", ".to(tl.int32)"))


def check(made: Program, types: Sequence[Any], rows: Any, programs: Sequence[int], expected: Mapping[int, Any]) -> None:
    """Assert the rows of the only result; and that 32 bits would not do, where the program counts positions itself."""
    answer = run(made, types, rows, programs, list(expected))
    assert not isinstance(answer, str), answer
    for number, row in expected.items():
        np.testing.assert_array_equal(answer[0][number], row)
    if all(argument.descriptor is None for argument in made.arguments):
        answer = run(narrowed(made), types, rows, programs, list(expected))
        assert isinstance(answer, str) or any((answer[0][number] != row).any() for number, row in expected.items())


def test_one_dim() -> None:
    size = 2**31 + 1500
    x, last = LIKE((size,), jnp.float32), [2**31 - 1, 2**31, 2**31 + 1, size - 1]
    values = dict(zip(last, numbers(4), strict=True))
    made = program(negate, x)
    check(made, [x], [values], [made.programs - n for n in (1, 2, 3)], {n: -value for n, value in values.items()})


def test_ragged_rows() -> None:
    """Rows of 8,200 elements, whose tail is masked; each row's results are those of the same row of a small array."""
    x, last = LIKE((2**18 + 3, 8200), jnp.bfloat16), (2**18, 2**18 + 2)
    values = numbers(2, 8200, dtype=jnp.bfloat16)
    small = softmax_forward.trace(values).lower("cuda:sm_90").interpret(values)
    made = program(softmax_forward, x)
    rows = dict(zip(last, values, strict=True))
    check(made, [x], [rows], last, dict(zip(last, np.asarray(small), strict=True)))


def test_rows_that_indices_name() -> None:
    types = LIKE((2**20 + 5, 4096), jnp.bfloat16), LIKE((3,), jnp.int32)
    named = np.array([2**20 + 4, 7, 2**19 + 1], np.int32)
    rows = dict(zip(named.tolist(), numbers(3, 4096, dtype=jnp.bfloat16), strict=True))
    made = program(embed, *types)
    expected = {n: rows[int(row)] for n, row in enumerate(named)}
    check(made, types, [rows, dict(enumerate(named))], range(made.programs), expected)


def test_atomic_additions() -> None:
    like = LIKE((2**20 + 5, 4096), jnp.float32)
    types = LIKE((3, 4096), jnp.float32), LIKE((3,), jnp.int32), like
    named, x = np.array([2**20 + 4, 7, 2**20 + 4], np.int32), numbers(3, 4096)
    made = program(scatter_add, *types)
    expected = {2**20 + 4: x[0] + x[2], 7: x[1], 0: np.zeros(4096)}
    check(made, types, [dict(enumerate(x)), dict(enumerate(named)), {}], range(made.programs), expected)


def test_in_place() -> None:
    x, values = LIKE((2**20 + 5, 4096), jnp.float32), numbers(2, 4096)
    last = (2**20 + 3, 2**20 + 4)
    made = program(double_last, x)
    check(
        made,
        [x],
        [dict(zip(last, values, strict=True))],
        range(made.programs),
        dict(zip(last, 2 * values, strict=True)),
    )


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_products(target: str) -> None:
    """By pointers, and by TMA descriptors, which take positions along each dim."""
    types = LIKE((2**20 + 16, 4096), jnp.bfloat16), LIKE((4096, 128), jnp.bfloat16)
    x, w = numbers(16, 4096, dtype=jnp.bfloat16), numbers(4096, 128, dtype=jnp.bfloat16)
    options = {"block_m": 16, "block_n": 128, "block_k": 256, "num_warps": 4}
    small = matmul.trace(x, w, **options).lower(target).interpret(x, w)
    made = program(matmul, *types, target=target, **options)
    assert any(argument.descriptor for argument in made.arguments) == (target == "cuda:sm_90")
    rows = dict(enumerate(x, 2**20))
    expected = dict(enumerate(np.asarray(small), 2**20))
    check(made, types, [rows, dict(enumerate(w))], [made.programs - 1], expected)
