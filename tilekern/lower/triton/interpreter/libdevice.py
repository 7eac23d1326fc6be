"""Correction: CUDA's mathematical functions (`triton.language.extra.libdevice`), which Triton's interpreter refuses."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.elementwise import TABLE
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter

# Names in the library (of float32 with an "f" at the end) → rows of the table of elementwise ops.
_ROWS = {
    "acos": "acos",
    "acosh": "acosh",
    "asin": "asin",
    "asinh": "asinh",
    "atan": "atan",
    "atan2": "atan2",
    "atanh": "atanh",
    "cbrt": "cbrt",
    "ceil": "ceil",
    "cos": "cos",
    "cosh": "cosh",
    "erf": "erf",
    "erfc": "erfc",
    "erfinv": "erf_inv",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "fabs": "abs",
    "floor": "floor",
    "fmod": "rem",
    "lgamma": "lgamma",
    "log": "log",
    "log1p": "log1p",
    "log2": "log2",
    "nearbyint": "round_even",
    "nextafter": "nextafter",
    "pow": "pow",
    "rint": "round_even",
    "round": "round_away",
    "rsqrt": "rsqrt",
    "sin": "sin",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "copysign": np.copysign,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "hypot": np.hypot,
    "log10": np.log10,
    "trunc": np.trunc,
}
_FLOATS = {name: TABLE[row].meaning for name, row in _ROWS.items()} | _NUMPY
_OTHERS: dict[str, Callable[..., Any]] = {
    "clz": TABLE["clz"].meaning,
    "clzll": TABLE["clz"].meaning,
    "popc": TABLE["population_count"].meaning,
    "popcll": TABLE["population_count"].meaning,
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "isinff": np.isinf,
    "isinfd": np.isinf,
    "isnanf": np.isnan,
    "isnand": np.isnan,
    "signbitf": np.signbit,
    "signbitd": np.signbit,
}
SYMBOLS: dict[str, Callable[..., Any]] = {
    f"__nv_{name}": function
    for name, function in (_FLOATS | {f"{name}f": function for name, function in _FLOATS.items()} | _OTHERS).items()
}
"""NumPy's function for each function of the library, by the name that Triton calls."""


def _have_libdevice(triton: TritonInterpreter) -> None:
    """Functions of CUDA's library run, with the library's choice by dtype.

    Triton's interpreter (3.6.0, 3.9.0) raises NotImplementedError for them. The functions of
    `triton.language.extra.libdevice`, which the compiler replaces by the GPU's functions, return None.
    """

    def call(self: Any, library: str, path: str, symbol: str, operands: list[Any], dtype: Any, pure: bool) -> Any:
        if symbol not in SYMBOLS:
            raise NotImplementedError(f"the interpreter does not have {symbol} of libdevice")
        arrays: list[Array] = [v.data for v in operands]
        result = np.asarray(SYMBOLS[symbol](*arrays))
        return triton.handle(result.astype(triton.module._get_np_dtype(dtype)), dtype)

    triton.builder.create_extern_elementwise = call

    libdevice = import_module("triton.language.extra.libdevice")  # the names that kernels use
    cuda = import_module("triton.language.extra.cuda.libdevice")
    module: Any = triton.module
    module._patch_builtin(cuda, module.interpreter_builder, module._LangPatchScope())
    for name in vars(libdevice).keys() & vars(cuda).keys():
        if not name.startswith("_"):
            setattr(libdevice, name, getattr(cuda, name))


CORRECTIONS: tuple[Correction, ...] = (_have_libdevice,)
