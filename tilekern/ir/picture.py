"""Pictures of a Func: its arrays, the tiles of the grid over them, and the tiles of one program, as SVG.

Lines and words have the colour of the text around the picture, so it fits a light and a dark page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import combinations

from tilekern.errors import ArgumentError
from tilekern.ir.analysis.touches import LONGEST, Touch, touches
from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Atomic, Load, MemoryOp
from tilekern.ir.records import record
from tilekern.ir.types import dtype_name

Span = tuple[int, int]  # the first element along a dim, and the number of elements

_COLOURS = {"load": "#1f9e89", "store": "#e76f51", "atomic": "#8e6bbf"}
_LARGEST, _UNIT, _SMALLEST = 230.0, 18.0, 14.0  # pixels: of the longest side, of an element, of the shortest side
_GAP, _HEAD, _FOOT, _LINE, _WIDEST = 34.0, 26.0, 24.0, 20.0, 900.0
_CHARACTER = 7.4  # the width of a character of 13 pixels, an upper bound
_EDGE = 2.0  # pixels around all, for the lines of the outermost boxes
_SEEN = 3.0  # pixels: the least distance of two lines
_LETTERS, _MIDDLE = 'fill="currentColor" stroke="none"', 'text-anchor="middle"'


@record
class Picture:
    """A picture as SVG. Notebooks show it; `str(picture)` is a file of its own.

    Attributes:
      svg: one element of SVG, to stand inside of a page, whose text colour it takes.
    """

    svg: str

    def __str__(self) -> str:
        light, dark = "svg{color:#1c2b2b;background:#fff}", "svg{color:#e3e9e9;background:#1e2129}"
        style = f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
        start, rest = self.svg.split(">", 1)
        return f'{start} xmlns="http://www.w3.org/2000/svg">{style}{rest}'

    def _repr_html_(self) -> str:
        return self.svg


@record
class _Drawn:
    """An array with two of its dims, of which a vector has an added first.

    Attributes:
      title: its name, type, and the place of the tiles along all other dims.
      sides: the extents of the two dims.
      grid: along each of the two dims the spans of the tiles of all programs, in order. Where accesses
        overlap, as a stencil's do, the spans of one access.
      bounds: along each of the two dims the first element of all tiles and of the array, and the end of the last.
      tiles: the tiles of the program, each with its action, in the order of the program's steps.
      actions: for people, what the program does: "load 4 × 4".
    """

    title: tuple[str, str]
    sides: Span
    grid: tuple[tuple[Span, ...], tuple[Span, ...]]
    bounds: tuple[Span, Span]
    tiles: tuple[tuple[str, tuple[Span, Span]], ...]
    actions: str


def picture(func: Func, program: Sequence[int] | None = None) -> Picture:
    """The arrays of a Func with the tiles of all programs. The tiles of one program are coloured and numbered by step.

    Elements of tiles outside of an array are hatched: they are masked. Of an array with more than two dims, those
    two dims of its tiles are drawn along which programs and loops move most.

    Args:
      func: the Func.
      program: the tile index along each axis of the grid; None for the program in the middle.

    Raises:
      tilekern.errors.ArgumentError: the grid has no such program.
    """
    chosen = tuple(axis.tiles // 2 for axis in func.axes) if program is None else tuple(program)
    runs = len(chosen) == len(func.axes) and all(0 <= n < tiles for n, tiles in zip(chosen, func.grid, strict=True))
    if program is not None and not runs:
        raise ArgumentError(
            f"{func.name} has no such program",
            expected="a tile index for each axis: " + ", ".join(f"{a.name} < {a.tiles}" for a in func.axes),
            got=f"program={chosen}",
            fix="leave it out for the program in the middle of the grid",
        )
    if not runs:
        return Picture(_svg(func, (), f"Grid of {_grid_of(func)} programs."))
    own = tuple(touches(func, chosen))
    neighbours = (touch for program in _along_each_axis(func, chosen) for touch in touches(func, program))
    accesses = (*own, *neighbours)
    arrays = [_drawn(param, extents, own, accesses) for param, extents in _arrays(accesses)]
    return Picture(_svg(func, arrays, _caption(func, chosen)))


def _along_each_axis(func: Func, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The programs that differ from `chosen` along one axis: (1, 0) of 2 × 2 -> (0, 0), (1, 0), (1, 0), (1, 1)."""
    for number, axis in enumerate(func.axes):
        for tile in range(axis.tiles if axis.tiles <= LONGEST else 0):
            yield (*chosen[:number], tile, *chosen[number + 1 :])


def _arrays(every: Iterable[Touch]) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """The arrays in the order of the accesses, in each shape in which they are seen."""
    return iter(dict.fromkeys((touch.op.ref, touch.op.extents) for touch in every))


