"""Sorting networks as Triton functions: what generated source calls to sort lines, or to find the least of them.

K. Batcher, "Sorting networks and their applications" (1968). A line of 2^N elements is viewed as N dims of two
elements, so a step compares neighbours along one dim. Each element gets the other one as the exclusive or of itself and
of the sum modulo 2 of both: Triton computes this sum in registers, by shuffles or through shared memory, as the layout
asks, where a gather would be a shuffle for every pair of registers. Stage s sorts groups of 2^s elements. The stages
are a loop that jumps over the dims a stage lacks, so code of N steps stands for N (N + 1) / 2.

An element is one integer word or several; the first counts most. In every other group the bits of all elements are
flipped before a stage and after it, which turns the order around, so these groups descend.
"""

from __future__ import annotations

import re

_LANES = {
    # Bit BIT of the numbers 0, 1, ..., 2^N - 1 of the lanes of a line.
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
    """True if a name is one of the functions here."""
    return name in _LANES or _NAME.fullmatch(name) is not None


def networks(count: int) -> dict[str, str]:
    """The functions for elements of a number of words, by name.

    Of N words `x0`, ..., each [rows, 2^n], `sortN(x0, ..., n)` is the last word of each sorted line, and
    `leastN(x0, ..., n, m)` that of its 2^m least elements, sorted.
    """
    words, others = ([f"{letter}{n}" for n in range(count)] for letter in "xy")
    x, y = ", ".join(words), ", ".join(others)

    def each(line: str, indent: int = 4) -> str:
        return "".join(f"{' ' * indent}{line.format(x=w, y=o)}\n" for w, o in zip(words, others, strict=True))

    less = f"{others[-1]} < {words[-1]}"
    for word, other in zip(words[-2::-1], others[-2::-1], strict=True):
        less = f"({other} < {word}) | (({other} == {word}) & ({less}))"
    lesser = f"""
@triton.jit
def lesser{count}({x}, {y}):
    less = {less}
{each("{x} = tl.where(less, {y}, {x})")}    return {x}
"""
    exchange = f"""
@triton.jit
def exchange{count}({x}, N: tl.constexpr, BIT: tl.constexpr):
{each("{y} = {x} ^ tl.xor_sum({x}, N - BIT, keep_dims=True)")}    less = {less}
    swap = less != (lane_bit(N, BIT) != 0)
{each("{x} = tl.where(swap, {y}, {x})")}    return {x}
"""
    merge = f"""
@triton.jit
def merge{count}({x}, stage, N: tl.constexpr, MOST: tl.constexpr):
    flip = 0 - ((lane_numbers(N) >> stage) & 1)
{each("{x} ^= flip.to({x}.dtype)")}    for n in tl.static_range(MOST):
        if stage >= MOST - n:
            {x} = exchange{count}({x}, N, MOST - 1 - n)
{each("{x} ^= flip.to({x}.dtype)")}    return {x}
"""
    view = each("{x} = tl.reshape({x}, [{x}.shape[0]] + [2] * N)")
    sort = f"""
@triton.jit
def sort{count}({x}, N: tl.constexpr):
    ROWS: tl.constexpr = x0.shape[0]
{view}    for stage in range(1, N + 1):
        {x} = merge{count}({x}, stage, N, N)
    return tl.reshape({words[-1]}, (ROWS, 2**N))
"""
    pair = x if count == 1 else f"({x})"
    # Of an ascending group and the descending one behind it, the lesser elements are a bitonic sequence.
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
    return tl.reshape({words[-1]}, (ROWS, 2**KEPT))
"""
    texts = (lesser, exchange, merge, sort, least)
    return _LANES | {f"{kind}{count}": text for kind, text in zip(_KINDS, texts, strict=True)}


def networks_called(text: str) -> dict[str, str]:
    """The functions here that a text may call, and what these call."""
    found: dict[str, str] = {}
    for count in sorted({int(n) for n in re.findall(r"(?<![\w.])(?:sort|least)([1-9]\d*)\(", text)}):
        found |= networks(count)
    return found
