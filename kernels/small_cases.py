"""Sizes of the cases that fast tests take in the place of real ones."""

from __future__ import annotations


def shrunk(size: int) -> int:
    """A size below 96 with the same remainder modulo 32: a power of two up to 32 divides both sizes or neither."""
    return size if size < 96 else 64 + size % 32
