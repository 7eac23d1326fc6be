"""The permission to use the tile registers of AMX, which Linux gives a process that asks for it."""

from __future__ import annotations

import ctypes
import platform

_ARCH_PRCTL = 158
_REQUEST, _GRANTED = 0x1023, 0x1022
_TILE_DATA = 18


def permitted() -> bool:
    """Ask for the tile registers (arch_prctl, "Using XSTATE features" in Linux' documentation); True if they are given.

    Linux refuses where it is older than 5.16, where the CPU or a hypervisor has none, and where a thread has a
    stack for signals that is too small for them. The permission holds for all threads, to the end of the process.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    granted = ctypes.c_ulong(0)
    if syscall(_ARCH_PRCTL, _REQUEST, ctypes.c_ulong(_TILE_DATA)) != 0:
        return False
    asked = syscall(_ARCH_PRCTL, _GRANTED, ctypes.byref(granted))
    return asked == 0 and bool(granted.value >> _TILE_DATA & 1)
