"""Messages of prints, as compiled code hands them to the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tilekern.ir.types import BF16, BOOL, F32, I32
from tilekern.lower.llvm.runtime import host_print
from tilekern.lower.llvm.runtime.host_print import Message, PrintedValue


def call(message: Message, *arrays: np.ndarray[Any, Any]) -> None:
    """Call the host's function with the values of a message behind each other, each at a multiple of 64 bytes."""
    memory = np.zeros(64 * (len(arrays) + 1), np.uint8)
    for value, array in zip(message.values, arrays, strict=True):
        memory[value.offset : value.offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    function = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)(host_print.address())
    function(message.encoded(), memory.ctypes.data)


def test_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    arrays = [np.array(1.5, BF16), np.array([True, False]), np.arange(4, dtype=I32).reshape(2, 2)]
    values = tuple(
        PrintedValue(x, shape, 64 * n) for n, (x, shape) in enumerate([(BF16, ()), (BOOL, (2,)), (I32, (2, 2))])
    )
    call(Message("{0} ÿ {1!s:>15} {{}} {2}", values, np.get_printoptions()), *arrays)
    assert capfd.readouterr().out == "1.5 ÿ   [ True False] {} [[0 1]\n [2 3]]\n"


def test_options_and_empty_tiles(capfd: pytest.CaptureFixture[str]) -> None:
    options = {**np.get_printoptions(), "precision": 1, "formatter": {"int": hex}}
    values = (PrintedValue(F32, (2,), 0), PrintedValue(F32, (0, 3), 64))
    call(Message("{}|{}", values, options), np.array([0.25, 3], F32), np.zeros((0, 3), F32))
    assert capfd.readouterr().out == "[0.2 3. ]|[]\n"
