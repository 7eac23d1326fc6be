"""Plots of the results of benchmarks in `bench/results`, as SVG: each with its machine and date."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tilekern.ir.picture import Picture

RESULTS = Path(__file__).parent.parent / "bench" / "results"
H100 = "2026-11-26-h100.json"
CPU = "2026-11-22-cpu-2-cores-emerald-rapids.json"

_OURS, _PEER = "#1f9e89", "currentColor"
_WIDTH, _CHARACTER, _NUMBERS, _BAR, _GAP, _HEAD = 760, 8.6, 70, 15, 12, 48  # letters of bold text may be wide
_LETTERS = 'fill="currentColor" stroke="none"'


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its length in the plot's unit, and True for tilekern."""

    label: str
    value: float
    ours: bool


def bars(title: str, source: str, unit: str, groups: Mapping[str, Sequence[Bar]], line: float | None = None) -> Picture:
    """Groups of horizontal bars.

    Args:
      title: what is compared; longer bars are better.
      source: machine and date.
      unit: the unit of the numbers.
      groups: the bars of each group, by its heading; "" for no heading.
      line: a value to draw a dashed line at.
    """
    longest = max(bar.value for group in groups.values() for bar in group)
    left = max(len(bar.label) for group in groups.values() for bar in group) * _CHARACTER + 8
    scale = (_WIDTH - left - _NUMBERS) / max(longest, line or 0.0)
    parts, y, letters = list[str](), float(_HEAD), list[_Letters]()
    for heading, group in groups.items():
        if heading:
            parts.append(f'<text x="0" y="{y + 13:g}" {_LETTERS} font-weight="bold">{escape(heading)}</text>')
            letters.append(_Letters(0, len(heading) * _CHARACTER, y, y + 17))
            y += 20
        for bar in group:
            parts += _bar(bar, left, y, bar.value * scale)
            end = left + bar.value * scale
            letters.append(_Letters(end, end + _NUMBERS - 20, y, y + _BAR))
            y += _BAR + 5
        y += _GAP
    if line is not None:
        way = _line(left + line * scale, y - _GAP, letters)
        parts.append(f'<path class="line" d="{way}" stroke="currentColor" stroke-dasharray="4 4"/>')
    head = (
        f'<text x="0" y="14" {_LETTERS} font-size="15" font-weight="bold">{escape(f"{title}, {unit}")}</text>'
        f'<text x="0" y="33" {_LETTERS} fill-opacity="0.75">{escape(source)}</text>'
    )
    return Picture(
        f'<svg viewBox="-2 -2 {_WIDTH + 4} {y:.0f}" width="{_WIDTH + 4}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="13" fill="none">'
        f"{head}{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _Letters:
    """The box of a heading or a number, from (left, top) to (right, bottom)."""

    left: float
    right: float
    top: float
    bottom: float


def _line(x: float, bottom: float, letters: Sequence[_Letters]) -> str:
    """The path of the dashed line at `x`, which leaves out headings and numbers."""
    top, pieces = float(_HEAD), list[str]()
    for box in letters:
        if box.left < x < box.right:
            pieces.append(f"M{x:.1f} {top:g}V{box.top:g}")
            top = box.bottom
    return "".join([*pieces, f"M{x:.1f} {top:g}V{max(top, bottom):g}"])


def _bar(bar: Bar, left: float, y: float, length: float) -> Iterator[str]:
    weight = ' font-weight="bold"' if bar.ours else ""
    middle = y + _BAR - 3
    fill = f'fill="{_OURS}"' if bar.ours else f'fill="{_PEER}" fill-opacity="0.35"'
    yield f'<text x="{left - 8:g}" y="{middle:g}" text-anchor="end" {_LETTERS}{weight}>{escape(bar.label)}</text>'
    yield f'<rect class="bar" x="{left:g}" y="{y:g}" width="{max(length, 1.0):.1f}" height="{_BAR}" rx="2" {fill}/>'
    number = f"{bar.value:.0f}" if bar.value >= 100 else f"{bar.value:.2f}"
    yield f'<text x="{left + max(length, 1.0) + 6:.1f}" y="{middle:g}" {_LETTERS}{weight}>{number}</text>'


# --- NVIDIA H100 ---


def h100_attention(*lengths: int) -> Picture:
    """Operations a second of attention to so many tokens without a gradient, ours by Gluon and by Triton."""
    groups: dict[str, list[Bar]] = {}
    peers = {"jax cudnn": "cuDNN", "mosaic 64/128/2": "Mosaic GPU", "torch flash": "FlashAttention-2"}
    for length in lengths:
        for mask in ("causal", "full"):
            name = f"attention d128 s{length} {mask}"
            by_gluon, by_triton = _h100(f"{name} by gluon"), _h100(name, first=True)
            group = [Bar("tilekern, Gluon", _tflops(by_gluon, "tilekern"), ours=True)]
            group.append(Bar("tilekern, Triton", _tflops(by_triton, "tilekern"), ours=True))
            group += (Bar(label, _tflops(by_gluon, peer), ours=False) for peer, label in peers.items())
            groups[f"{length} tokens, heads of 128, {mask}"] = group
    return bars("Attention in bfloat16", _h100_source(), "TFLOP/s", groups)


def h100_matmul() -> Picture:
    """Operations a second of square matrix products."""
    groups: dict[str, list[Bar]] = {}
    for side in (4096, 8192):
        by_gluon, by_triton = _h100(f"matmul {side} by gluon"), _h100(f"matmul {side}")
        groups[f"{side} × {side} × {side}"] = [
            Bar("tilekern, Gluon", _tflops(by_gluon, "tilekern"), ours=True),
            Bar("tilekern, Triton", _tflops(by_triton, "tilekern"), ours=True),
            Bar("cuBLAS by XLA", _tflops(by_triton, "xla"), ours=False),
            Bar("cuBLAS by PyTorch", _tflops(by_triton, "torch"), ours=False),
        ]
    return bars("Matrix product in bfloat16", _h100_source(), "TFLOP/s", groups)


def h100_memory() -> Picture:
    """Bytes a second of kernels that memory bounds; the line is a copy of 1 GiB."""
    groups: dict[str, list[Bar]] = {}
    for name in ("softmax", "rms_norm", "layer_norm", "add_rms_norm"):
        item = _h100(f"{name} 16384×4096")
        groups[f"{name}, 16384 × 4096"] = [
            Bar("tilekern", item["bytes"] / _us(item, "tilekern") / 1000, ours=True),
            Bar("XLA", item["bytes"] / _us(item, "xla") / 1000, ours=False),
        ]
    copy = _h100("ceiling copy")
    speed = copy["bytes"] / _us(copy, "xla") / 1000
    return bars("Rows in bfloat16, the line is a copy", _h100_source(), "GB/s", groups, line=speed)


def h100_others() -> Picture:
    """The speed of other kernels and of gradients as a multiple of XLA's; the line is XLA."""
    names = [
        "ragged_dot mixtral_8x7b_up",
        "ragged_dot mixtral_8x7b_up gradient",
        "fused_ragged_dot mixtral_8x7b_up",
        "cross_entropy llama2_7b",
        "cross_entropy llama2_7b gradient",
        "distillation llama3_1b_of_8b",
        "distillation llama3_1b_of_8b gradient",
        "fused_matmul whisper_large_up",
        "fused_matmul whisper_large_up gradient",
        "adamw 4096×14336 bfloat16",
        "adamw 4096×14336 float32",
        "add_rms_norm 16384×4096 gradient",
    ]
    times = {name: _h100(name) for name in names}
    group = [Bar(name, _us(item, "xla") / _us(item, "tilekern"), ours=True) for name, item in times.items()]
    return bars("Other kernels, speed as a multiple of XLA's", _h100_source(), "×", {"": group}, line=1.0)


def _h100_source() -> str:
    environment = _json(H100)["runs"][0]["environment"]
    versions = environment["versions"]
    software = f"jax {versions['jax']}, Triton {versions['triton']}, PyTorch {versions['torch']}"
    return f"{_json(H100)['device']}, {software}, {environment['time'][:10]}; medians; longer is better"


def _h100(name: str, first: bool = False) -> Mapping[str, Any]:
    """The item of the last run that has it, or of the first: the first run had attention by Triton."""
    items = [run["items"][name] for run in _json(H100)["runs"] if name in run["items"]]
    return items[0 if first else -1]


def _us(item: Mapping[str, Any], contestant: str) -> float:
    return float(item["contestants"][contestant]["median_us"])


def _tflops(item: Mapping[str, Any], contestant: str) -> float:
    return item["flops"] / _us(item, contestant) / 1e6


# --- CPUs ---


def cpu_attention() -> Picture:
    """Speed of attention and of matrix products as a multiple of the peers' speed; the line is equal speed."""
    groups: dict[str, list[Bar]] = {}
    peers = {"to jax.nn": "jax.nn", "to PyTorch 2.13.0+cpu": "PyTorch 2.13", "to XLA": "XLA"}
    for result in _json(CPU)["results"]:
        name, _, against = result["name"].removeprefix("llvm: ").rpartition(", ")
        if result["relation"] == "ratio" and against in peers:
            groups.setdefault(name, []).append(Bar(f"times {peers[against]}", 1 / result["judged"], ours=True))
    return bars("cpu:llvm, speed as a multiple of the peer's", _cpu_source(), "×", groups, line=1.0)


def cpu_peak() -> Picture:
    """Share of the peak of the machine's multiply-adds."""
    group: list[Bar] = []
    for result in _json(CPU)["results"]:
        name, _, against = result["name"].removeprefix("llvm: ").rpartition(", ")
        if against == "of the peak":
            group.append(Bar(name, 100 * result["judged"], ours=True))
    return bars("cpu:llvm, share of the peak in float32", _cpu_source(), "%", {"": group}, line=100.0)


def _cpu_source() -> str:
    machine = _json(CPU)["machine"]
    words = f"{machine['processor']} (Emerald Rapids), {machine['cores']} cores, jax {machine['jax']}"
    return f"{words}, {CPU[:10]}; medians; longer is better"


def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())
