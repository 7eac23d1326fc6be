"""What the Triton emitter makes: source text, and what is needed to compile, launch or interpret it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from tilekern.ir.core import Array
from tilekern.ir.types import DType
from tilekern.source import Loc


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor, made on the host: a box of an array that one copy moves. In elements, outermost dim first.

    Attributes:
      shape: of the array, its dims in the order that suits the copy.
      strides: of these dims; the last one is 1.
      block: of the box.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Argument:
    """One parameter of the entry function: a pointer to the first element of a buffer, or a descriptor of it.

    Attributes:
      name: of the parameter.
      dtype: of the elements.
      descriptor: None for a pointer.
    """

    name: str
    dtype: DType
    descriptor: Descriptor | None = None


@dataclass(frozen=True)
class Result:
    """One result of the call.

    Attributes:
      shape: of the buffer that the kernel writes; for a sum, with a dim in front that counts partial sums.
      dtype: of that buffer.
      final: the dtype of the Func's output.
      zeroed: whether the buffer must be 0 before the launch.
      alias: the number of the operand whose buffer this is, None for a fresh one.
      partial_sums: whether the first dim of the buffer counts partial sums, which add up to the output.
    """

    shape: tuple[int, ...]
    dtype: DType
    final: DType
    zeroed: bool = False
    alias: int | None = None
    partial_sums: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PrintedValue:
    """One `tl.device_print` of a program: a value of a `tk.debug_print`, or its text if there are no values.

    Attributes:
      format: of the `tk.debug_print`.
      operand: the number of the value among those of the `tk.debug_print`.
      shape: of the value, without the lanes by which its tile is padded.
      last: whether no other value of the same `tk.debug_print` follows.
    """

    format: str
    operand: int = 0
    shape: tuple[int, ...] = ()
    last: bool = True


@dataclass(frozen=True)
class Program:
    """A Func as Triton source.

    The call has buffers: its operands, then its results; the entry function has one argument for each, in that order.

    Attributes:
      name: of the entry function.
      text: Python source, complete; the same Func always gives the same text.
      arguments: the parameters of the entry function.
      operands: for each operand of the call, the number of the array it is: the Func's inputs count first, then the
        `constants`. One array may be several operands.
      constants: arrays that the kernel loads and nobody passes.
      results: the call's results, in the order of the Func's outputs.
      programs: how many programs run, numbered by `tl.program_id(0)`.
      num_warps: how many warps of 32 threads a program has.
      num_stages: how many iterations of a loop may have their loads in flight.
      lines: for each line of `text` (the first is number 1), the user's place that it comes from.
      loc: the user's function.
      prints: for each line of `text` that is a `tl.device_print`, what it prints.
      messages: for each line of `text` that is a `tl.device_assert`, the user's message.
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
