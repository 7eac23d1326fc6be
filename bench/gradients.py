"""Kernels with their gradients on both backends for CPUs, compared with XLA's gradients of the same formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels import group_norm, layer_norm, matmul, ragged_dot, rms_norm, rope, softmax, swiglu
from tilekern.kernels.group_norm import reference as group_norm_reference
from tilekern.kernels.group_norm.cases import CASES as GROUP_NORMS
from tilekern.kernels.layer_norm import reference as layer_norm_reference
from tilekern.kernels.matmul import fused_reference
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.swiglu import reference as swiglu_reference

SIZE = 4096
DTYPES = ("float32", "bfloat16")


def _rms_norm(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return rms_norm, rms_norm_reference, random(SIZE, SIZE), random(SIZE)


def _layer_norm(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return layer_norm, layer_norm_reference, random(SIZE, SIZE), random(SIZE), random(SIZE)


def _group_norm(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    """The group norm of the first level of Stable Diffusion's U-Net, with its activation."""
    case = GROUP_NORMS[0]

    def ours(*arrays: jax.Array, target: str | None = None) -> jax.Array:
        return group_norm(*arrays, **case.keywords, target=target)

    ours.__name__ = "group_norm"
    shape = case.batch, case.side, case.side, case.channels
    return ours, partial(group_norm_reference, **case.keywords), random(*shape), random(*shape[3:]), random(*shape[3:])


def _softmax(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return softmax, jax.nn.softmax, random(SIZE, SIZE)


def _swiglu(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return swiglu, swiglu_reference, random(SIZE, SIZE), random(SIZE, SIZE)


def _rope(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return rope, rope_reference, random(1, SIZE, SIZE // 128, 128)


def _rms_norm_rope(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return rms_norm_rope, normed_reference, random(1, SIZE, SIZE // 128, 128), random(128)


def _fused_matmul(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    """A product with a bias, an activation and a residual."""

    def epilogue(product: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return jax.nn.gelu(product + bias) + residual

    def fused_matmul(*arrays: jax.Array, target: str | None = None) -> jax.Array:
        return fused_matmul(*arrays, epilogue=epilogue, target=target)

    size = SIZE // 2
    formula = partial(fused_reference, epilogue=epilogue)
    return fused_matmul, formula, random(size, size), random(size, size), random(size), random(size, size)


def _matmul(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    return matmul, jnp.matmul, random(SIZE // 2, SIZE // 2), random(SIZE // 2, SIZE // 2)


def _ragged_dot(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    """A grouped product. On CPUs XLA multiplies all rows by each matrix, and so it does for the gradient."""
    (case,) = (case for case in GROUPS if case.name == "square")
    _, _, sizes = case.arrays(jax.random.key(1), jnp.float32)

    def ours(lhs: jax.Array, rhs: jax.Array, target: str | None = None) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes, target=target)

    ours.__name__ = f"ragged_dot of {case.groups} groups"
    theirs = partial(jax.lax.ragged_dot, group_sizes=sizes)
    return ours, theirs, random(case.rows, case.inner), random(case.groups, case.inner, case.columns)


def _experts(random: Callable[..., jax.Array]) -> tuple[Any, ...]:
    """The first layer of experts: both products of `jax.lax.ragged_dot`, and the gate."""
    (case,) = (case for case in GROUPS if case.name == "square")
    _, _, sizes = case.arrays(jax.random.key(1), jnp.float32)

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    def fused_ragged_dot(x: jax.Array, *matrices: jax.Array, target: str | None = None) -> jax.Array:
        return fused_ragged_dot(x, matrices, sizes, epilogue=gated, target=target)

    def theirs(x: jax.Array, *matrices: jax.Array) -> jax.Array:
        return gated(*(jax.lax.ragged_dot(x, matrix, sizes) for matrix in matrices))

    shape = case.groups, case.inner, case.columns
    return fused_ragged_dot, theirs, random(case.rows, case.inner), random(*shape), random(*shape)


LIMITS = {
    _rms_norm: 1.0,
    _layer_norm: 1.0,
    _group_norm: 1.0,
    _softmax: 1.0,
    _swiglu: 1.1,
    _rope: 1.1,
    _rms_norm_rope: 1.0,
    _matmul: 1.1,
    _fused_matmul: 1.1,
    _ragged_dot: 0.35,
    _experts: 0.35,
}


def measure() -> Iterator[Result]:
    """All results of this file."""
    targets = ["cpu:xla"] if host() is None else ["cpu:llvm", "cpu:xla"]
    for build, limit in LIMITS.items():
        for dtype in DTYPES:
            yield from _compare(build, dtype, targets, limit)


def _compare(build: Callable[..., Any], dtype: str, targets: list[str], limit: float) -> Iterator[Result]:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    kernel, formula, *arrays = build(random)
    out = jax.eval_shape(kernel, *arrays)
    cotangent = jax.random.normal(next(keys), out.shape, out.dtype)

    def call(function: Callable[..., jax.Array]) -> Callable[[], Any]:
        def with_gradient(cotangent: jax.Array, *arrays: jax.Array) -> Any:
            value, pull = cast(Any, jax.vjp(function, *arrays))
            return value, pull(cotangent)

        run = cast(Callable[..., Any], jax.jit(with_gradient))
        return lambda: run(cotangent, *arrays)

    contestants = {target: call(partial(kernel, target=target)) for target in targets} | {"theirs": call(formula)}
    times = take_turns({name: clock(run) for name, run in contestants.items()})
    baseline = statistics.median(times["theirs"]) * 1e3
    for target in targets:
        name = f"{kernel.__name__} and its gradient {'×'.join(map(str, arrays[0].shape))} {dtype}, {target}"
        ours = statistics.median(times[target]) * 1e3
        limited = limit if target == "cpu:llvm" else None
        yield Result(name, "ms", ours, limited, "ratio", baseline, by_round(times[target], times["theirs"]))
