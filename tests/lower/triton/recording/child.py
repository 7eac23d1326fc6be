"""python child.py: a process that launches programs by jaxlib's code on the driver that it finds first.

It reads a JSON line for each launch, `{"opaque": base64, "buffers": [addresses]}`, and answers with one: the error of
jaxlib, and the lines of the driver's record. It imports jaxlib's module only, so that it starts in no time.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

STREAM = 0x55


def entry() -> Any:
    """jaxlib's entry of custom calls: `void(stream, buffers, opaque, length of opaque, status)`."""
    capsule, api = import_module("jax_cuda13_plugin._triton").get_custom_call(), ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    buffers = ctypes.POINTER(ctypes.c_void_p)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, buffers, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)(address)


def launch(function: Any, opaque: bytes, addresses: list[int]) -> str | None:
    """Launch a program; return jaxlib's error."""
    # XlaCustomCallStatus holds a std::optional<std::string>: its text's address, its length, ...
    status = (ctypes.c_uint64 * 32)()
    buffers = (ctypes.c_void_p * len(addresses))(*addresses)
    function(STREAM, buffers, opaque, len(opaque), ctypes.addressof(status))
    return ctypes.string_at(status[0], status[1]).decode(errors="replace") if any(status) else None


def main() -> None:
    """Answer until the input ends."""
    record, function, known = Path(os.environ["PRETENDED_RECORD"]), entry(), 0
    for line in sys.stdin:
        asked = json.loads(line)
        error = launch(function, base64.b64decode(asked["opaque"]), asked["buffers"])
        text = record.read_bytes()[known:] if record.exists() else b""
        known += len(text)
        sys.stdout.write(json.dumps({"error": error, "calls": [json.loads(call) for call in text.splitlines()]}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
