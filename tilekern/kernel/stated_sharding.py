"""Sharding rules that authors state, by `Kernel.defsharding`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilekern import source
from tilekern.errors import ArgumentError
from tilekern.ir.core import Func, Value
from tilekern.kernel.sharding_rule import Dims, ShardingRule


def stated(notation: str, func: Func, operand_count: int) -> ShardingRule:
    """The rule that an author states for a kernel in a notation such as "b i d, b j d -> b i d".

    Args:
      notation: a name or a dot for each dim of each array, inputs before results.
      func: the kernel as it was traced.
      operand_count: the number of its inputs that a call passes; the body closes over all further inputs.

    Raises:
      ArgumentError: the notation does not fit the arrays.
    """
    arrays = [*func.inputs[:operand_count], *func.outputs]
    with source.at(func.loc):
        dims = _dims(notation, func, operand_count, arrays)
        sizes = _sizes(notation, func, dims[:operand_count], dims, arrays)
    named = [_named(names, array) for names, array in zip(dims, arrays, strict=True)]
    captured = [_named("." * len(p.ref.shape), p) for p in func.inputs[operand_count:]]
    results = tuple(named[operand_count:])
    sums = {name: frozenset(n for n, names in enumerate(results) if name not in names) for name in sizes}
    return ShardingRule((*named[:operand_count], *captured), results, sizes, sums, {})


def _dims(notation: str, func: Func, count: int, arrays: Sequence[Value]) -> list[Dims]:
    """The names of the dims of all arrays, inputs before results."""
    sides = [[tuple(names.split()) for names in side.split(",")] for side in notation.split("->")]
    ranks = [len(array.ref.shape) for array in arrays]
    if [[len(names) for names in side] for side in sides] == [ranks[:count], ranks[count:]]:
        return [names for side in sides for names in side]
    dots = [" ".join("." * rank) for rank in ranks]
    raise ArgumentError(
        f"the sharding rule of {func.name} does not fit its arrays",
        expected=f"a name or a dot for each dim, as '{', '.join(dots[:count])} -> {', '.join(dots[count:])}'",
        got=repr(notation),
        fix="name dims that are divided together alike, and write a dot for each dim that must be whole",
    )


def _sizes(
    notation: str, func: Func, of_inputs: Sequence[Dims], dims: Sequence[Dims], arrays: Sequence[Value]
) -> Mapping[str, frozenset[int]]:
    """By name, the sizes of its dims; a dot is no name."""
    pairs = [
        (n, size) for names, a in zip(dims, arrays, strict=True) for n, size in zip(names, a.ref.shape, strict=True)
    ]
    sizes = {name: frozenset(size for dim, size in pairs if dim == name) for name, _ in pairs if name != "."}
    for name, extents in sizes.items():
        is_once = all(names.count(name) <= 1 for names in dims) and any(name in names for names in of_inputs)
        if not is_once or not name.isidentifier() or any(size % max(1, min(extents)) for size in extents):
            raise ArgumentError(
                f"the sharding rule of {func.name} has a name that no mesh can divide",
                expected="an identifier, once in an array, in some input, of sizes that are multiples of the least",
                got=f"{name} of sizes {sorted(extents)} in {notation!r}",
                fix="write a dot for dims that must be whole",
            )
    return sizes


def _named(names: Sequence[str], array: Value) -> Dims:
    """The names of the dims of an array, with a name of its own for each dot."""
    return tuple(f"{array.name}.{n}" if name == "." else name for n, name in enumerate(names))
