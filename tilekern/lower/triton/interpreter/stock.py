"""Triton's own interpreter, and the corrections that it needs.

Triton's interpreter runs the Python code of a kernel on NumPy arrays: `triton.language` builds "IR" by calling an
`InterpreterBuilder`, whose every method computes at once. Corrections replace methods of that class. Each says what is
wrong, and in which of the versions 3.6.0 and 3.9.0, and has a test that fails without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from tilekern.ir.core import Array
from tilekern.ir.types import DTYPES


@dataclass(frozen=True)
class Stock:
    """Triton's interpreter.

    Attributes:
      language: `triton.language`.
      module: `triton.runtime.interpreter`.
    """

    language: Any
    module: Any

    @property
    def builder(self) -> Any:
        """The class whose methods compute."""
        return self.module.InterpreterBuilder

    @property
    def ir(self) -> Any:
        """Triton's enumerations (rounding modes, atomic operations, precisions)."""
        return self.module._ir

    def handle(self, data: Array, dtype: Any) -> Any:
        """A value of the interpreter: an array, and the dtype of its elements."""
        return self.module.TensorHandle(data, dtype.scalar)

    def tensor(self, data: Array, dtype: Any) -> Any:
        """A value of the language; an array without dims becomes a scalar."""
        language = self.language
        if not data.shape:
            return language.tensor(self.handle(data.reshape(1), dtype), dtype)
        return language.tensor(self.handle(data, dtype), language.block_type(dtype, list(data.shape)))

    def dtype(self, name: str) -> Any:
        """Triton's name for a dtype of the language, by its short name."""
        return getattr(self.language, TRITON_DTYPES[name])


TRITON_DTYPES: dict[str, str] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8e4nv",
    "f8e5m2": "float8e5",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "int1",
}
"""The name in `triton.language` of each dtype."""
assert TRITON_DTYPES.keys() == DTYPES.keys()

Correction = Callable[[Stock], None]


def correct() -> Stock:
    """Import Triton, which must find TRITON_INTERPRET=1 in the environment, and correct its interpreter.

    The functions of `triton.language` become those of the interpreter for good, and not around each call, as Triton
    does it: that takes longer than most programs.
    """
    from tilekern.lower.triton.interpreter import accesses, arithmetic, floats, folds, libdevice, syntax

    language: Any = import_module("triton.language")
    stock = Stock(language, import_module("triton.runtime.interpreter"))
    stock.module._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    stock.module._patch_lang = _nothing
    stock.module.interpreter_builder.options = _options(stock)
    corrections: tuple[Correction, ...] = (
        *syntax.CORRECTIONS,
        *accesses.CORRECTIONS,
        *floats.CORRECTIONS,
        *arithmetic.CORRECTIONS,
        *folds.CORRECTIONS,
        *libdevice.CORRECTIONS,
        _print_labels,
    )
    for correction in corrections:
        correction(stock)
    return stock


def _print_labels(stock: Stock) -> None:
    """A label is a part of a format of C's `printf` on the device: there `%%` is one percent sign."""
    builder: Any = stock.module.InterpreterBuilder
    own = builder.create_print

    def create_print(self: Any, prefix: str, *rest: Any) -> None:
        own(self, prefix.replace("%%", "%"), *rest)

    builder.create_print = create_print


def _nothing(function: Any) -> None:
    """Every function of the language has been replaced already."""


def _options(stock: Stock) -> Any:
    """Assertions hold; integers wrap around without being computed twice; dots have the precisions that CUDA has."""
    return replace(
        stock.module.InterpreterOptions(),
        debug=True,
        sanitize_overflow=False,
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
    )
