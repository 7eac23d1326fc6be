"""Softmax, norms and the step of AdamW: as fast as the memory, beside XLA's fusions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Measured, types, with_gradient
from tilekern.kernels import group_norm, rms_norm
from tilekern.kernels.adamw_step import adamw_step
from tilekern.kernels.adamw_step import reference as adamw_reference
from tilekern.kernels.adamw_step.cases import CASES as STEPS
from tilekern.kernels.group_norm import reference as group_norm_reference
from tilekern.kernels.group_norm.cases import CASES as GROUP_NORMS
from tilekern.kernels.group_norm.cases import LARGE
from tilekern.kernels.group_norm.cases import Case as GroupNorm
from tilekern.kernels.rms_norm import add_reference, add_rms_norm
from tilekern.kernels.rms_norm.cases import CASES as RMS_NORMS
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.rope.cases import CASES as ROPES
from tilekern.kernels.softmax import softmax


def _named(cases: Any, name: str) -> Any:
    (match,) = (case for case in cases if case.name == name)
    return match


def _softmax(n: int) -> Measured:
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    return Measured(f"softmax {n}", softmax, lambda: (x,), {"xla": jax.nn.softmax})


def _rms_norm(n: int) -> Measured:
    arrays = jax.ShapeDtypeStruct((n, n), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.float32)
    return Measured(f"rms_norm {n}", rms_norm, lambda: arrays, {"xla": _rms_norm_by_xla})


def _rms_norm_by_xla(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w


def _add_rms_norm() -> tuple[Measured, Measured]:
    case = _named(RMS_NORMS, "llama3_8b")
    x = jax.ShapeDtypeStruct((case.rows, case.columns), jnp.bfloat16)
    arrays = x, x, jax.ShapeDtypeStruct((case.columns,), jnp.bfloat16)
    formula = partial(add_reference, **case.keywords)
    function = partial(add_rms_norm, **case.keywords)
    return with_gradient(Measured(f"add_rms_norm {case.name}", function, lambda: arrays, {"xla": formula}), (0, 1, 2))


def _rms_norm_rope() -> tuple[Measured, Measured]:
    case = _named(ROPES, "llama3_8b_queries")
    x = jax.ShapeDtypeStruct((1, case.length, case.heads, case.width), jnp.bfloat16)
    arrays = x, jax.ShapeDtypeStruct((case.width,), jnp.bfloat16)
    formula = partial(normed_reference, theta=case.theta)
    function = partial(rms_norm_rope, theta=case.theta)
    return with_gradient(Measured(f"rms_norm_rope {case.name}", function, lambda: arrays, {"xla": formula}), (0, 1))


def _group_norm(case: GroupNorm) -> tuple[Measured, Measured]:
    arrays = types(lambda: case.arrays(jax.random.key(0), jnp.bfloat16))
    formula = partial(group_norm_reference, **case.keywords)
    function = partial(group_norm, **case.keywords)
    return with_gradient(Measured(f"group_norm {case.name}", function, arrays, {"xla": formula}), (0, 1, 2))


def _adamw_step() -> Measured:
    """A bfloat16 weight, moments in float32, all rounded to nearest."""
    case = _named(STEPS, "llama3_8b_up")

    def make() -> tuple[Any, ...]:
        return cast(tuple[Any, ...], case.arrays(jax.random.key(0), jnp.bfloat16)[:5])

    def step(*arrays: jax.Array, target: str) -> Any:
        return adamw_step(*arrays, None, (), **case.keywords, target=target)

    formula = partial(adamw_reference, **case.keywords)
    return Measured(f"adamw_step {case.name}", step, types(make), {"xla": formula}, donated=(0, 2, 3))


CASES: tuple[Case, ...] = (
    _softmax(4096),
    _rms_norm(4096),
    *_add_rms_norm(),
    *_rms_norm_rope(),
    *_group_norm(_named(GROUP_NORMS, "stable_diffusion_64")),
    *_group_norm(_named(GROUP_NORMS, "stable_diffusion_32")),
    _group_norm(_named(LARGE, "vae_decoder_512"))[0],
    _adamw_step(),
)
SMALL: tuple[Case, ...] = (
    _softmax(2048),
    _rms_norm(2048),
    _group_norm(replace(_named(GROUP_NORMS, "stable_diffusion_32"), name="small", side=16))[0],
)