def _drawn(param: Value, extents: tuple[int, ...], own: Iterable[Touch], every: Iterable[Touch]) -> _Drawn:
    here = [touch for touch in own if touch.op.ref is param and touch.op.extents == extents]
    there = [touch for touch in every if touch.op.ref is param and touch.op.extents == extents]
    spans = [tuple(sorted({touch.place[dim] for touch in there})) for dim in range(len(extents))]
    dims = _dims(extents, spans, {dim for touch in there for dim in touch.op.access.kept})

    def across(spans: Sequence[tuple[Span, ...]]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        pair = [((0, 1),)] * (2 - len(dims)) + [spans[dim] for dim in dims]
        return pair[0], pair[1]

    tiles = dict.fromkeys((_action(touch.op), across([(span,) for span in touch.place])) for touch in here)
    sides = [1] * (2 - len(dims)) + [extents[dim] for dim in dims]
    rows, columns = across(spans)
    return _Drawn(
        (param.name, f"{dtype_name(param.ref.dtype)}{list(extents)}{_place(extents, dims, here)}"),
        (sides[0], sides[1]),
        across([_clearest(there, dim, extent) for dim, extent in enumerate(extents)]),
        (_bounds(rows, sides[0]), _bounds(columns, sides[1])),
        tuple((action, (rows[0], columns[0])) for action, (rows, columns) in tiles),
        "; ".join(dict.fromkeys(_words(touch.op) for touch in here)),
    )


def _clearest(there: Iterable[Touch], dim: int, extent: int) -> tuple[Span, ...]:
    """The spans of the access with the fewest elements outside of a dim; among equals, of the one with most spans."""
    by_access: dict[MemoryOp, set[Span]] = {}
    for touch in there:
        by_access.setdefault(touch.op, set()).add(touch.place[dim])

    def rank(spans: set[Span]) -> tuple[int, int]:
        return sum(max(-first, 0) + max(first + size - extent, 0) for first, size in spans), -len(spans)

    return tuple(sorted(min(by_access.values(), key=rank)))


def _bounds(spans: Iterable[Span], side: int) -> Span:
    low, high = zip((0, side), *((first, first + size) for first, size in spans), strict=True)
    return min(low), max(high)


def _dims(extents: tuple[int, ...], spans: Sequence[Sequence[Span]], kept: set[int]) -> list[int]:
    """The two dims of tiles with the most tiles, of equal dims the last; fewer where the array has fewer."""

    def rank(dim: int) -> tuple[bool, int, bool, int]:
        return dim in kept, len(spans[dim]), extents[dim] > 1, dim

    return sorted(sorted(range(len(extents)), key=rank, reverse=True)[:2])


def _place(extents: tuple[int, ...], dims: Sequence[int], here: Sequence[Touch]) -> str:
    """The place of the program's first tile along the dims that are not drawn; "" if all are."""
    if len(dims) == len(extents) or not here:
        return ""
    words: list[str] = []
    for dim, ((first, size), extent) in enumerate(zip(here[0].place, extents, strict=True)):
        whole = ":" if dim in dims or size == extent else f"{first}:{first + size}"
        words.append(str(first) if size == 1 and dim not in dims else whole)
    return f" at [{', '.join(words)}]"


def _action(op: MemoryOp) -> str:
    return "load" if isinstance(op, Load) else "atomic" if isinstance(op, Atomic) else "store"


def _words(op: MemoryOp) -> str:
    """The access in words: "load 4 × 4, masked"."""
    size = " × ".join(map(str, op.access.shape)) or "an element"
    kinds = {dim.kind for dim in op.access.dims}
    gathered = ", gathered" if "gather" in kinds else ""
    return f"{f'atomic {op.kind}' if isinstance(op, Atomic) else op.name} {size}{gathered}{', masked' * op.masked}"


def _caption(func: Func, chosen: tuple[int, ...]) -> str:
    if not func.axes:
        return "One program."
    place = ", ".join(f"{axis.name} = {index}" for axis, index in zip(func.axes, chosen, strict=True))
    return f"Grid of {_grid_of(func)} programs. Coloured: the program of tile {place}."


def _grid_of(func: Func) -> str:
    return " × ".join(map(str, func.grid))


# --- drawing ---


def _svg(func: Func, arrays: Sequence[_Drawn], caption: str) -> str:
    longest = max((high - low for array in arrays for low, high in array.bounds), default=1)
    unit = min(_UNIT, _LARGEST / max(longest, 1))
    body: list[str] = []
    x, y, tall, wide = 0.0, 0.0, 0.0, len(caption) * _CHARACTER
    for array in arrays:
        text, width, height = _array(array, unit)
        if x and x + width > _WIDEST:
            x, y, tall = 0.0, y + tall + _LINE, 0.0
        body.append(f'<g transform="translate({x:g} {y:g})">{text}</g>')
        x, tall, wide = x + width + _GAP, max(tall, height), max(wide, x + width)
    actions = [action for action in _COLOURS if any(action == kind for array in arrays for kind, _ in array.tiles)]
    legend, width = _legend(actions, any(any(_outside(array)) for array in arrays))
    body.append(_text(0, y + tall + _LINE, escape(caption)))
    body.append(f'<g transform="translate(0 {y + tall + _LINE + 12:g})">{legend}</g>')
    size = f"{max(wide, width, 1.0) + 2 * _EDGE:.0f} {y + tall + 3 * _LINE:.0f}"
    return (
        f'<svg viewBox="{-_EDGE:g} {-_EDGE:g} {size}" width="{size.split()[0]}" style="max-width:100%;height:auto" '
        f'role="img" aria-label="{escape(f"tiles of {func.name}")}" font-family="system-ui,sans-serif" font-size="13" '
        'fill="none" stroke="currentColor">'
        '<defs><pattern id="tilekern-outside" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="currentColor" stroke-opacity="0.7"/></pattern></defs>'
        f"{''.join(body)}</svg>"
    )


def _outside(array: _Drawn) -> Iterator[tuple[Span, Span]]:
    """The parts of tiles outside of the array: rows above and below it, columns left and right of it."""
    (top, bottom), (left, right) = array.bounds
    rows, columns = array.sides
    parts = [
        ((top, -top), (left, right - left)),
        ((rows, bottom - rows), (left, right - left)),
        ((0, rows), (left, -left)),
        ((0, rows), (columns, right - columns)),
    ]
    return (part for part in parts if part[0][1] > 0 and part[1][1] > 0)


def _array(array: _Drawn, unit: float) -> tuple[str, float, float]:
    """The elements of an array, its width and its height in pixels."""
    bounds = array.bounds
    scale = [max(unit, _SMALLEST / max(high - low, 1)) for low, high in bounds]

    def box(place: tuple[Span, Span]) -> str:
        corner = [(place[dim][0] - bounds[dim][0]) * scale[dim] for dim in (0, 1)]
        tall, wide = (max(place[dim][1] * scale[dim], 1.0) for dim in (0, 1))
        return f'x="{corner[1]:.4g}" y="{_HEAD + corner[0]:.4g}" width="{wide:.4g}" height="{tall:.4g}"'

    tall, wide = ((high - low) * side for (low, high), side in zip(bounds, scale, strict=True))
    name, description = array.title
    parts = [_text(0, 16, f'<tspan font-weight="bold">{escape(name)}</tspan> {escape(description)}')]
    parts += _grid(array, scale, box)
    parts += _own(array, box)
    parts += (
        f'<rect class="outside" {box(part)} fill="url(#tilekern-outside)" stroke="none"/>' for part in _outside(array)
    )
    parts.append(f'<rect class="array" {box(((0, array.sides[0]), (0, array.sides[1])))} stroke-width="1.6"/>')
    parts.append(_text(0, _HEAD + tall + 18, escape(array.actions)))
    letters = max(len(f"{name} {description}"), len(array.actions))
    return "".join(parts), max(wide, letters * _CHARACTER), _HEAD + tall + _FOOT


def _grid(array: _Drawn, scale: Sequence[float], box: Callable[[tuple[Span, Span]], str]) -> Iterator[str]:
    """The outlines of the tiles of all programs; none along a dim whose tiles are too small to be seen."""
    spans = [
        spans if min((size for _, size in spans), default=0) * factor >= _SEEN else ((0, side),)
        for spans, factor, side in zip(array.grid, scale, array.sides, strict=True)
    ]
    for rows in spans[0]:
        for columns in spans[1]:
            yield f'<rect class="tile" {box((rows, columns))} stroke-opacity="0.45"/>'


def _own(array: _Drawn, box: Callable[[tuple[Span, Span]], str]) -> Iterator[str]:
    """The tiles of the program, with the number of each step where there are several that lie apart."""
    for kind in _COLOURS:
        places = [place for action, place in array.tiles if action == kind]
        numbered = len(places) > 1 and not any(_overlap(*pair) for pair in combinations(places, 2))
        for step, place in enumerate(places, 1):
            opacity = 0.8 if step == 1 else 0.4
            yield f'<rect class="{kind}" {box(place)} fill="{_COLOURS[kind]}" fill-opacity="{opacity}" stroke="none"/>'
            if numbered:
                yield f'<svg {box(place)}><text x="50%" y="50%" dy="0.35em" {_LETTERS} {_MIDDLE}>{step}</text></svg>'


def _overlap(left: tuple[Span, Span], right: tuple[Span, Span]) -> bool:
    return all(a < b + wide and b < a + long for (a, long), (b, wide) in zip(left, right, strict=True))


def _legend(actions: Sequence[str], outside: bool) -> tuple[str, float]:
    """What the colours mean, for the actions that are drawn, and the width in pixels."""
    entries = [(f'fill="{_COLOURS[action]}" fill-opacity="0.8"', action) for action in actions]
    if outside:
        entries.append(('fill="url(#tilekern-outside)"', "outside of the array: masked"))
    x, parts = 0.0, list[str]()
    for fill, words in entries:
        parts.append(f'<rect class="key" x="{x:g}" y="4" width="14" height="14" {fill} stroke="none"/>')
        parts.append(_text(x + 20, 16, words))
        x += 40 + len(words) * _CHARACTER
    return "".join(parts), x


def _text(x: float, y: float, content: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {_LETTERS}>{content}</text>'
