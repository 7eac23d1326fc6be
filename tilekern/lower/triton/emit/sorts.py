"""Sorts and top-k as calls of sorting networks, with keys and places packed into as few words as possible."""

from __future__ import annotations

from collections.abc import Sequence

from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.records import record
from tilekern.lower.triton.emit.source_text import is_tight, shape_text


@record
class _Field:
    """A tile as a bit field of a word.

    Attributes:
      text: expression of the tile.
      width: bits of the field.
      signed: True if elements may be negative.
    """

    text: str
    width: int
    signed: bool = True


def sorting(op: Sort | TopK, texts: Sequence[str]) -> str:
    """The expression of a legal sort or top-k.

    The result is an int32, or has the dtype of the key if a sort with one key picks that. The places are the last key,
    in the lowest bits of the last word, so no two elements are equal.
    """
    shape = op.operands[0].tile.shape
    depth = shape[1].bit_length() - 1
    count = op.num_keys if isinstance(op, Sort) else 1
    keys = [
        _Field(text if is_tight(text) else f"({text})", 8 * x.tile.dtype.itemsize)
        for text, x in zip(texts[:count], op.operands, strict=False)
    ]
    if isinstance(op, Sort) and op.pick < count:
        (key,) = keys
        call = f"sort1({_word(keys)}, {depth})"
        return call if key.width > 16 else f"{call}.to(tl.int16)"
    if isinstance(op, TopK):
        keys = [_Field(f"(~{key.text})", key.width) for key in keys]
    place = _Field(f"tl.broadcast_to(tl.arange(0, {shape[1]})[None, :], {shape_text(shape)})", _width(depth), False)
    words = _words([*keys, place])
    name, depths = ("sort", f"{depth}") if isinstance(op, Sort) else ("least", f"{depth}, {_depth(op)}")
    call = f"{name}{len(words)}({', '.join(map(_word, words))}, {depths})"
    if len(words[-1]) == 1:
        return call
    return f"({call} & 65535).to(tl.int32)" if place.width == 16 else f"{call}.to(tl.int32)"


def _depth(op: TopK) -> int:
    return op.k.bit_length() - 1


def _width(depth: int) -> int:
    """Bits of a place in a line of 2^depth lanes."""
    return 16 if depth <= 16 else 32


def _words(fields: Sequence[_Field]) -> list[list[_Field]]:
    """Pack fields into words: each word takes as many fields as 64 bits hold."""
    words: list[list[_Field]] = [[]]
    for field in fields:
        if sum(f.width for f in words[-1]) + field.width > 64:
            words.append([])
        words[-1].append(field)
    return words


def _word(fields: Sequence[_Field]) -> str:
    """A word of fields, the first in the highest bits; the other fields are made unsigned."""
    first, *lower_fields = fields
    total = sum(f.width for f in fields)
    dtype = "tl.int32" if total <= 32 else "tl.int64"
    text = first.text if first.width == total > 16 else f"{first.text}.to({dtype})"
    for field in lower_fields:
        raised = f"{field.text}.to({dtype})" + (f" + {1 << (field.width - 1)}" if field.signed else "")
        text = f"(({text} << {field.width}) | ({raised}))"
    return text
