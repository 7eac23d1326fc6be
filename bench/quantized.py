"""Products of 8- and 4-bit numbers: of many rows beside float32, of one row beside the bandwidth of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.llvm.peak import host, peak, share
from bench.result import Result
from bench.timing import Contestant, by_round, clock, take_turns
from tilekern.kernels import QuantizedArray, quantized_matmul
from tilekern.kernels.matmul.kernel import matmul

INT8_RATIO_LIMIT = 0.5
BANDWIDTH_SHARE_LIMIT = 0.7
_SIZE = 1024
_INNER, _COLUMNS = 4096, 14336  # Llama 3 8B's up projection
_WEIGHTS: dict[str, dict[str, Any]] = {
    "int8 by columns": {"dtype": "int8", "axis": 0},
    "int4 in groups of 128": {"dtype": "int4", "block": (128, 1)},
    "float4 in groups of 32": {"dtype": "float4_e2m1fn", "block": (32, 1)},
}
_ROUNDS = 21


def measure() -> Iterator[Result]:
    """All results of this file; none on a CPU that "cpu:llvm" has no code for."""
    if host() is not None:
        yield from _many_rows()
        yield from _one_row()


def _many_rows() -> Iterator[Result]:
    """int8 × int8 with scales of rows and columns, beside float32, and beside the peak of products of fours."""
    x, w = (jax.random.normal(key, (_SIZE, _SIZE)) for key in jax.random.split(jax.random.key(0)))
    left, right = QuantizedArray.quantize(x, "int8", axis=1), QuantizedArray.quantize(w, "int8", axis=0)
    ours, theirs = (jax.jit(partial(f, target="cpu:llvm")) for f in (quantized_matmul, matmul))
    clocks = {"ours": clock(lambda: ours(left, right)), "theirs": clock(lambda: theirs(x, w))}
    loop = peak("int8")
    times = take_turns(clocks if loop is None else {**clocks, "peak": loop.seconds}, _ROUNDS)
    ms = {who: statistics.median(seconds) * 1e3 for who, seconds in times.items()}
    name = f"quantized_matmul {_SIZE}³, int8 × int8, to float32"
    ratio = by_round(times["ours"], times["theirs"])
    yield Result(name, "ms", ms["ours"], INT8_RATIO_LIMIT, "ratio", ms["theirs"], ratio)
    if loop is not None:
        yield share(f"{name}, of the peak", 2 * _SIZE**3, times["ours"], loop, times["peak"], None)


def _one_row() -> Iterator[Result]:
    """A token by weights: their bytes a second, beside the bytes that a copy of as many reads and writes a second."""
    w = jax.random.normal(jax.random.key(0), (_INNER, _COLUMNS)) / _INNER**0.5
    x = jax.random.normal(jax.random.key(1), (1, _INNER), jnp.bfloat16)
    product = jax.jit(partial(quantized_matmul, target="cpu:llvm"))
    for name, keywords in _WEIGHTS.items():
        weights = QuantizedArray.quantize(w, **keywords)
        nbytes = _INNER * _COLUMNS // (1 if keywords["dtype"] == "int8" else 2)
        times = take_turns({"ours": clock(partial(product, x, weights)), "copy": clock(copy(nbytes))}, _ROUNDS)
        rates = {who: nbytes / statistics.median(seconds) / 1e9 for who, seconds in times.items()}
        share = by_round(times["copy"], times["ours"]) / 2
        title = f"quantized_matmul of one row, {_INNER}×{_COLUMNS}, {name}"
        yield Result(title, "GB/s", rates["ours"], BANDWIDTH_SHARE_LIMIT, "share", 2 * rates["copy"], share)


def copy(nbytes: int) -> Contestant:
    """Reads an array and writes it in place: a copy to new memory would also wait for the system's pages."""
    arrays, step = [jnp.zeros(nbytes, jnp.uint8)], jax.jit(lambda x: x ^ 1, donate_argnums=0)

    def call() -> jax.Array:
        arrays[0] = step(arrays[0])
        return arrays[0]

    return call
