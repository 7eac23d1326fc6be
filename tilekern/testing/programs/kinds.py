"""Kinds of ops and values, by which random programs are tallied and steered."""

from __future__ import annotations

from tilekern.ir.core import Op
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import kind_of
from tilekern.testing.programs.facts import COMPARISONS, SMOOTH, SMOOTH_PAIRS

NUMBERS = ("float", "signed", "unsigned")
EVERY = (*NUMBERS, "bool")
"""Kinds of dtypes."""

RELATIONS = ("same", "broadcast", "sliced from 0", "sliced inside", "transposed", "reversed", "reshaped")
"""How an operand comes from the value that its producer made."""

_COMPUTED = (
    "arithmetic",
    "comparison",
    "smooth",
    "select",
    "convert",
    "dot",
    "reduce",
    "scan",
    "linear_scan",
    "sort",
    "arg_reduce",
    "take",
    "dynamic",
    "concatenate",
    "pad",
)
PRODUCERS = ("index", "carry", "load", "constant", "iota", *_COMPUTED, "region")
"""Kinds of values. What is no op's result is the index of a tile, or a carry; a region is a fold, a switch or such."""
CONSUMERS = (*_COMPUTED, "load", "store", "atomic", "carry")
"""Kinds of ops that read tiles; what begins a carry, or is yielded, is a carry."""

# Ops of one kind, by name.
_KINDS = {
    "bitcast": "convert",
    "top_k": "arg_reduce",
    "dynamic_slice": "dynamic",
    "dynamic_update_slice": "dynamic",
    "fold": "region",
    "while": "region",
    "switch": "region",
    "hoist": "region",
}
# The feature of programs that a kind belongs to, see `control.Generator.MOVES`; the others are in all programs.
_FEATURES = {
    "smooth": "smooth",
    "dot": "dot",
    "reduce": "reduce",
    "scan": "order",
    "linear_scan": "order",
    "sort": "order",
    "arg_reduce": "order",
    "take": "places",
    "dynamic": "places",
    "concatenate": "shape",
    "pad": "shape",
    "atomic": "atomic",
    "carry": "fold",
    "region": "fold",
    "arithmetic": "elementwise",
    "comparison": "elementwise",
    "select": "elementwise",
    "convert": "elementwise",
    "iota": "elementwise",
}


def kind(op: Op) -> str:
    """The kind of an op, one of `CONSUMERS` or `PRODUCERS`; its name, if it only moves elements."""
    if isinstance(op, Elementwise):
        if op.function in COMPARISONS:
            return "comparison"
        floats = kind_of(op.operands[0].tile.dtype) == "float"
        return "smooth" if floats and op.function in (*SMOOTH, *SMOOTH_PAIRS) else "arithmetic"
    return _KINDS.get(op.name, op.name)


def feature(kind: str) -> str:
    """The feature of programs that a kind belongs to; "" if all programs have it."""
    return _FEATURES.get(kind, "")


# Kinds of dtypes of the results of kinds of ops, and of the values that they compute with; of others any.
_MAKES = {
    "comparison": ("bool",),
    "smooth": ("float",),
    "linear_scan": ("float",),
    "index": ("signed",),
    "arg_reduce": ("signed",),
    **dict.fromkeys(("dot", "scan"), NUMBERS),
}
_TAKES = {
    "smooth": ("float",),
    "linear_scan": ("float",),
    **dict.fromkeys(("dot", "scan", "arg_reduce"), NUMBERS),
}
# Ops on tiles that have a dim, and ops whose results have one.
_ALONG_DIMS = ("dot", "scan", "linear_scan", "sort", "arg_reduce", "concatenate")
_WITH_DIMS = ("scan", "linear_scan", "sort", "concatenate", "iota")


def impossible(op: str, producer: str, relation: str, several: bool) -> str:
    """The reason why no op of a kind has an operand of a producer, in some relation; "" if there is none.

    Args:
      op: the kind of the op.
      producer: the kind of the op that computes the value.
      relation: how the value was moved.
      several: the value is used in other ways, too.
    """
    makes, takes = _MAKES.get(producer, EVERY), _TAKES.get(op, EVERY)
    if not set(makes) & set(takes):
        return f"{op} takes {' and '.join(takes)}, and {producer} makes {' and '.join(makes)}"
    if producer == "smooth" and op in ("comparison", "arg_reduce"):
        return "what rounds must not reach an op that jumps: correct backends may differ"
    if producer == "index" and relation == "same" and op in _ALONG_DIMS:
        return "an index is a scalar, and these ops take tiles with dims"
    if op == "load" and producer in _WITH_DIMS and relation == "same" and makes == ("float",):
        return "a load takes floats as its fill, a scalar, which these are not"
    if producer == "index" and op == "store" and relation != "same" and not several:
        return "the place of a store depends on the index, too, so that each element is stored once"
    return ""
