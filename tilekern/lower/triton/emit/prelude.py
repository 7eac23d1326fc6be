"""The prelude of a kernel: the device functions that its generated source calls."""

from __future__ import annotations

import re

from tilekern.lower.triton.emit.sorting_networks import is_network, networks_called

_COMBINE = {
    "maximum": "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "add": "x + y",
    "multiply": "x * y",
    "bitwise_and": "x & y",
    "bitwise_or": "x | y",
    "bitwise_xor": "x ^ y",
    "first": "x",
}

_FUNCTIONS = {
    # log(e^x + e^y) = high + log(1 + e^(low - high)). If both are -inf, or one is inf, the difference would be NaN.
    "log_add_exp": """
@triton.jit
def log_add_exp(x, y):
    high = maximum(x, y)
    low = minimum(x, y)
    return tl.where(low == high, high + tl.log(tl.full((), 2.0, high.dtype)), high + tl.log(1.0 + tl.exp(low - high)))
""",
    # h -> a h + b, and then h -> c h + d.
    "linear_step": """
@triton.jit
def linear_step(a, b, c, d):
    return a * c, c * b + d
""",
    # Of equal elements the first one wins; a NaN wins against numbers.
    "arg_maximum": """
@triton.jit
def arg_maximum(x, i, y, j):
    equal = (x == y) | ((x != x) & (y != y))
    left = tl.where(equal, i < j, (x > y) | ((x != x) & (y == y)))
    return tl.where(left, x, y), tl.where(left, i, j)
""",
    "arg_minimum": """
@triton.jit
def arg_minimum(x, i, y, j):
    equal = (x == y) | ((x != x) & (y != y))
    left = tl.where(equal, i < j, (x < y) | ((x != x) & (y == y)))
    return tl.where(left, x, y), tl.where(left, i, j)
""",
    # Division by n > 0 that rounds down; Triton's own rounds toward zero.
    "floor_divide": """
@triton.jit
def floor_divide(x, n):
    quotient = x // n
    return tl.where(x - quotient * n < 0, quotient - 1, quotient)
""",
    "floor_remainder": """
@triton.jit
def floor_remainder(x, n):
    remainder = x % n
    return tl.where(remainder < 0, remainder + n, remainder)
""",
}


def _combine(name: str) -> str:
    return f"\n@triton.jit\ndef {name}(x, y):\n    return {_COMBINE[name]}\n"


def prelude(text: str) -> str:
    """The definitions of all functions that `text` calls, directly or not, in a fixed order."""
    available = {name: _combine(name) for name in _COMBINE} | _FUNCTIONS | networks_called(text)
    needed: set[str] = set()
    frontier = text
    while True:
        words = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", frontier))
        called = {name for name in available if name in words and name not in needed}
        if not called:
            break
        needed |= called
        frontier = "".join(available[name] for name in called)
    return "".join(f"\n{definition}" for name, definition in available.items() if name in needed)


def reserved(name: str) -> bool:
    """True if a prelude may define a function of this name, so that no variable may have it."""
    return name in _COMBINE or name in _FUNCTIONS or is_network(name)
