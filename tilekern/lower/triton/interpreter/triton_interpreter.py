"""Triton's own interpreter, and the arrays and dtypes that go in and out of it.

Triton's interpreter runs the Python code of a kernel on NumPy arrays: `triton.language` builds "IR" by calling an
`InterpreterBuilder`, whose every method computes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.ir.core import Array
from tilekern.ir.records import record
from tilekern.lower.triton.dtypes import TRITON_DTYPES


@record
class TritonInterpreter:
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
        """A value of Triton's interpreter: an array and the dtype of its elements."""
        return self.module.TensorHandle(data, dtype.scalar)

    def tensor(self, data: Array, dtype: Any) -> Any:
        """A value of Triton's language; an array without dims becomes a scalar."""
        language = self.language
        if not data.shape:
            return language.tensor(self.handle(data.reshape(1), dtype), dtype)
        return language.tensor(self.handle(data, dtype), language.block_type(dtype, list(data.shape)))

    def dtype(self, name: str) -> Any:
        """Triton's dtype, by its short name."""
        return getattr(self.language, TRITON_DTYPES[name])


Correction = Callable[[TritonInterpreter], None]
