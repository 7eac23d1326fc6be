"""Ops that move elements, on padded tiles, as gathers.

Each lane of the result along a dim comes from one lane of the operand. So a slice, a reversal or a padding is a `Take`
by a computed index along each of its dims in turn. A reshape that keeps the order of the padded lanes stays a reshape;
any other reshape is a `Take` from the flat tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.make import Make
from tilekern.ir.shape import Concatenate, Pad, Reverse, Slice
from tilekern.ir.types import strides_of

Shape = tuple[int, ...]


def padded_size(size: int) -> int:
    """The least power of two that is no smaller; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()


def padded(shape: Sequence[int]) -> Shape:
    """The shape with all its sizes padded."""
    return tuple(map(padded_size, shape))


class Movement:
    """Rewrites one op that moves elements.

    Args:
      make: adds ops.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def of(self, op: Op, operands: tuple[Value, ...]) -> Value:
        """The padded result of an op on padded operands."""
        x, *arguments = operands
        match op:
            case Slice():
                return self._slice(op, x)
            case Reverse():
                for dim in op.dims:
                    size = op.result.tile.shape[dim]
                    x = self._pick(x, dim, size, lambda lane, n=size: self._make.of("sub", n - 1, lane))
                return x
            case Pad():
                return self._pad(op, x, arguments[0])
            case Concatenate():
                return self._concatenate(op, operands)
            case DynamicSlice():
                return self._dynamic_slice(op, x, arguments)
            case DynamicUpdateSlice():
                return self._update(op, x, arguments[0], arguments[1:])
            case Take():
                return self._take(op, x, arguments[0])
            case _:
                raise NotImplementedError(op.name)

    def reshape(self, x: Value, before: Shape, after: Shape) -> Value:
        """The elements of `before` in row-major order under the shape `after`."""
        if _keeps_order(before, after):
            return self._make.reshape(x, padded(after))
        make = self._make
        target = padded(after)
        lane = make.lanes((prod(target),), 0)
        # The row-major number of the element at the coordinates of the padded lane ...
        number = make.number(0, lane.tile)
        for size, stride, true in zip(target, strides_of(target), strides_of(after), strict=True):
            digit = make.of("rem", make.of("div", lane, stride), size)
            number = make.of("add", number, make.of("mul", digit, true))
        # ... and the padded lane of the operand where that element lies.
        source = padded(before)
        place = make.number(0, lane.tile)
        for size, stride, lanes in zip(before, strides_of(before), strides_of(source), strict=True):
            digit = make.of("rem", make.of("div", number, max(stride, 1)), max(size, 1))
            place = make.of("add", place, make.of("mul", digit, lanes))
        flat = make.reshape(x, (prod(source),))
        return make.reshape(make.take(flat, self._inside(place, prod(source)), 0), target)

    # --- along one dim ---

    def _pick(self, x: Value, dim: int, size: int, place: Callable[[Value], Value]) -> Value:
        """`size` elements along a dim; `place` maps the lanes of the result, an int32 vector, to lanes of `x`."""
        (lanes,) = padded((size,))
        if x.tile.shape[dim] == 1:  # all lanes come from the only one
            shape = (*x.tile.shape[:dim], lanes, *x.tile.shape[dim + 1 :])
            return self._make.broadcast(x, shape, tuple(range(len(shape))))
        index = self._inside(place(self._make.lanes((lanes,), 0)), x.tile.shape[dim])
        shape = (*x.tile.shape[:dim], lanes, *x.tile.shape[dim + 1 :])
        return self._make.take(x, self._make.along(index, shape, dim), dim)

    def _inside(self, index: Value, size: int) -> Value:
        """An index clamped to the tile: in added lanes it may be anything."""
        return self._make.of("min", self._make.of("max", index, 0), size - 1)

    def _slice(self, op: Slice, x: Value) -> Value:
        make = self._make
        for dim, (start, stop, stride) in enumerate(zip(op.start, op.stop, op.stride, strict=True)):
            before, size = op.operands[0].tile.shape[dim], op.result.tile.shape[dim]
            if (start, stop, stride) != (0, before, 1):
                x = self._pick(x, dim, size, lambda i, a=start, s=stride: make.of("add", make.of("mul", i, s), a))
        return x

    def _pad(self, op: Pad, x: Value, fill: Value) -> Value:
        make = self._make
        shape = list(op.operands[0].tile.shape)
        amounts = zip(op.low, op.high, op.interior, op.result.tile.shape, strict=True)
        for dim, (low, high, interior, size) in enumerate(amounts):
            before = shape[dim]
            if (low, high, size) == (0, 0, before):
                continue
            step = interior + 1

            def place(lane: Value, low: int = low, step: int = step) -> Value:
                return make.of("div", make.of("sub", lane, low), step)

            x = self._pick(x, dim, size, place)
            shape[dim] = size
            lane = make.lanes((x.tile.shape[dim],), 0)
            offset = make.of("sub", lane, low)
            inside = make.of(
                "and", make.of("ge", offset, 0), make.of("lt", offset, before + max(before - 1, 0) * interior)
            )
            if interior:
                inside = make.of("and", inside, make.of("eq", make.of("rem", offset, step), 0))
            which = make.along(inside, x.tile.shape, dim)
            x = make.select(which, x, make.broadcast(fill, x.tile.shape, ()))
        return x

    def _concatenate(self, op: Concatenate, operands: tuple[Value, ...]) -> Value:
        make, dim = self._make, op.dim
        total = op.result.tile.shape[dim]
        result: Value | None = None
        offset = 0
        for old, x in zip(op.operands, operands, strict=True):
            size = old.tile.shape[dim]
            if size == 0:
                continue
            part = self._pick(x, dim, total, lambda lane, a=offset: make.of("sub", lane, a))
            if result is not None:
                from_offset = make.of("ge", make.lanes((part.tile.shape[dim],), 0), offset)
                part = make.select(make.along(from_offset, part.tile.shape, dim), part, result)
            result, offset = part, offset + size
        return operands[0] if result is None else result

    # --- at computed places ---

    def _start(self, start: Value, room: int) -> Value:
        return self._make.of("min", self._make.of("max", start, 0), room)

    def _dynamic_slice(self, op: DynamicSlice, x: Value, starts: Sequence[Value]) -> Value:
        make = self._make
        for dim, (before, size, start) in enumerate(zip(op.operands[0].tile.shape, op.sizes, starts, strict=True)):
            if before == size:
                continue
            first = self._start(start, before - size)
            x = self._pick(x, dim, size, lambda i, s=first: make.of("add", i, make.broadcast(s, i.tile.shape, ())))
        return x

    def _update(self, op: DynamicUpdateSlice, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        make = self._make
        shape, sizes = op.operands[0].tile.shape, op.operands[1].tile.shape
        if 0 in sizes:
            return x
        inside: Value | None = None
        for dim, (before, size, start) in enumerate(zip(shape, sizes, starts, strict=True)):
            if before == size:
                continue
            first = self._start(start, before - size)

            def offset(lane: Value, first: Value = first) -> Value:
                return make.of("sub", lane, make.broadcast(first, lane.tile.shape, ()))

            update = self._pick(update, dim, before, offset)
            place = offset(make.lanes((x.tile.shape[dim],), 0))
            here = make.of("and", make.of("ge", place, 0), make.of("lt", place, size))
            here = make.along(here, x.tile.shape, dim)
            inside = here if inside is None else make.of("and", inside, here)
        return update if inside is None else make.select(inside, update, x)

    def _take(self, op: Take, x: Value, indices: Value) -> Value:
        """A gather whose indices are clamped to the size of the tile before padding."""
        make, dim = self._make, op.dim
        inside = self._inside(indices, op.operands[0].tile.shape[dim])
        if op.along:
            return make.take(x, inside, dim)
        outer, size, inner = (
            prod(part) for part in (x.tile.shape[:dim], x.tile.shape[dim : dim + 1], x.tile.shape[dim + 1 :])
        )
        count = prod(indices.tile.shape)
        lines = make.reshape(x, (outer, size, inner))
        index = make.broadcast(make.reshape(inside, (count,)), (outer, count, inner), (1,))
        return make.reshape(make.take(lines, index, 1), padded(op.result.tile.shape))


def _keeps_order(before: Shape, after: Shape) -> bool:
    """True if a reshape of the padded tile has every element at its place.

    The dims of both shapes, without dims of size 1, are matched in groups of equal products. In each group only the
    first dim may be padded: it adds lanes at the end of the group, and as many to both shapes.
    """
    long = [tuple(n for n in shape if n != 1) for shape in (before, after)]
    return all(
        padded(left[1:]) == left[1:] and padded(right[1:]) == right[1:] and prod(padded(left)) == prod(padded(right))
        for left, right in _groups(*long)
    )


def _groups(before: Shape, after: Shape) -> list[tuple[Shape, Shape]]:
    """The dims of two shapes of equally many elements, in the smallest groups of equal products."""
    groups: list[tuple[Shape, Shape]] = []
    left, right = list(before), list(after)
    while left or right:
        a: list[int] = [left.pop(0)] if left else []
        b: list[int] = [right.pop(0)] if right else []
        while prod(a) != prod(b):
            shorter, remaining = (a, left) if (prod(a) < prod(b) and left) or not right else (b, right)
            if not remaining:
                return [(before, after)]
            shorter.append(remaining.pop(0))
        groups.append((tuple(a), tuple(b)))
    return groups
