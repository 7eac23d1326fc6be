"""Weights of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """A weight[rows, columns], its gradient in the same dtype, and moments in float32 unless `narrow`."""

    name: str
    rows: int
    columns: int
    narrow: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `adamw_step`, and of its reference."""
        return {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[Any, ...]:
        """Random weight, gradient and moments, the factors of the tenth step, and what decides about rounding."""
        shape, keys = (self.rows, self.columns), jax.random.split(key, 4)
        of_moments = dtype if self.narrow else jnp.promote_types(dtype, jnp.float32)
        param, gradient = (jax.random.normal(k, shape, dtype) for k in keys[:2])
        first = 0.1 * jax.random.normal(keys[2], shape, of_moments)
        second = 0.01 * jnp.square(jax.random.normal(keys[3], shape, of_moments))
        wide = jnp.promote_types(dtype, jnp.float32)
        factors = jnp.array([1.0, 3e-4, 1 / (1 - 0.9**10), 1 / (1 - 0.95**10)], wide)
        rounds = jnp.dtype(dtype).itemsize <= 2
        coordinates = tuple(jnp.arange(n, dtype=jnp.uint32) for n in shape) if rounds else ()
        of_rounding = jax.random.key_data(jax.random.split(keys[0], (3, 2))) if rounds else None
        return param, gradient, first, second, factors, of_rounding, coordinates

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32."""
        return replace(self, name=f"{self.name}_small", rows=shrunk(self.rows), columns=shrunk(self.columns))


CASES = (
    Case("square", 4096, 4096),
    Case("llama3_8b_up", 4096, 14336),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_norm", 1, 4096),
    Case("gpt2_embedding", 50257, 768, narrow=True),  # https://huggingface.co/openai-community/gpt2
    Case("qwen2_7b_key_bias", 1, 512, narrow=True),  # https://huggingface.co/Qwen/Qwen2-7B: 4 heads of 128
)
