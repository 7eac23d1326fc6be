"""A Func as LLVM IR, ready to be compiled and called."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.ir.debug import Assert
from tilekern.lower.llvm.ir_builder import Module

TASK = "task"
"""The name of the module's function that runs one task: `void @task(ptr buffers, i64 number, ptr scratch)`.

`buffers` points to the addresses of all arrays, results behind arguments; `scratch` to memory of the worker's own,
aligned to 64 bytes. Tasks are independent: they run in any order, on any number of threads.
"""


@dataclass(frozen=True)
class Program:
    """Tasks to run in parallel.

    Attributes:
      name: the kernel's.
      module: has the function `TASK`.
      tasks: how many there are.
      scratch: the bytes that a worker needs.
      zeroed: the numbers of the results that are set to 0 before any task runs.
      checks: the assertions. If there are any, the last result is an int32: 0, or the greatest number of one that
        failed, where the last of n assertions has the number 1 and the first one n.
      prints: whether tasks call `HOST_PRINT`.
    """

    name: str
    module: Module
    tasks: int
    scratch: int
    zeroed: tuple[int, ...] = ()
    checks: tuple[Assert, ...] = ()
    prints: bool = False
