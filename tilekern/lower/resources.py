"""The resources of a machine that a compiled program takes."""

from __future__ import annotations

from dataclasses import fields

from tilekern.ir.records import record


@record
class Resources:
    """The resources that a compiled program takes; None where the target has no such thing.

    Attributes:
      registers: 32-bit registers of a thread of a GPU.
      spills: bytes of a thread's registers that a GPU's compiler moved to memory for want of registers. Local arrays,
        such as one in the slow path of sine, are no spills.
      shared_bytes: bytes of shared memory of one program on a GPU.
      threads: threads of one program on a GPU.
      occupancy: the part of a multiprocessor's threads that can be resident at once, 0 to 1.
      vmem_bytes: bytes of a TPU's vector memory, by the compiler: blocks, scratch and spilled values.
      planned_bytes: bytes of vector memory that the plan counted on.
      scratch_bytes: bytes of scratch memory, of each thread for "cpu:llvm", of the whole program for "cpu:xla".
      serialized: True if a GPU's compiler makes matrix products of warpgroups wait for one another (ptxas' warning
        C7515), which costs much of their speed.
      tensor_columns: columns of tensor memory of one program on a GPU that has it, of the 512 of a multiprocessor.

    Example:
      >>> print(Resources(registers=32, spills=0, occupancy=0.5))
      registers: 32 a thread, spills: 0 bytes a thread, occupancy: 50 %
    """

    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    occupancy: float | None = None
    vmem_bytes: int | None = None
    planned_bytes: int | None = None
    scratch_bytes: int | None = None
    serialized: bool | None = None
    tensor_columns: int | None = None

    def __str__(self) -> str:
        measured = ((name, value, unit) for name, unit in _UNITS.items() if (value := getattr(self, name)) is not None)
        return ", ".join(f"{name}: {_amount(value, unit)}" for name, value, unit in measured)


_UNITS = {
    "registers": "a thread",
    "spills": "bytes a thread",
    "shared_bytes": "",
    "threads": "a program",
    "occupancy": "%",
    "vmem_bytes": "",
    "planned_bytes": "",
    "scratch_bytes": "",
    "serialized": "",
    "tensor_columns": "",
}
assert set(_UNITS) == {field.name for field in fields(Resources)}


def _amount(value: float, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.0%}".replace("%", " %") if unit == "%" else f"{value:,} {unit}".rstrip()
