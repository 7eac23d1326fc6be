"""The key by which a file of tuned blocks finds a kernel: what of the kernel and its arrays decides the best blocks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache

from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import MemoryOp
from tilekern.ir.text import to_text
from tilekern.kernel.choice import Tunable
from tilekern.kernel.tuned import Key
from tilekern.lower.target import Target, backend_of

MANY = 1024
"""Numbers of programs from here on are one bucket: they keep any machine busy, so that more of them change nothing."""

_NUMBER = re.compile(r"(?<![\w%@.])\d+(?:\.\d*)?(?![\w.])")


def key_of(
    func: Func,
    target: Target,
    fixed: Mapping[str, Tunable],
    blocks: Iterable[Tunable],
    gradient: bool,
    shipped: bool = False,
) -> Key:
    """The key of a kernel.

    Args:
      func: the block IR as traced, before all passes, with the schedule's own blocks.
      target: the target.
      fixed: the blocks, choices and launch options that the call gives.
      blocks: the schedule's own blocks.
      gradient: True for the kernels of derived derivatives.
      shipped: True for the key in tables that tilekern ships. It has the sizes of all dims in the place of buckets, no
        machine, and of versions only the compiler's: a table belongs to the tilekern that it comes with, and a version
        of JAX that traces other ops changes the hash.
    """
    programs = math.prod(axis.tiles for axis in func.axes)
    given = tuple(sorted(fixed.items()))
    ir = _structure(func, blocks)
    backend = backend_of(target)
    versions = _versions(backend.package)
    if shipped:
        sizes = tuple((f"{p.name}[{n}]", size) for p in func.params for n, size in enumerate(p.ref.shape))
        return Key(func.name, ir, gradient, sizes, programs, given, target.full_name, "", versions[-1:])
    extents = tuple((name, _bucket(size)) for name, size in _extents(func))
    device = backend.machine(target) if backend.compiles and backend.is_here(target) else ""
    bucket = min(_bucket(programs), MANY)
    return Key(func.name, ir, gradient, extents, bucket, given, target.full_name, device, versions)


def _structure(func: Func, blocks: Iterable[Tunable]) -> str:
    """A hash of the block IR, in which sizes of arrays, axes and blocks have no numbers, so that other sizes fit it.

    A number that is computed from sizes keeps its value: such a kernel has a key for each size.
    """
    sizes = {n for param in func.params for n in param.ref.shape}
    axes = [*func.axes, *(op.axis for op in func.walk() if isinstance(op, Fold))]
    sizes |= {n for axis in axes for n in (axis.extent, axis.block)} | {n for n in blocks if isinstance(n, int)}
    names = {float(n) for n in sizes if n > 1}
    text = _NUMBER.sub(lambda match: "n" if float(match[0]) in names else match[0], to_text(func))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _extents(func: Func) -> tuple[tuple[str, int], ...]:
    """The sizes of the dims that not only tiles of the grid divide, by the name of the array and the dim's number."""
    by_grid = {(param, n) for op in func.walk() if isinstance(op, MemoryOp) for param, n in _dims_of_grid(op, func)}
    dims = ((p, n, size) for p in func.params for n, size in enumerate(p.ref.shape) if (p, n) not in by_grid)
    return tuple((f"{p.name}[{n}]", size) for p, n, size in dims)


def _dims_of_grid(op: MemoryOp, func: Func) -> list[tuple[object, int]]:
    """The dims of an access whose position moves with the grid, as pairs (param, number of the dim)."""
    if op.access.extents is not None:
        return []
    return [
        (op.operands[0], n)
        for n, dim in enumerate(op.access.dims)
        if any(op.positions[term.operand] in func.body.args for term in dim.position.terms)
    ]


def _bucket(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()


@cache
def _versions(package: str) -> tuple[tuple[str, str], ...]:
    """The versions of the packages that make the code."""
    versions: dict[str, str] = {}
    for name in dict.fromkeys(("tilekern", "jax", package or "jaxlib")):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return tuple(versions.items())
