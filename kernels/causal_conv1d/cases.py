"""Short convolutions of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[batch, tokens, channels], weight[taps, channels], and a bias."""

    name: str
    tokens: int
    channels: int
    taps: int = 4
    activation: str | None = "silu"
    batch: int = 1

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `causal_conv1d`, and of its reference."""
        return {"activation": self.activation}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random x, weight and bias, standard normal."""
        shapes = (self.batch, self.tokens, self.channels), (self.taps, self.channels), (self.channels,)
        keys = jax.random.split(key, 3)
        x, weight, bias = (jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))
        return x, weight, bias

    def small(self) -> Case:
        """A smaller case for fast tests: at most two sequences, sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "channels")}
        return replace(self, name=f"{self.name}_small", batch=min(2, self.batch), **sizes)


CASES = (
    Case("mamba_130m", 4096, 1536),  # https://huggingface.co/state-spaces/mamba-130m: expand · d_model, d_conv
    Case("mamba2_2p7b", 1000, 5376),  # https://huggingface.co/state-spaces/mamba2-2.7b: with b and c, 5120 + 2 · 128
    # https://huggingface.co/google/recurrentgemma-2b: lru_width, conv1d_width
    Case("recurrentgemma_2b", 2048, 2560, activation=None),
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct: query, key and value of the linear heads
    Case("qwen3_next_decode", 1, 8192, batch=8),
)
