"""Drawings of an explanation, as elements of SVG and HTML: the roofline, bars of units, tiles of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

from tilekern.estimate.quantities import amount, percent

if TYPE_CHECKING:
    from tilekern.estimate.explain.explanation import TilePicture
    from tilekern.estimate.result import Estimate

WIDTH, HEIGHT = 420, 220  # of the roofline, in pixels
_LEFT, _BOTTOM = 46, 28  # its margins
_ARRAY = 130  # the longer side of an array

STYLE = """
.tilekern { font: 14px/1.45 system-ui, sans-serif; color: #1c2b2b; background: #fff; padding: 1em; max-width: 1500px }
.tilekern h1 { font-size: 1.4em } .tilekern h2 { font-size: 1.05em; margin: 1.4em 0 .4em }
.tilekern table { border-collapse: collapse } .tilekern td { padding: 1px 8px; vertical-align: top; text-align: left }
.tilekern pre, .tilekern code { font: 12px/1.5 ui-monospace, monospace; margin: 0; white-space: pre; background: none }
.tilekern .bar { width: 90px; padding-top: 6px } .tilekern .bar i { display: block; height: 9px; background: #2a9d8f }
.tilekern .share { text-align: right; width: 4em } .tilekern .became { color: #51606a }
.tilekern .flex { display: flex; flex-wrap: wrap; gap: 2em; align-items: flex-start }
.tilekern .listings > div { flex: 1 1 30%; min-width: 320px; max-height: 70vh; overflow: auto }
.tilekern .listings > div { border: 1px solid #d5dede }
.tilekern .listings span { display: block; padding: 0 6px } .tilekern .lit { background: #fff1c2 }
.tilekern figure { margin: 0; max-width: 260px } .tilekern figcaption { color: #51606a; font-size: 12px }
.tilekern .roof { width: 420px } .tilekern .roof polyline { fill: none; stroke: #264653; stroke-width: 2 }
.tilekern .roof circle { fill: #e76f51 } .tilekern .roof text { font-size: 11px; fill: #51606a }
.tilekern rect.whole { fill: #edf3f3; stroke: #9fb3b3 }
.tilekern rect.load { fill: #2a9d8f } .tilekern rect.store { fill: #e76f51 }
"""
"""The style of elements inside of one of the class tilekern."""


def bars(busy: Mapping[str, float]) -> str:
    """One bar for each unit, as long as the part of the time in which it is busy."""
    rows = (
        f'<tr><td>{escape(unit)}</td><td class="bar"><i style="width:{100 * min(part, 1.0):.1f}%"></i></td>'
        f"<td>{percent(part)}</td></tr>"
        for unit, part in busy.items()
    )
    return f"<table class=units>{''.join(rows)}</table>"


def roofline(estimate: Estimate) -> str:
    """The operations a second over the operations a byte, under the roof; "" without matrix products.

    The roof is the peak of the matrix units, and left of the ridge the bandwidth of the memory.
    """
    if not estimate.flops_useful or not estimate.bytes_required or not all(estimate.bounds.values()):
        return ""
    peak = estimate.flops_useful / estimate.bounds["matrix"]
    bandwidth = estimate.bytes_required / estimate.bounds["memory"]
    intensity, reached = estimate.flops_useful / estimate.bytes_required, estimate.flops_useful / estimate.seconds
    ridge = peak / bandwidth
    low, high = math.log10(min(intensity, ridge)) - 1, math.log10(max(intensity, ridge)) + 1
    top = math.log10(peak) + 0.2
    bottom = min(math.log10(reached), math.log10(bandwidth) + low) - 0.2

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (math.log10(x) - low) / (high - low), (math.log10(y) - bottom) / (top - bottom)
        return _LEFT + across * (WIDTH - _LEFT - 10), HEIGHT - _BOTTOM - up * (HEIGHT - _BOTTOM - 10)

    roof = [at(10**low, bandwidth * 10**low), at(ridge, peak), at(10**high, peak)]
    x, y = at(intensity, reached)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in roof)
    label = f"{amount(reached)}flop/s at {intensity:.1f} flop/B"
    middle = HEIGHT // 2
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class=roof role=img aria-label="roofline">'
        f'<polyline points="{points}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{min(x, WIDTH - 190):.1f}" y="{min(y + 20, HEIGHT - _BOTTOM - 4):.1f}">{label}</text>'
        f'<text x="{roof[1][0]:.1f}" y="{roof[1][1] - 4:.1f}" text-anchor="middle">{amount(peak)}flop/s</text>'
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">operations for each byte (log)</text>'
        f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" text-anchor="middle">flop/s (log)</text>'
        "</svg>"
    )


def arrays(tiles: tuple[TilePicture, ...]) -> str:
    """For each array its last two dims, and the tile of the program in the middle of the grid."""
    return "".join(_array(tile) for tile in tiles)


def _array(tile: TilePicture) -> str:
    sides, first, size = (([1, *numbers])[-2:] for numbers in (tile.shape, tile.first, tile.size))
    longest = max(*sides, 1)
    high, wide = (max(4.0, _ARRAY * side / longest) for side in sides)
    scale = [extent / max(side, 1) for extent, side in zip((high, wide), sides, strict=True)]
    y, x = (factor * start for factor, start in zip(scale, first, strict=True))
    tall, broad = (max(2.0, factor * length) for factor, length in zip(scale, size, strict=True))
    kind = "store" if tile.written else "load"
    name = f"{kind} {list(tile.size)} of {tile.array}{list(tile.shape)}"
    return (
        f'<figure><svg width="{wide + 2:.0f}" height="{high + 2:.0f}" role=img aria-label="{escape(name)}">'
        f'<rect class=whole x="1" y="1" width="{wide:.1f}" height="{high:.1f}"/>'
        f'<rect class={kind} x="{1 + x:.1f}" y="{1 + y:.1f}" width="{broad:.1f}" height="{tall:.1f}"/></svg>'
        f"<figcaption>{escape(name)}</figcaption></figure>"
    )


def share(part: float | None) -> Iterator[str]:
    """The cells of a line's part of the work."""
    yield f"<td class=share>{'' if part is None else percent(part)}</td>"
    yield f'<td class="bar"><i style="width:{100 * (part or 0.0):.1f}%"></i></td>'
