"""Addresses of an access as text: offsets, masks and coordinates of its lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from tilekern.ir.analysis.ranges import INT32, Interval, digit_interval, position_interval
from tilekern.ir.core import Value
from tilekern.ir.memory import Dim, MemoryOp, Position, Term
from tilekern.ir.types import strides_of
from tilekern.lower.triton.emit.source_text import Expr, is_tight


class Addresses:
    """The addresses of one access.

    Args:
      op: the access.
      operands: the expressions of its positions.
      ranges: intervals of the positions.
      bind: assigns an expression to a variable and returns its name; the same expression gets the same variable.
    """

    def __init__(
        self,
        op: MemoryOp,
        operands: Sequence[Expr],
        ranges: Mapping[Value, Interval],
        bind: Callable[[str, str], str],
    ) -> None:
        self._op, self._operands, self._bind = op, operands, bind
        self._intervals = [ranges.get(v) for v in op.positions]
        shape = op.extents
        self._strides = strides_of(shape)
        # Offsets are int64 where int32 cannot count the elements.
        self._wide = prod(shape) > INT32.high or any(not self._is_int32(d) for d in op.access.dims)

    @property
    def all_out_of_bounds(self) -> bool:
        """True if no lane can be in bounds: the array is empty, or the interval of a position lies outside."""
        shape = self._op.extents
        reaches = [self._reach(dim) for dim in self._op.access.dims]
        return any(
            size == 0 or (high is not None and high < 0) or (low is not None and low >= size)
            for (low, high), size in zip(reaches, shape, strict=True)
        )

    def position(self, number: int) -> str:
        """The position along a dim: a scalar, or an int32 vector for a gather."""
        return self._position(self._op.access.dims[number].position, wide=self._wide)

    def coordinate(self, number: int) -> str:
        """The position along a dim for a descriptor: an int32 scalar, even where offsets are int64."""
        return self._position(self._op.access.dims[number].position, wide=False)

    def offset(self) -> tuple[str, str]:
        """The offset of the first lane (a scalar), and of all lanes relative to it (a tile); in elements, "" for 0."""
        scalars: list[str] = []
        tiles: list[str] = []
        for number, dim in enumerate(self._op.access.dims):
            stride = self._strides[number]
            if dim.kind == "index":
                scalars.append(_times(self.position(number), stride))
            else:
                tiles.append(_times(self._unsqueezed(self._lanes(number), number), stride))
        return " + ".join(s for s in scalars if s != "0"), " + ".join(t for t in tiles if t != "0")

    def mask(self) -> str:
        """The mask of lanes in bounds, along the dims where this is not proved; "" if it is proved for all."""
        conditions: list[str] = []
        for number, (dim, size) in enumerate(zip(self._op.access.dims, self._op.extents, strict=True)):
            if dim.in_bounds:
                continue
            where = self.position(number) if dim.kind == "index" else self._lanes(number)
            low, high = self._reach(dim)
            if high is None or high >= size:
                conditions.append(self._unsqueezed(f"({where} < {size})", number))
            if low is None or low < 0:
                conditions.append(self._unsqueezed(f"({where} >= 0)", number))
        return " & ".join(conditions)

    # --- parts ---

    def _lanes(self, number: int) -> str:
        """The positions of all lanes along a dim: the name of a vector."""
        dim = self._op.access.dims[number]
        where = self.position(number)
        if dim.kind != "block":
            if not any(t.stride and self._op.positions[t.operand].tile.shape for t in dim.position.terms):
                where = f"tl.full(({dim.size},), {where}, {'tl.int64' if self._wide else 'tl.int32'})"
            return where if where.isidentifier() else self._bind("rows", where)
        lanes = f"tl.arange(0, {dim.size}).to(tl.int64)" if self._wide else f"tl.arange(0, {dim.size})"
        (name, *more_texts) = [self._operands[t.operand].text for t in dim.position.terms] or [""]
        hint = f"{name}_lanes" if name.isidentifier() and not more_texts else "lanes"
        return self._bind(hint, lanes if where == "0" else f"{where} + {lanes}")

    def _unsqueezed(self, vector: str, number: int) -> str:
        """A vector, expanded to lie along its dim of the tile; scalars stay scalars."""
        lane, rank = self._op.access.lanes[number], len(self._op.access.shape)
        if lane is None or rank == 1:
            return vector
        return f"{vector}[{', '.join(':' if n == lane else 'None' for n in range(rank))}]"

    def _position(self, position: Position, wide: bool) -> str:
        parts = [self._term(term, wide) for term in position.terms]
        if position.const or not parts:
            parts.append(str(position.const))
        text = parts[0]
        for part in parts[1:]:
            text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
        return text

    def _term(self, term: Term, wide: bool) -> str:
        digit = self._digit(term)
        if wide and not digit.lstrip("-").isdigit():
            digit = f"{_tight(digit)}.to(tl.int64)"
        return _times(digit, term.stride)

    def _digit(self, term: Term) -> str:
        """`(operand // div) % mod`, rounded down. Triton rounds toward zero, which is the same for operands >= 0."""
        text, interval = self._operands[term.operand].operand, self._intervals[term.operand]
        number = self._operands[term.operand].number
        if number is not None:
            return str(term.digit(int(number)))
        if term.div > 1:
            signed = interval is None or interval.low < 0
            text = f"floor_divide({text}, {term.div})" if signed else f"{text} // {term.div}"
            interval = digit_interval(Term(0, 1, term.div), interval)
        if term.mod:
            signed = interval is None or interval.low < 0
            text = f"floor_remainder({text}, {term.mod})" if signed else f"{text} % {term.mod}"
        return text

    def _reach(self, dim: Dim) -> tuple[int | None, int | None]:
        """The first and the last element that the access may touch along a dim, each None if it is unknown."""
        where = position_interval(dim.position, self._intervals)
        if where is None:
            return None, None
        return where.low, where.high + (dim.size - 1 if dim.kind == "block" else 0)

    def _is_int32(self, dim: Dim) -> bool:
        """True if no intermediate result of a position overflows int32."""
        total = dim.position.const
        low = high = total
        for term in dim.position.terms:
            digit = digit_interval(term, self._intervals[term.operand])
            if digit is None:
                return (
                    term.stride == 1
                    and len(dim.position.terms) == 1
                    and dim.position.const == 0
                    and dim.kind != "block"
                )
            ends = digit.low * term.stride, digit.high * term.stride
            low, high = low + min(0, *ends), high + max(0, *ends)
        return low >= INT32.low and high + dim.size <= INT32.high


def _tight(text: str) -> str:
    return text if is_tight(text) else f"({text})"


def _times(text: str, stride: int) -> str:
    """A product of an expression, which may be a sum, and a number."""
    if stride == 0 or text == "0":
        return "0"
    if text.lstrip("-").isdigit():
        return str(int(text) * stride)
    if stride == 1:
        return text
    return f"{text} * {stride}" if is_tight(text) else f"({text}) * {stride}"
