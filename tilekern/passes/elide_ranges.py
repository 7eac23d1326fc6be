"""Drop the comparisons of lanes with the range of a fold, where the range is made of whole tiles.

Needs: a verified Func. Gives: no comparison of the left-hand sides below is left in the body of a fold.

    fold k from s to e, tiles of b { lane >= s - b * k }   → true    s a multiple of b, at most the extent
    fold k from s to e, tiles of b { lane < e - b * k }    → true    e a multiple of b

The tiles are s // b <= k < cdiv(min(e, extent), b). With s and e multiples of b, this is s <= b * k and
b * k + b <= e: each lane in 0..b - 1 lies in the range. Kernels whose ranges are cut at multiples of the block, as
`stop=tile.stop` cuts them, so need no masks.

The language gives an empty range the stop 0, and ignores a stop behind the extent. So select(p, e, 0) as a stop, and
select(q, e, c) in a comparison, with c >= the end of the last tile, stand for e.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilekern.ir.analysis.affine import Affine, Lines, between
from tilekern.ir.analysis.ranges import Interval, analyze, update
from tilekern.ir.compute import Constant, Select, splat
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import I32

Definition = Callable[[Value], Op | None]


def elide_ranges(func: Func) -> Func:
    """Apply the rewrites above."""
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold) or op.axis.block == 1:
            return None
        proof = _Range(op, rewriter.definition, ranges)
        decided = {inner for inner in op.body.ops if isinstance(inner, Elementwise) and proof.holds(inner)}
        return rewriter.add(op.copy(regions=(_Decided(decided).copy_block(op.body),))) if decided else None

    return Rewriter(rule).run(func)


class _Decided(Cloner):
    """Copies a body, with true in the place of the decided comparisons."""

    def __init__(self, decided: set[Elementwise]) -> None:
        super().__init__()
        self._decided = decided

    def visit(self, op: Op) -> Sequence[Value]:
        if op not in self._decided:
            return super().visit(op)
        value = self.one(splat(True, op.result.tile, loc=op.loc))
        self.replace(op.result, value)
        return [value]


class _Range:
    """Facts that follow from the range of a fold."""

    def __init__(self, op: Fold, definition: Definition, ranges: Mapping[Value, Interval]) -> None:
        self._op, self._definition, self._ranges = op, definition, ranges
        self._lines = Lines(op, definition, ranges)
        self._stop = self._chosen(op.stop, lambda number: number == 0)

    def holds(self, op: Elementwise) -> bool:
        """True if a comparison in the body holds in all lanes of all tiles."""
        if op.function not in ("lt", "le", "gt", "ge") or op.operands[0].tile.dtype != I32:
            return False
        x, y = op.operands if op.function in ("gt", "ge") else op.operands[::-1]
        greater, less = self._lines.of(x), self._lines.of(y)
        if greater is None or less is None:
            return False
        strict = int(op.function in ("lt", "gt"))
        line = greater.plus(less, -1).plus(between(strict, strict), -1)  # at least 0 where the comparison is true
        return not self._lines.unknown(line) and (self._behind_start(line) or self._before_stop(line))

    def _behind_start(self, line: Affine) -> bool:
        """b * k - s + lane >= 0."""
        axis = self._op.axis
        (bound,) = line.scalars if len(line.scalars) == 1 else (None,)
        if bound is None or line.scalars[bound] != -1 or line.slope != axis.block or line.low < 0:
            return False
        interval = self._ranges.get(bound)
        reaches = interval is not None and (interval.high <= axis.extent or axis.extent % axis.block == 0)
        return reaches and self._is_start(bound) and self._multiple(bound)

    def _is_start(self, bound: Value) -> bool:
        """True if a bound is the start of the fold, or max(start, 0)."""
        op = self._definition(bound)
        sides = op.operands if isinstance(op, Elementwise) and op.function == "max" else ()
        clamped = self._op.start in sides and any(self._constant(v) == 0 for v in sides)
        return bound is self._op.start or clamped

    def _before_stop(self, line: Affine) -> bool:
        """e - b * k - lane - 1 >= 0."""
        axis = self._op.axis
        (bound,) = line.scalars if len(line.scalars) == 1 else (None,)
        if bound is None or line.scalars[bound] != 1 or line.slope != -axis.block or line.low < -axis.block:
            return False
        stop = self._chosen(bound, lambda number: number >= axis.tiles * axis.block)
        return stop is self._stop and self._multiple(stop)

    def _chosen(self, value: Value, is_harmless: Callable[[int], bool]) -> Value:
        """`select(p, x, c)` → x, if c is a harmless constant; any other value is returned itself."""
        op = self._definition(value)
        if not isinstance(op, Select):
            return value
        _, on_true, on_false = op.operands
        constant = self._constant(on_false)
        return on_true if constant is not None and is_harmless(constant) else value

    def _constant(self, value: Value) -> int | None:
        op = self._definition(value)
        return int(op.array.reshape(-1)[0]) if isinstance(op, Constant) and op.array.size else None

    def _multiple(self, value: Value) -> bool:
        """True if a scalar is a multiple of the block; arithmetic that may wrap around has no interval."""
        block, number = self._op.axis.block, self._constant(value)
        if number is not None:
            return number % block == 0
        op = self._definition(value)
        if not isinstance(op, Elementwise) or value not in self._ranges:
            return False
        if op.function == "mul":
            return any(self._multiple(v) for v in op.operands)
        return op.function in ("add", "sub", "min", "max") and all(self._multiple(v) for v in op.operands)
