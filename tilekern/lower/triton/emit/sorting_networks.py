"""Sorting networks as Triton functions: they sort lines, or find the least elements of each line.

The network is K. Batcher's bitonic network, "Sorting networks and their applications" (1968). A line of 2^N elements
is reshaped to N dims of two elements, so a step compares neighbours along one dim. An element x finds its neighbour y
as x ^ (x ^ y). The exclusive or in parentheses is a reduction along the dim: Triton computes it in registers, by
shuffles or through shared memory, as the layout asks. A gather would be a shuffle for every pair of registers.

Stage s sorts groups of 2^s elements. The stages are a loop whose body skips the dims that a stage does not have, so the
code of N steps serves for all N (N + 1) / 2 steps.

An element is one integer word or several; the first word is the most significant. Every other group must descend: its
bits are flipped before the stage and after it.
"""

from __future__ import annotations

import re

from tilekern.ir.records import record

_LANES = {
    # Bit BIT of the lane numbers 0, 1, ..., 2^N - 1.
    "lane_bit": """
@triton.jit
def lane_bit(N: tl.constexpr, BIT: tl.constexpr):
    return tl.reshape(tl.arange(0, 2), [1] * (N - BIT) + [2] + [1] * BIT)
""",
    "lane_numbers": """
@triton.jit
def lane_numbers(N: tl.constexpr):
    lane = lane_bit(N, 0)
    for bit in tl.static_range(1, N):
        lane += lane_bit(N, bit) << bit
    return lane
""",
}

_KINDS = ("lesser", "exchange", "merge", "sort", "least")
_NAME = re.compile(rf"(?:{'|'.join(_KINDS)})([1-9]\d*)")


def is_network(name: str) -> bool:
    """True if `name` is a function of this module."""
    return name in _LANES or _NAME.fullmatch(name) is not None


@record
class _Elements:
    """Elements of several words: the variables `x0`, `x1`, ... of an element, and `y0`, ... of its neighbour."""

    count: int

    @property
    def x(self) -> str:
        """The words of the element."""
        return ", ".join(f"x{n}" for n in range(self.count))

    @property
    def y(self) -> str:
        """The words of the neighbour."""
        return ", ".join(f"y{n}" for n in range(self.count))

    @property
    def less(self) -> str:
        """The condition that the neighbour is less."""
        last = self.count - 1
        text = f"y{last} < x{last}"
        for n in reversed(range(last)):
            text = f"(y{n} < x{n}) | ((y{n} == x{n}) & ({text}))"
        return text

    def per_word(self, line: str) -> str:
        """A line for per_word word, with `{x}` and `{y}` for its variables."""
        return "".join(f"    {line.format(x=f'x{n}', y=f'y{n}')}\n" for n in range(self.count))


def networks(count: int) -> dict[str, str]:
    """The functions for elements of `count` words, by name.

    For N words `x0`, ..., per_word [rows, 2^n], `sortN(x0, ..., n)` returns the last word of per_word sorted line, and
    `leastN(x0, ..., n, m)` the last word of its 2^m least elements, sorted.
    """
    texts = (*_steps(_Elements(count)), *_lines(_Elements(count)))
    return _LANES | {f"{kind}{count}": text for kind, text in zip(_KINDS, texts, strict=True)}


def _steps(elements: _Elements) -> tuple[str, str, str]:
    """The functions `lesser`, `exchange` and `merge`: parts of a stage."""
    count, x, y, less, per_word = elements.count, elements.x, elements.y, elements.less, elements.per_word
    lesser = f"""
@triton.jit
def lesser{count}({x}, {y}):
    less = {less}
{per_word("{x} = tl.where(less, {y}, {x})")}    return {x}
"""
    exchange = f"""
@triton.jit
def exchange{count}({x}, N: tl.constexpr, BIT: tl.constexpr):
{per_word("{y} = {x} ^ tl.xor_sum({x}, N - BIT, keep_dims=True)")}    less = {less}
    swap = less != (lane_bit(N, BIT) != 0)
{per_word("{x} = tl.where(swap, {y}, {x})")}    return {x}
"""
    merge = f"""
@triton.jit
def merge{count}({x}, stage, N: tl.constexpr, MOST: tl.constexpr):
    flip = 0 - ((lane_numbers(N) >> stage) & 1)
{per_word("{x} ^= flip.to({x}.dtype)")}    for n in tl.static_range(MOST):
        if stage >= MOST - n:
            {x} = exchange{count}({x}, N, MOST - 1 - n)
{per_word("{x} ^= flip.to({x}.dtype)")}    return {x}
"""
    return lesser, exchange, merge


def _lines(elements: _Elements) -> tuple[str, str]:
    """The functions `sort` and `least`, of whole lines."""
    count, x = elements.count, elements.x
    last = f"x{count - 1}"
    view = elements.per_word("{x} = tl.reshape({x}, [{x}.shape[0]] + [2] * N)")
    sort = f"""
@triton.jit
def sort{count}({x}, N: tl.constexpr):
    ROWS: tl.constexpr = x0.shape[0]
{view}    for stage in range(1, N + 1):
        {x} = merge{count}({x}, stage, N, N)
    return tl.reshape({last}, (ROWS, 2**N))
"""
    pair = x if count == 1 else f"({x})"
    # The lesser elements of an ascending group and of the descending group behind it form a bitonic sequence.
    least = f"""
@triton.jit
def least{count}({x}, N: tl.constexpr, KEPT: tl.constexpr):
    ROWS: tl.constexpr = x0.shape[0]
{view}    for stage in range(1, KEPT + 1):
        {x} = merge{count}({x}, stage, N, KEPT)
    for n in tl.static_range(N - KEPT):
        {x} = tl.reduce({pair}, N - n - KEPT, lesser{count})
        if KEPT > 0:
            {x} = merge{count}({x}, KEPT, N - 1 - n, KEPT)
    return tl.reshape({last}, (ROWS, 2**KEPT))
"""
    return sort, least


def networks_called(text: str) -> dict[str, str]:
    """The functions of this module that a text calls, directly or not."""
    functions: dict[str, str] = {}
    for count in sorted({int(n) for n in re.findall(r"(?<![\w.])(?:sort|least)([1-9]\d*)\(", text)}):
        functions |= networks(count)
    return functions
