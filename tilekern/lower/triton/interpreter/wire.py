"""Messages between the two processes of the interpreter: a JSON header, then arrays as raw bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import IO, Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import DTYPES, dtype_name

Header = dict[str, Any]

_LENGTH = struct.Struct("<Q")
"""The length of the header in bytes, which precedes it."""


def send(stream: IO[bytes], header: Header, arrays: Sequence[Array] = ()) -> None:
    """Write one message."""
    types = [[dtype_name(a.dtype), a.shape] for a in arrays]
    text = json.dumps([header, types]).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for array in arrays:
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Header, list[Array]]:
    """Read one message.

    Raises:
      EOFError: the other process has ended.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    header, types = json.loads(_read(stream, length))
    return header, [_receive_array(stream, name, tuple(shape)) for name, shape in types]


def _receive_array(stream: IO[bytes], name: str, shape: tuple[int, ...]) -> Array:
    dtype = DTYPES[name]
    return np.frombuffer(_read(stream, prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _read(stream: IO[bytes], length: int) -> bytearray:
    """The next `length` bytes; arrays on them can be written to."""
    data = bytearray(stream.read(length))
    if len(data) < length:
        raise EOFError
    return data
