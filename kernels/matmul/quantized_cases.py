"""Products of quantised layers of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class QuantizedCase:
    """x[rows, inner] @ w[inner, columns] where w is quantised, and maybe x.

    Attributes:
      name, rows, inner, columns: of the product.
      of_rhs: arguments of `QuantizedArray.quantize` for w.
      of_lhs: the same for x; None for floats.
    """

    name: str
    rows: int
    inner: int
    columns: int
    of_rhs: dict[str, Any] = field(hash=False)
    of_lhs: dict[str, Any] | None = field(default=None, hash=False)

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[Any, Any]:
        """Random x and w; the elements of the product have a standard deviation of about 1."""
        left, right = jax.random.split(key)
        x: Any = jax.random.normal(left, (self.rows, self.inner), dtype)
        w = jax.random.normal(right, (self.inner, self.columns), dtype) / max(self.inner, 1) ** 0.5
        if self.of_lhs is not None:
            x = QuantizedArray.quantize(x, **self.of_lhs)
        return x, QuantizedArray.quantize(w, **self.of_rhs)

    def small(self) -> QuantizedCase:
        """A smaller case for fast tests: blocks of at most 32 numbers, two along each dim that has blocks."""

        def cut(keywords: dict[str, Any] | None) -> Any:
            if keywords is None or "block" not in keywords:
                return keywords
            return keywords | {"block": tuple(None if n is None else min(n, 32) for n in keywords["block"])}

        blocks = "block" in self.of_rhs
        rows, inner, columns = (shrunk(n) for n in (self.rows, self.inner, self.columns))
        inner, columns = (64, 64) if blocks else (inner, columns)
        sizes: dict[str, Any] = {"rows": rows, "inner": inner, "columns": columns}
        return replace(self, name=f"{self.name}_small", of_rhs=cut(self.of_rhs), of_lhs=cut(self.of_lhs), **sizes)


_ROWS = {"axis": -1}
_COLUMNS = {"axis": 0}
_INT4 = {"dtype": "int4", "block": (128, 1)}

QUANTIZED_CASES = (
    # 8 bits for weights and activations: scales of columns, and of rows as they come.
    QuantizedCase("llama3_8b_up_w8a8", 4096, 4096, 14336, _COLUMNS, _ROWS),
    QuantizedCase(
        "llama3_8b_down_fp8",
        4096,
        14336,
        4096,
        _COLUMNS | {"dtype": "float8_e4m3fn"},
        _ROWS | {"dtype": "float8_e4m3fn"},
    ),
    # 4 bits a weight, in groups of 128 along the inner dim, as GPTQ and AWQ store them; one token, and a prompt.
    QuantizedCase("llama3_8b_up_int4_decode", 1, 4096, 14336, _INT4),
    QuantizedCase("llama3_8b_up_int4", 1000, 4096, 14336, _INT4 | {"zero_point": True}),
    # https://huggingface.co/Qwen/Qwen2-7B
    QuantizedCase("qwen2_7b_up_int8", 1000, 3584, 18944, _COLUMNS),
    # As that model is published: tech report (arXiv 2412.19437), section 3.3.2.
    QuantizedCase(
        "deepseek_v3_compress",
        4096,
        7168,
        512,
        {"dtype": "float8_e4m3fn", "block": (128, 128)},
        {"dtype": "float8_e4m3fn", "block": (1, 128)},
    ),
    # OCP Microscaling Formats (MX) v1.0, section 5; and NVFP4.
    QuantizedCase(
        "gpt_oss_20b_mxfp4",
        64,
        2880,
        2880,
        {"dtype": "float4_e2m1fn", "block": (32, 1), "scale_dtype": "float8_e8m0fnu"},
    ),
    QuantizedCase(
        "llama3_8b_down_nvfp4",
        64,
        14336,
        4096,
        {"dtype": "float4_e2m1fn", "block": (16, 1), "scale_dtype": "float8_e4m3fn"},
    ),
)
