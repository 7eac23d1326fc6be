"""Calls with sizes that are symbols, as `jax.export` has them: the kernel is called for chunks of a symbolic dim.

A dim may be a symbol if the kernel's sharding rule says that devices may divide it, and if its elements are proved to
be independent of each other. Then the kernel on a chunk computes a chunk of the results:

    f32[b, 8]  ->  f32[n, 16, 8], n = ceil(b / 16)  ->  vmap of the kernel for f32[16, 8]  ->  f32[b, 8]

Copies of the first element fill the last chunk. They compute nothing that the array does not, such as 1 / 0. So their
derivatives are finite where the array's derivatives are, and cotangents of 0 cancel them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import ArgumentError
from tilekern.kernel.dispatch import call
from tilekern.kernel.primitive import Callee, Elements
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.kernel.symbols import CHUNKS, MOST_BYTES, STAND_IN, with_sizes
from tilekern.lang.tiles import describe

if TYPE_CHECKING:
    from tilekern.kernel.entry import Prepared

# A function of operands, and the results that it returns.
type Run = Callable[..., Any]


class Cut(NamedTuple):
    """A name of a kernel's sharding rule whose size is a symbol.

    Attributes:
      name: the name.
      size: the symbol.
      operands: for each operand the dim of that name; None for an operand that all chunks share.
      results: for each result the dim of that name.
      ratios: for each result the size of this dim divided by the symbol.
    """

    name: str
    size: Any
    operands: tuple[int | None, ...]
    results: list[int]
    ratios: list[int]


def results_of(paths: Sequence[str], args: Any, prepare: Callable[[Any], Prepared]) -> Any:
    """The results of a call of a kernel in which sizes are symbols.

    Args:
      paths: the names of the arrays, for errors.
      args: the inputs, as pytrees.
      prepare: returns what a call on arguments of given types runs.

    Raises:
      ArgumentError: a symbol is the size of a dim whose elements are not proved to be independent of each other.
    """
    leaves, tree = _jax.flatten(args)
    prepared = prepare(jax.tree.unflatten(tree, [with_sizes(x) for x in leaves]))
    callee, operands = prepared.callee, [*leaves, *prepared.captured]
    call_names = [*paths, *("an array that the body closes over" for _ in prepared.captured)]
    cuts = _cuts(callee, call_names, operands)
    chunks = [(size, _part(callee, cuts, size)) for size in CHUNKS]
    smallest = chunks[-1][1]
    if isinstance(smallest, str):
        raise _refused(callee, call_names, operands, cuts[0].size, smallest)
    runs = [
        (size, _in_chunks(part, cuts, size))
        for size, part in chunks
        if not isinstance(part, str) and (size == 1 or _bytes(part, cuts[-1]) <= MOST_BYTES)
    ]
    return prepared.call.results.pack(_chosen(runs, cuts[-1].size, operands))


def _bytes(part: Callee, cut: Cut) -> int:
    """The bytes of a chunk's parts of operands and results."""
    pairs = zip(cast(Any, part).types, cut.operands, strict=True)
    types = [*(t for t, dim in pairs if dim is not None), *part.outputs]
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in types)


# --- proofs -----------------------------------------------------------------------------------------------------------


def _cuts(callee: Callee, paths: Sequence[str], operands: Sequence[Any]) -> list[Cut]:
    """A `Cut` for each name of the rule whose size is a symbol."""
    rule = callee.rule
    sizes: dict[str, Any] = {}
    for number, x in enumerate(operands):
        for dim, size in enumerate(x.shape):
            if not jax.export.is_symbolic_dim(size):
                continue
            if rule is None or callee.divisible is None or callee.divisible.elements is None:
                raise _refused(callee, paths, operands, size, "nothing is known of this kernel")
            name = rule.operands[number][dim]
            if name not in rule.sizes:
                raise _refused(callee, paths, operands, size, callee.divisible.elements.whole(number, dim))
            different = [s for s in _sizes_of(rule, operands, name) if s != size]
            if different:
                raise _refused(callee, paths, operands, size, f"it is cut together with a dim of size {different[0]}")
            if rule.sums.get(name):
                raise _refused(callee, paths, operands, size, "results are sums over it")
            sizes[name] = size
    assert rule is not None
    return [_cut(callee, rule, name, size) for name, size in sizes.items()]


def _sizes_of(rule: ShardingRule, operands: Sequence[Any], name: str) -> list[Any]:
    pairs = zip(rule.operands, operands, strict=True)
    return [size for dims, x in pairs for dim, size in zip(dims, x.shape, strict=True) if dim == name]


