"""The fuzzer: random programs and random calls of the library, on every backend, for as long as one likes.

    python -m tilekern fuzz --minutes 30 --seed 1

A program that fails is made simpler, and saved as text, which `replay` runs again: a regression test.
"""

from tilekern.testing.fuzz.findings import Finding, load, replay
from tilekern.testing.fuzz.run import Result, fuzz

__all__ = ["Finding", "Result", "fuzz", "load", "replay"]
