"""The picture of the architecture page: an SVG of the way of a kernel through the tree, drawn from the tables below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

SHARED = [
    ("@tk.kernel", "kernel/", "the body: JAX code over tiles"),
    ("trace", "lang/", "one program of the grid"),
    ("block IR", "ir/", "typed SSA over tiles, verified"),
    ("passes", "passes/", "the same for all targets"),
]
"""The stages of every kernel: title, folder, description."""

BACKENDS: dict[str, list[tuple[str, str]]] = {
    "xla": [
        ("legalize/", "refuse what is too large"),
        ("plan/", "batches of programs"),
        ("emit/", "operations of JAX"),
        ("", "no toolchain of its own"),
        ("", "no custom call"),
    ],
    "llvm": [
        ("legalize/", "ops that the emitter has"),
        ("plan/", "loop nests, buffers"),
        ("emit/ gemm/ math/", "LLVM IR as text"),
        ("compile/", "machine code by llvmlite"),
        ("call.py runtime/", "FFI, XLA's threads"),
    ],
    "triton": [
        ("legalize/", "powers of two, Triton's ops"),
        ("plan/", "TMA, launch options"),
        ("emit/ gluon/", "Triton or Gluon as text"),
        ("compile/", "PTX and cubin, kept on disk"),
        ("call.py", "jaxlib's Triton call"),
    ],
    "mosaic": [
        ("legalize/", "Mosaic's ops, 32 bits"),
        ("plan/", "windows, loops, VMEM"),
        ("emit/", "a Pallas kernel"),
        ("call.py", "pallas_call"),
        ("compile/", "libtpu"),
    ],
}
"""The five stages of each backend in their order: rooms of its folder in `tilekern/lower/`, and their results."""

TARGETS = {"xla": "cpu:xla, any platform", "llvm": "cpu:llvm", "triton": "cuda:…", "mosaic": "tpu:…"}
"""The targets of each backend."""

WIDTH, COLUMN, GAP, BOX, STEP = 960, 221, 24, 52, 78


def svg() -> str:
    """The picture; colours and fonts are those of the page."""
    top = 127
    height = top + 5 * STEP + BOX + 2
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The way of a kernel through the tree" '
        'style="width:100%;height:auto" fill="none" stroke="currentColor" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="currentColor" stroke="none"/></marker></defs>',
        *_shared(),
        *(part for number, name in enumerate(BACKENDS) for part in _backend(number, name, top)),
        *_box(0, height - BOX - 2, WIDTH - 2, "XLA", "", "one program of JAX: jit, grad, vmap, scan, shard_map"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _shared() -> Iterator[str]:
    for number, (title, folder, text) in enumerate(SHARED):
        left = number * (COLUMN + GAP)
        yield from _box(left, 2, COLUMN, title, folder, text)
        if number:
            yield _arrow([(left - GAP, 2 + BOX / 2), (left - 3, 2 + BOX / 2)])


def _backend(number: int, name: str, top: int) -> Iterator[str]:
    left, middle = number * (COLUMN + GAP), number * (COLUMN + GAP) + COLUMN / 2
    last = (len(SHARED) - 1) * (COLUMN + GAP) + COLUMN / 2
    yield _arrow([(last, 2 + BOX), (last, 68), (middle, 68), (middle, 80)])
    yield _text(middle, 97, TARGETS[name], "bold")
    yield _text(middle, 117, f"lower/{name}/", "code")
    for row, (folder, text) in enumerate(BACKENDS[name]):
        y = top + row * STEP
        yield from _box(left, y, COLUMN, "", folder, text)
        yield _arrow([(middle, y + BOX), (middle, y + STEP - 3)])


def _box(left: float, top: float, width: float, title: str, folder: str, text: str) -> Iterator[str]:
    dashed = "" if folder or title else ' stroke-dasharray="4 4"'
    yield f'<rect x="{left + 1}" y="{top}" width="{width}" height="{BOX}" rx="6"{dashed}/>'
    middle = left + width / 2
    if title and folder:
        yield _text(left + 10, top + 20, title, "bold", anchor="start")
        yield _text(left + width - 8, top + 20, folder, "code", anchor="end")
    elif title or folder:
        yield _text(middle, top + 20, title or folder, "bold" if title else "code")
    yield _text(middle, top + (41 if title or folder else 31), text)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    font = {"bold": ' font-weight="bold"', "code": ' font-family="monospace"'}.get(style, "")
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor" stroke="none"{font}>{escape(text)}</text>'


def _arrow(points: Sequence[tuple[float, float]]) -> str:
    listed = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{listed}" marker-end="url(#tip)"/>'
