"""Machine code of kernels in this process: loaded once, and unloaded when nothing can call it any more."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from tilekern import _jax
from tilekern.lower.llvm.runtime import code_table

# The kernels compiled last stay loaded without users: the same kernel, defined again, need not be compiled again. A
# kernel takes some KiB. `jax.clear_caches` unloads them.
_KEPT = 64


class LoadedCode:
    """The machine code of a kernel. It stays loaded as long as this object, or an executable of XLA that calls it.

    Attributes:
      key: names the code in custom calls.
      address: of the kernel's own handler.
    """

    def __init__(self, key: str, address: int) -> None:
        self.key, self.address = key, address


class CodeTable:
    """The table of loaded kernels, `runtime.code_table`.

    Args:
      functions: the addresses of the table's functions.
      lock: held by whoever links or unloads.
    """

    def __init__(self, functions: Mapping[str, int], lock: threading.RLock) -> None:
        self.functions, self._lock = functions, lock
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._find = ctypes.PYFUNCTYPE(pointer, ctypes.c_char_p)(functions[code_table.FIND])
        self._add = ctypes.PYFUNCTYPE(pointer, ctypes.c_char_p, pointer)(functions[code_table.ADD])
        self._release = ctypes.PYFUNCTYPE(None, pointer)(functions[code_table.RELEASE])
        self._remove = ctypes.PYFUNCTYPE(number, pointer)(functions[code_table.REMOVE])
        # The linked library of each entry, and the address of its handler.
        self._libraries: dict[int, tuple[Any, int]] = {}
        self._living = weakref.WeakValueDictionary[str, LoadedCode]()
        self._recent = _jax.Cache[str, LoadedCode](_KEPT)

    def find(self, key: str) -> LoadedCode | None:
        """The code of a key; None if it is not loaded."""
        code = self._living.get(key)
        if code is None and (entry := self._find(key.encode())) is not None:
            code = self._use(key, entry)
        return code

    def add(self, key: str, library: Any, address: int) -> LoadedCode:
        """Enter a linked library and its handler, and unload code that nothing can call any more."""
        self.unload_unused()
        entry = self._add(key.encode(), address)
        if entry is None:
            raise MemoryError(f"no memory for an entry of {code_table.KEY_BYTES} bytes and its key")
        self._libraries[entry] = library, address
        return self._use(key, entry)

    def unload_unused(self) -> None:
        """Unload the code that neither Python nor an executable of XLA uses."""
        with self._lock:
            for entry in list(self._libraries):
                if self._remove(entry):
                    self._libraries.pop(entry)[0].close()

    def __len__(self) -> int:
        return len(self._libraries)

    def _use(self, key: str, entry: int) -> LoadedCode:
        code = LoadedCode(key, self._libraries[entry][1])
        weakref.finalize(code, self._end_use, entry).atexit = False
        self._living[key] = self._recent[key] = code
        return code

    def _end_use(self, entry: int) -> None:
        """Called by Python's collector, in any thread and between any two instructions: it must not wait."""
        self._release(entry)
        if self._lock.acquire(blocking=False):
            try:
                self.unload_unused()
            finally:
                self._lock.release()
