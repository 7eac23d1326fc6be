"""The host's part of `tk.debug_print`: a function that compiled code calls to format and print values.

XLA's threads call it while a kernel runs. It takes Python's lock, as JAX's own callbacks on CPUs do, and prints a
message with one write to `sys.stdout`, so that messages of several threads do not mix. All that it needs to know stands
in the code that calls it: another process may find the code by its hash.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.records import record
from tilekern.ir.types import DTYPES, DType, dtype_name

HOST_PRINT = "tilekern_host_print"
"""The function that compiled code calls: `void (const char* message, const void* values)`."""

# Options of `np.set_printoptions` that have a text form; a `formatter` is a function.
_OPTIONS = ("edgeitems", "floatmode", "infstr", "linewidth", "nanstr", "precision", "sign", "suppress", "threshold")

_one_at_a_time = threading.Lock()


@record
class PrintedValue:
    """A tile that is printed, and the offset of its first byte in the memory of the message's values."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int

    def read(self, address: int) -> Any:
        """A copy of the tile at `address + offset`; a number if it has no dims."""
        count = int(np.prod(self.shape))
        if not count:
            return np.zeros(self.shape, self.dtype)
        raw = ctypes.string_at(address + self.offset, count * self.dtype.itemsize)
        tile: Array = np.frombuffer(raw, self.dtype).reshape(self.shape)
        return tile if self.shape else tile[()]


@record
class Message:
    """A print: its format, the values, and NumPy's options of printing when the kernel was lowered."""

    format: str
    values: tuple[PrintedValue, ...]
    options: Mapping[str, Any]

    def encoded(self) -> bytes:
        """The message as JSON."""
        values = [(dtype_name(v.dtype), v.shape, v.offset) for v in self.values]
        options = {name: self.options[name] for name in _OPTIONS}
        return json.dumps({"format": self.format, "values": values, "options": options}).encode()

    def text(self, address: int) -> str:
        """The message without a newline: format "x = {}" and float32 1.0 at the address -> "x = 1.0"."""
        with np.printoptions(**self.options):
            return self.format.format(*(value.read(address) for value in self.values))


@functools.lru_cache(256)
def _decoded(encoded: bytes) -> Message:
    message = json.loads(encoded)
    values = tuple(PrintedValue(DTYPES[name], tuple(shape), offset) for name, shape, offset in message["values"])
    return Message(message["format"], values, message["options"])


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
def _host_print(encoded: bytes, values: int | None) -> None:
    line = _decoded(encoded).text(values or 0)
    with _one_at_a_time:
        sys.stdout.write(f"{line}\n")


def address() -> int:
    """The address of `HOST_PRINT` in this process."""
    pointer = ctypes.cast(_host_print, ctypes.c_void_p).value
    assert pointer is not None
    return pointer
