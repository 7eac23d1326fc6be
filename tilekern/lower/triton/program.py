"""Programs: Triton source text, with the data to compile, launch or interpret it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import Literal

from tilekern.ir.core import Array
from tilekern.ir.records import record
from tilekern.ir.types import DType
from tilekern.source import Loc


@record
class Descriptor:
    """A TMA descriptor, made on the host: it describes an array and the box that one copy moves.

    All numbers are elements, outermost dim first.

    Attributes:
      shape: shape of the array, with its dims in the order of the descriptor.
      strides: strides of the array in the same order; the last is 1.
      block: shape of the box.
      divided: the dim along which the thread blocks of a cluster divide the box; None if each has the whole.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    divided: int | None = None


@record
class Argument:
    """One parameter of the entry function: a pointer to the first element of a buffer, or a descriptor of it.

    Attributes:
      name: name of the parameter.
      dtype: dtype of the elements.
      descriptor: None for a pointer.
    """

    name: str
    dtype: DType
    descriptor: Descriptor | None = None


@record
class Result:
    """One result of the call.

    Attributes:
      shape: shape of the buffer that the kernel writes; for a sum, with a dim in front that counts partial sums.
      dtype: dtype of that buffer.
      final: dtype of the Func's output.
      zeroed: True if the buffer must be 0 before the launch.
      alias: number of the operand that shares the buffer, None for a fresh buffer.
      partial_sums: True if the first dim of the buffer counts partial sums, which add up to the output.
    """

    shape: tuple[int, ...]
    dtype: DType
    final: DType
    zeroed: bool = False
    alias: int | None = None
    partial_sums: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the buffer, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@record
class PrintedValue:
    """One `tl.device_print` of a program: a value of a `tk.debug_print`, or its text if there are no values.

    Attributes:
      format: format of the `tk.debug_print`.
      operand: number of the value in the `tk.debug_print`.
      shape: shape of the value, without the lanes by which its tile is padded.
      last: True for the last value of the `tk.debug_print`.
    """

    format: str
    operand: int = 0
    shape: tuple[int, ...] = ()
    last: bool = True


@record
class Program:
    """A Func as Triton source.

    The buffers of a call are its operands, then its results; the entry function has one argument for each, in this
    order.

    Attributes:
      name: name of the entry function.
      text: complete Python source; the same Func always gives the same text.
      arguments: parameters of the entry function.
      operands: for each operand of the call, the number of its array; the Func's inputs count first, then the
        `constants`. One array may be several operands.
      constants: arrays that the kernel loads and no caller passes.
      results: results of the call, in the order of the Func's outputs.
      programs: number of programs, numbered by `tl.program_id(0)`.
      num_warps: warps of 32 threads in a program.
      num_stages: iterations of a loop whose loads may be in flight at once.
      lines: for each line of `text` (the first is number 1), its place in the user's source.
      loc: place of the user's function.
      prints: for each line of `text` that is a `tl.device_print`, the value that it prints.
      messages: for each line of `text` that is a `tl.device_assert`, the user's message.
      language: of `text`; Gluon is Triton's lower language.
      start_registers: registers of each thread when a program starts, for programs whose warps hand registers on; None
        for as many as the compiler takes.
      group: programs of the grid that a thread block computes side by side; more than one in Gluon only, where
        `programs` counts thread blocks.
      cluster: thread blocks that compute a program together, each a part of its rows; more than one in Gluon only,
        where `programs` counts clusters then.
    """

    name: str
    text: str
    arguments: tuple[Argument, ...]
    operands: tuple[int, ...]
    constants: tuple[Array, ...]
    results: tuple[Result, ...]
    programs: int
    num_warps: int
    num_stages: int
    lines: dict[int, Loc]
    loc: Loc
    prints: Mapping[int, PrintedValue] = field(default_factory=dict[int, PrintedValue])
    messages: Mapping[int, str] = field(default_factory=dict[int, str])
    language: Literal["triton", "gluon"] = "triton"
    start_registers: int | None = None
    group: int = 1
    cluster: int = 1