def _cut(callee: Callee, rule: ShardingRule, name: str, size: Any) -> Cut:
    operands = tuple(dims.index(name) if name in dims else None for dims in rule.operands)
    results = [dims.index(name) for dims in rule.results]
    ratios = [out.shape[dim] // STAND_IN for out, dim in zip(callee.outputs, results, strict=True)]
    return Cut(name, size, operands, results, ratios)


def _part(callee: Callee, cuts: Sequence[Cut], size: int) -> Callee | str:
    """The callee on chunks of `size` elements along the last cut, and of 1 along others; or the reason against it."""
    sizes = [1] * (len(cuts) - 1) + [size]
    parts = {cut.name: STAND_IN // size for cut, size in zip(cuts, sizes, strict=True)}
    elements = cast(Elements, cast(Any, callee.divisible).elements)
    return callee.once(("elements", *sorted(parts.items())), lambda: elements.part(parts))


def _refused(callee: Callee, paths: Sequence[str], operands: Sequence[Any], size: Any, reason: str) -> ArgumentError:
    path, x, dim = next(
        (p, x, n) for p, x in zip(paths, operands, strict=True) for n, s in enumerate(x.shape) if s is size or s == size
    )
    with source.at(source.of_stack(prebuilt=False)):
        return ArgumentError(
            f"{callee.name} needs arrays of known sizes",
            expected="symbols as sizes of dims whose elements are independent of each other",
            got=f"{path} = {describe(x)}, whose dim {dim} is the symbol {size}: {reason}",
            fix=f"take jax.vmap of {callee.name} over that dim, if its elements do not mix; or export it for each size",
        )


# --- chunks -----------------------------------------------------------------------------------------------------------


def _in_chunks(part: Callee, cuts: Sequence[Cut], size: int) -> Run:
    """The function of the whole operands that calls `part` for each chunk, of `size` elements along the last cut."""

    def run(*operands: jax.Array) -> list[jax.Array]:
        return call(part, *operands)

    *outer_cuts, last = cuts
    return reduce(lambda inner, cut: _over(inner, cut, 1), reversed(outer_cuts), _over(run, last, size))


def _over(run: Run, cut: Cut, size: int) -> Run:
    """The function that maps `run` over chunks of `size` elements along a cut."""

    def mapped(*operands: jax.Array) -> list[jax.Array]:
        count = (cut.size + size - 1) // size
        pairs = zip(operands, cut.operands, strict=True)
        chunks = [x if d is None else _chunks(x, d, count, size) for x, d in pairs]
        results = jax.vmap(run, in_axes=cut.operands, out_axes=cut.results)(*chunks)
        return [_joined(r, d, cut.size * ratio) for r, d, ratio in zip(results, cut.results, cut.ratios, strict=True)]

    return mapped


def scan_rows(function: Callable[..., Any], carry: Any, *arrays: jax.Array) -> tuple[Any, Any]:
    """The last carry and the rows of the results of a function of chunks, where the number of rows is a symbol.

    For functions that need the place of a chunk, so that no sharding rule divides them.

    Args:
      function: takes the number of the chunk's first row, int32, the carry, and a chunk of each array. It returns the
        carry, and a pytree of arrays of as many rows. In the last chunk, copies of the first row follow the last row.
      carry: of the first chunk.
      arrays: [rows, ...].
    """
    rows: Any = arrays[0].shape[0]

    def by(size: int) -> Run:
        def step(state: Any, chunk: Any) -> Any:
            start, carry = state
            carry, result = function(start, carry, *chunk)
            return (start + size, carry), result

        def run(carry: Any, *arrays: jax.Array) -> Any:
            chunks = [_chunks(x, 0, (rows + size - 1) // size, size) for x in arrays]
            (_, carry), results = jax.lax.scan(step, (jnp.int32(0), carry), chunks)
            flat, tree = _jax.flatten(results)
            return carry, jax.tree.unflatten(tree, [_joined(r, 0, rows) for r in flat])

        return run

    return _chosen([(size, by(size)) for size in CHUNKS], rows, (carry, *arrays))


def _chunks(x: jax.Array, dim: int, count: Any, size: int) -> jax.Array:
    """`x` with a dim cut into chunks: dims (count, size) in its place."""
    length = cast(Any, x.shape[dim])
    if size > 1:
        padding = [(0, count * size - length if n == dim else 0, 0) for n in range(x.ndim)]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
        is_inside = jax.lax.broadcasted_iota(jnp.int32, padded.shape, dim) < length
        x = jnp.where(is_inside, padded, jax.lax.slice_in_dim(x, 0, 1, axis=dim))
    return x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])


def _joined(x: jax.Array, dim: int, length: Any) -> jax.Array:
    """Chunks in dims `dim` and `dim + 1` as one dim, cut off at a length."""
    shape: Any = x.shape
    joined = x.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    return jax.lax.slice_in_dim(joined, 0, length, axis=dim)


def _chosen(runs: Sequence[tuple[int, Run]], length: Any, operands: Sequence[Any]) -> Any:
    """The results by the first of the functions that has at least two chunks of a dim of size `length`."""
    (size, run), *smaller = runs
    if not smaller:
        return run(*operands)

    def by_smaller(*operands: Any) -> Any:
        return _chosen(smaller, length, operands)

    return cast(Any, jax.lax).cond(jnp.asarray(length) >= 2 * size, run, by_smaller, *operands)
