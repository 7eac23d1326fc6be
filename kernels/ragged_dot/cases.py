"""Grouped products of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.quantization import quantize
from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """lhs[rows, inner], rhs[groups, inner, columns]: rows are tokens, one for each expert that a token is sent to."""

    name: str
    rows: int
    inner: int
    columns: int
    groups: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random lhs and rhs; group sizes as of a random router, which add up to the rows."""
        for_lhs, for_rhs, for_router = jax.random.split(key, 3)
        lhs = jax.random.normal(for_lhs, (self.rows, self.inner), dtype)
        rhs = jax.random.normal(for_rhs, (self.groups, self.inner, self.columns), dtype)
        expert = jax.random.randint(for_router, (self.rows,), 0, self.groups)
        sizes = jnp.bincount(expert, length=self.groups).astype(jnp.int32)
        return lhs, rhs / max(self.inner, 1) ** 0.5, sizes

    def small(self) -> Case:
        """A smaller case for fast tests: sizes below 96 with their remainders modulo 32, at most eight groups."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("rows", "inner", "columns")}
        return replace(self, name=f"{self.name}_small", groups=min(self.groups, 8), **sizes)


@dataclass(frozen=True)
class ScaledCase:
    """A `Case` whose matrices, and maybe rows, are of 8 or 4 bits; blocks are as for `quantize`.

    Attributes:
      case: sizes.
      rhs_dtype, rhs_block: of the matrices.
      lhs_dtype, lhs_block: of the rows; None for bfloat16.
    """

    case: Case
    rhs_dtype: str
    rhs_block: tuple[int | None, int | None]
    lhs_dtype: str | None = None
    lhs_block: tuple[int | None, int | None] = (1, None)

    @property
    def name(self) -> str:
        """The name of the case and both dtypes."""
        return f"{self.case.name}:{self.lhs_dtype or 'bfloat16'}:{self.rhs_dtype}"

    def arrays(self, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        """Random lhs[M, K], rhs[G, K, N], group sizes int32[G], and keyword arguments of `ragged_dot` with the scales.

        The scales are {"rhs_scale": float32[...]}, with "lhs_scale" if the rows have 8 or 4 bits. A scale has one
        number for each block.
        """
        lhs, rhs, sizes = self.case.arrays(key, jnp.bfloat16)
        rhs, rhs_scale = quantize(rhs, self.rhs_block, dtype=self.rhs_dtype)
        if self.lhs_dtype is None:
            return lhs, rhs, sizes, {"rhs_scale": rhs_scale}
        lhs, lhs_scale = quantize(lhs, self.lhs_block, dtype=self.lhs_dtype)
        return lhs, rhs, sizes, {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}

    def small(self) -> ScaledCase:
        """A smaller case for fast tests: two blocks, of at most 32 numbers, along each dim that has blocks."""

        def cut(block: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
            return tuple(None if n is None else min(n, 32) for n in block)  # pyright: ignore[reportReturnType]

        case = replace(self.case.small(), inner=64, columns=64)
        return replace(self, case=case, rhs_block=cut(self.rhs_block), lhs_block=cut(self.lhs_block))


CASES = (
    Case("square", 4096, 1024, 1024, 8),
    # The MLPs of experts: sizes are hidden_size, intermediate_size and the numbers of experts of config.json.
    Case("mixtral_8x7b_up", 2 * 2048, 4096, 14336, 8),  # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
    Case("mixtral_8x7b_down", 2 * 2048, 14336, 4096, 8),
    Case("mixtral_8x7b_decode", 2, 4096, 14336, 8),  # one token: most groups are empty
    Case("qwen3_30b_up", 8 * 1000, 2048, 768, 128),  # https://huggingface.co/Qwen/Qwen3-30B-A3B
    Case("deepseek_v3_up", 8 * 512, 7168, 2048, 256),  # https://huggingface.co/deepseek-ai/DeepSeek-V3
)
_OF_NAME = {case.name: case for case in CASES}
_GPT_OSS = Case("gpt_oss_20b_up", 4 * 1024, 2880, 2880, 32)  # https://huggingface.co/openai/gpt-oss-20b

SCALED_CASES = (
    # 8 bits a weight, a scale a column, for serving; and rows quantised as they come, a scale a row.
    ScaledCase(_OF_NAME["mixtral_8x7b_up"], "int8", (None, 1)),
    ScaledCase(_OF_NAME["mixtral_8x7b_decode"], "int8", (None, 1)),
    ScaledCase(_OF_NAME["qwen3_30b_up"], "int8", (None, 1), "int8"),
    ScaledCase(_OF_NAME["qwen3_30b_up"], "float8_e4m3fn", (None, 1), "float8_e4m3fn"),
    # As that model is published: tech report (arXiv 2412.19437), section 3.3.2.
    ScaledCase(_OF_NAME["deepseek_v3_up"], "float8_e4m3fn", (128, 128), "float8_e4m3fn", (1, 128)),
    ScaledCase(_OF_NAME["deepseek_v3_up"], "float8_e4m3fn", (128, 128)),
    # Its 4-bit weights have a scale for 32 numbers.
    ScaledCase(_GPT_OSS, "float4_e2m1fn", (32, 1)),
    ScaledCase(_GPT_OSS, "int4", (32, 1)),
)
