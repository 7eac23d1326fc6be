"""A small interpreter of HLO, for integers that XLA computes from constants, such as tables that a kernel prefetches.

It knows the instructions that such tables are made of. An instruction has no value if it depends on an argument, or on
an instruction of another kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilekern.estimate.tpu import hlo
from tilekern.estimate.tpu.bundles import DumpError
from tilekern.estimate.tpu.hlo import HloInstruction

Array = np.ndarray[Any, Any]
HloValue = Array | tuple["HloValue | None", ...]
"""A value: an array, or a tuple of values; None in a tuple for a value that is not known."""

_MOST_ITERATIONS = 1 << 14
_DTYPES = {"pred": np.bool_, "s32": np.int32, "u32": np.uint32}


def _clamped(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "negate": np.negative,
    "select": np.where,
    "clamp": _clamped,
}
_COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_MONOIDS = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum, "and": np.logical_and, "or": np.logical_or}


class Values:
    """The values of a computation's instructions.

    Args:
      instructions: the instructions of the computation, by name.
      text: the whole HLO, with the computations that the instructions call.
      values: values that are known already, by the instruction's name.
      arguments: the values of the computation's arguments; None for a value that is not known.
    """

    def __init__(
        self,
        instructions: Mapping[str, HloInstruction],
        text: str,
        values: Mapping[str, HloValue] | None = None,
        arguments: Sequence[HloValue | None] = (),
    ) -> None:
        self._instructions, self._text, self._arguments = instructions, text, arguments
        self._values: dict[str, HloValue | None] = dict(values or {})

    def of(self, name: str) -> HloValue | None:
        """The value of an instruction; None if it is not known."""
        if name not in self._values:
            self._values[name] = self._computed(self._instructions[name])
        return self._values[name]

    def words(self, name: str) -> list[int] | None:
        """The 32-bit words of an operand as they lie in memory; None if it is no array of known 32-bit integers."""
        shape = self._instructions[name].shape
        value = self.of(name)
        if isinstance(value, tuple) or value is None or hlo.layout(shape)[0] not in ("s32", "u32"):
            return None
        return hlo.tiled(value, shape)

    def store(self, kernel: HloInstruction, words: Mapping[int, Sequence[int]]) -> None:
        """Keep the words that a kernel has stored into its results. Results are numbered after operands."""
        if not words:
            return
        shapes = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", kernel.shape)
        results: list[HloValue | None] = []
        for number, shape in enumerate(shapes, len(kernel.operands)):
            dtype, dims, _, _ = hlo.layout(shape)
            fits = number in words and dtype in _DTYPES and len(dims) <= 1
            results.append(np.array(words[number], np.int64)[: dims[0] if dims else 1].reshape(dims) if fits else None)
        self._values[kernel.name] = tuple(results) if kernel.shape.startswith("(") else results[0]

    def _computed(self, i: HloInstruction) -> HloValue | None:
        special = {"parameter": self._parameter, "tuple": self._tuple, "get-tuple-element": self._element}
        if i.opcode in special:
            return special[i.opcode](i)
        if i.shape.startswith("(") and i.opcode not in ("fusion", "copy-start"):
            return None
        operands = [self.of(name) for name in i.operands]
        if any(operand is None for operand in operands):
            return None
        if i.opcode == "fusion":
            return self._fusion(i, operands)
        if i.opcode in ("copy", "copy-start", "copy-done"):
            return operands[0]
        if hlo.layout(i.shape)[0] not in _DTYPES:
            return None
        value = _array(i, operands, self._text)
        return None if value is None else np.asarray(value).astype(_DTYPES[hlo.layout(i.shape)[0]])

    def _parameter(self, i: HloInstruction) -> HloValue | None:
        number = int(i.body.partition(")")[0])
        return self._arguments[number] if number < len(self._arguments) else None

    def _tuple(self, i: HloInstruction) -> HloValue:
        return tuple(self.of(name) for name in i.operands)

    def _element(self, i: HloInstruction) -> HloValue | None:
        whole = self.of(i.operands[0])
        return whole[int(_attribute(i, "index"))] if isinstance(whole, tuple) else None

    def _fusion(self, i: HloInstruction, operands: Sequence[HloValue | None]) -> HloValue | None:
        body = hlo.called(i, "calls", self._text)
        return Values(body, self._text, arguments=operands).of(_root(body))


def iterations(loop: HloInstruction, state: HloValue | None, text: str) -> int:
    """The number of iterations of a `while` that begins with the value `state`.

    Raises:
      DumpError: it depends on values that are not known.
    """
    condition, body = (hlo.called(loop, name, text) for name in ("condition", "body"))
    for count in range(_MOST_ITERATIONS):
        goes_on = Values(condition, text, arguments=[state]).of(_root(condition))
        if not isinstance(goes_on, np.ndarray):
            raise DumpError(f"XLA's own loop {loop.name}: how often its kernels run depends on data")
        if not goes_on:
            return count
        state = Values(body, text, arguments=[state]).of(_root(body))
    raise DumpError(f"XLA's own loop {loop.name} does not end within {_MOST_ITERATIONS} iterations")


def _root(computation: Mapping[str, HloInstruction]) -> str:
    (root,) = (name for name, i in computation.items() if i.root)
    return root


def _array(i: HloInstruction, operands: Sequence[Any], text: str) -> Array | None:
    """The value of an instruction, from the values of its operands; None for an instruction of another kind."""
    dims = hlo.layout(i.shape)[1]
    if i.opcode in _ELEMENTWISE:
        return _ELEMENTWISE[i.opcode](*operands)
    match i.opcode:
        case "constant":
            return hlo.constant(i)
        case "compare":
            return _COMPARISONS[_attribute(i, "direction")](*operands)
        case "iota":
            along = int(_attribute(i, "iota_dimension"))
            return np.broadcast_to(np.expand_dims(np.arange(dims[along]), _dims_without(len(dims), [along])), dims)
        case "broadcast":
            return np.broadcast_to(np.expand_dims(operands[0], _dims_without(len(dims), _dims(i))), dims)
        case "reshape" | "bitcast" | "convert":
            return operands[0].reshape(dims)
        case "reduce":
            return _reduced(i, operands, text)
        case "concatenate":
            return np.concatenate(operands, axis=_dims(i)[0])
        case "slice":
            bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", _attribute(i, "slice", r"\{[^}]*\}"))
            return operands[0][tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in bounds)]
        case _:
            return None


def _reduced(i: HloInstruction, operands: Sequence[Any], text: str) -> Array | None:
    function = hlo.called(i, "to_apply", text)
    monoid = _MONOIDS.get(function[_root(function)].opcode)
    if monoid is None:
        return None
    return monoid(monoid.reduce(operands[0], axis=tuple(_dims(i))), operands[1])


def _attribute(i: HloInstruction, name: str, form: str = r"\w+") -> str:
    match = re.search(rf"\b{name}=({form})", i.attributes)
    assert match is not None, f"{i.opcode} without {name}: {i.attributes}"
    return match[1]


def _dims(i: HloInstruction) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", _attribute(i, "dimensions", r"\{[\d,]*\}"))]


def _dims_without(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    """The dims of a rank that are not in `dims`: (3, [1]) -> (0, 2)."""
    return tuple(d for d in range(rank) if d not in dims)
