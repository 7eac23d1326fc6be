"""Kinds of ops and values, by which random programs are tallied and steered."""

from __future__ import annotations

from tilekern.ir.core import Op
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import kind_of
from tilekern.testing.programs.facts import COMPARISONS, SMOOTH, SMOOTH_PAIRS

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
    "linear_scan": "scan",
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


def impossible(op: str, producer: str, relation: str) -> str:
    """The reason why no op of a kind has an operand of a producer, in some relation; "" if there is none."""
    if producer == "comparison" and op in ("smooth", "dot", "scan", "arg_reduce"):
        return f"{op} takes no bool"
    if op == "smooth" and producer in ("index", "arg_reduce"):
        return "smooth functions take floats, which these are not"
    if producer == "smooth" and op in ("comparison", "arg_reduce"):
        return "what rounds must not reach an op that jumps: correct backends may differ"
    if producer == "index" and relation == "same" and op in ("dot", "scan", "sort", "arg_reduce", "concatenate"):
        return "an index is a scalar, and these ops take tiles with dims"
    return ""
