"""Corrections of loads, stores and atomic operations: they go to the checked memory of the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter


def _last(old: Array, value: Array) -> Array:
    return value


_ATOMICS: dict[str, Callable[..., Array]] = {
    "ADD": np.add,
    "FADD": np.add,
    "MIN": np.minimum,
    "UMIN": np.minimum,
    "MAX": np.maximum,
    "UMAX": np.maximum,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "XCHG": _last,
}
"""The function of the old element and the lane's value for each of Triton's `ATOMIC_OP`."""


def _access_checked_memory(triton: TritonInterpreter) -> None:
    """Loads and stores go to `builder.memory`, a `Memory`, which checks them."""

    def load(self: Any, pointers: Any, *hints: Any) -> Any:
        return masked_load(self, pointers, None, None)

    def store(self: Any, pointers: Any, value: Any, *hints: Any) -> None:
        self.memory.store(pointers.data, value.data, None)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *hints: Any, **more: Any) -> Any:
        dtype = pointers.get_element_ty()
        fill = None if other is None else other.data
        data = self.memory.load(pointers.data, _array(mask), fill, triton.module._get_np_dtype(dtype))
        return triton.handle(data, dtype)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *hints: Any) -> None:
        self.memory.store(pointers.data, value.data, _array(mask))

    builder = triton.builder
    builder.create_load, builder.create_store = load, store
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _update_checked_memory(triton: TritonInterpreter) -> None:
    """Atomic operations go to `builder.memory`, also operations on 16-bit floats, which 3.6.0 and 3.9.0 lack."""
    functions = {getattr(triton.ir.ATOMIC_OP, name): function for name, function in _ATOMICS.items()}

    def update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *order: Any) -> Any:
        old = self.memory.update(pointers.data, _array(mask), functions[op], value.data)
        return triton.handle(old, value.dtype)

    def compare_and_swap(self: Any, pointers: Any, expected: Any, value: Any, *order: Any) -> Any:
        old = self.memory.update(pointers.data, None, _swap, value.data, expected.data)
        return triton.handle(old, value.dtype)

    triton.builder.create_atomic_rmw, triton.builder.create_atomic_cas = update, compare_and_swap


def _count_barriers(triton: TritonInterpreter) -> None:
    """A barrier begins a phase of `builder.memory`; Triton's interpreter (3.6.0, 3.9.0) does nothing there."""

    def barrier(self: Any) -> None:
        self.memory.phase += 1

    triton.builder.create_barrier = barrier


CORRECTIONS: tuple[Correction, ...] = (_access_checked_memory, _update_checked_memory, _count_barriers)


def _swap(old: Array, value: Array, expected: Array) -> Array:
    """Compare and swap: `value` where the old element has the bits of `expected`; elsewhere the old element."""
    bits = f"u{old.dtype.itemsize}"
    return np.where(old.view(bits) == expected.view(bits), value, old)


def _array(mask: Any) -> Array | None:
    """A mask as an array. In 3.6.0 a descriptor's mask is an array already; other accesses have a handle."""
    return None if mask is None else np.asarray(mask.data, np.bool_)
