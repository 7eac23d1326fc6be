"""A kernel as a module of LLVM IR, and the facts that a call needs."""

from __future__ import annotations

from tilekern.ir.debug import Assert
from tilekern.ir.records import record
from tilekern.lower.llvm.ir_builder import Module
from tilekern.source import UNKNOWN, Loc

TASK = "task"
"""The function that runs one task: `void @task(ptr buffers, i64 number, ptr scratch)`.

`buffers` points to the addresses of all arrays, results after arguments. `scratch` points to memory of the thread,
aligned to 64 bytes. Tasks are independent: they run in any order, on any number of threads.
"""


@record
class Program:
    """A kernel as tasks that may run in parallel.

    Attributes:
      name: the name of the kernel.
      module: the module, with the function `TASK`.
      tasks: the number of tasks.
      scratch: the scratch memory of a thread, in bytes.
      zeroed: the numbers of the results that are set to 0 before any task runs.
      checks: the assertions. If there are any, the last result is an int32: 0, or the greatest number of an assertion
        that failed. Of n assertions, the last one has the number 1, and the first one n.
      prints: True if tasks call `HOST_PRINT`.
      loc: the place of the kernel.
    """

    name: str
    module: Module
    tasks: int
    scratch: int
    zeroed: tuple[int, ...] = ()
    checks: tuple[Assert, ...] = ()
    prints: bool = False
    loc: Loc = UNKNOWN
