"""Sharding rules: the dims of a call's arrays that devices may divide, and the results that each device then has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import jax

from tilekern.ir.analysis.sharding import sharding_of
from tilekern.ir.core import Func
from tilekern.ir.records import record

# For each dim of an array the name of its factor.
type Dims = tuple[str, ...]
# For each dim of an array the axes of the mesh that divide it.
type Spec = tuple[tuple[str, ...], ...]


@record
class ShardingRule:
    """Ways to divide the work of a call among devices; prints in the notation of Shardy, as `i k, k j -> i j`.

    Dims of one name are divided together. A name in `sizes` may be divided. All other dims are whole on each device.

    Attributes:
      operands: for each operand the names of its dims.
      results: for each result the names of its dims.
      sizes: by name, the extents that are divided: the number of devices must divide each extent.
      sums: by name, the numbers of the results that are addends if it is divided, to be summed over the devices.
      reasons: by name, the reason why it cannot be divided, for names that are not in `sizes`.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, frozenset[int]]
    sums: Mapping[str, frozenset[int]]
    reasons: Mapping[str, str]

    @property
    def notation(self) -> str:
        """The names of the dims of operands and results, as `i k, k j -> i j`."""
        return " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (self.operands, self.results))

    def __str__(self) -> str:
        lines = [self.notation]
        summed = [name for name in self.sizes if self.sums.get(name)]
        lines += [f"summed over: {', '.join(summed)}"] if summed else []
        lines += [f"whole: {name}, for {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    def as_shardy(self, operands: Sequence[Any], results: Sequence[Any]) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """The text of the rule for XLA, the factors that stay whole, and the sizes of factors of compound dims.

        Example: f32[4, 8], f32[8, 16] -> f32[4, 16], with k whole, gives "f0 f1, f1 f2 -> f0 f2", ("f1",) and {}.
        A dim of 12 in 4 parts is compound: "(f0 f0_1)", with f0_1 whole and the sizes {"f0": 4, "f0_1": 3}. A factor
        that is also a dim by itself has no entry in the sizes.

        Args:
          operands: the types of the operands.
          results: the types of the results.
        """
        factors: dict[tuple[str, int], str] = {}
        whole: list[str] = []
        sizes: dict[str, int] = {}
        alone: set[str] = set()

        def shown(name: str, size: int) -> str:
            common = gcd(*self.sizes.get(name, {1}))
            # Nothing divides a name with a dim of 1: each size of its dims is a factor of its own.
            key = name, common if common > 1 else size
            is_seen = key in factors
            factor = factors.setdefault(key, f"f{len(factors)}")
            if common <= 1:
                whole.extend([] if is_seen else [factor])
                return factor
            if size == common:
                alone.add(factor)
                return factor
            sizes[factor] = common
            cofactor = f"{factor}_{len(sizes)}"
            sizes[cofactor] = size // common
            whole.append(cofactor)
            return f"({factor} {cofactor})"

        def side(dims: Sequence[Dims], types: Sequence[Any]) -> str:
            pairs = zip(dims, types, strict=True)
            return ", ".join(" ".join(map(shown, names, t.shape)) for names, t in pairs)

        text = f"{side(self.operands, operands)} -> {side(self.results, results)}"
        # Shardy wants the size of a factor if it is no dim by itself, and does not take it otherwise.
        return text, tuple(whole), {factor: size for factor, size in sizes.items() if factor not in alone}

    def least_parts(self, names: Iterable[str]) -> dict[str, int]:
        """By name, the least number of parts above 1; names that can only be whole are left out."""
        common = {name: gcd(*self.sizes[name]) for name in names}
        return {n: next(p for p in range(2, size + 1) if size % p == 0) for n, size in common.items() if size > 1}

    def without(self, name: str, reason: str) -> ShardingRule:
        """The rule in which the dims of a name are whole."""
        sizes = {n: size for n, size in self.sizes.items() if n != name}
        return replace(self, sizes=sizes, reasons={**self.reasons, name: reason})

    @property
    def batch_name(self) -> str:
        """The name of the factor that `batched` adds."""
        used = {n for dims in (*self.operands, *self.results) for n in dims}
        return next(n for n in ("batch", *(f"batch{k}" for k in range(len(used) + 1))) if n not in used)

    def batched(self, dims: Sequence[int | None], size: int) -> ShardingRule:
        """The rule under `jax.vmap`: the batch is a factor."""
        name = self.batch_name
        operands = zip(self.operands, dims, strict=True)
        return replace(
            self,
            operands=tuple(o if d is None else (*o[:d], name, *o[d:]) for o, d in operands),
            results=tuple((name, *r) for r in self.results),
            sizes={name: frozenset((size,)), **self.sizes},
        )

    def tangent(self, moving: Sequence[bool], results: Sequence[bool]) -> ShardingRule:
        """The rule of the tangent kernel, from operands and the tangents of operands that move to tangents of results.

        Args:
          moving: one flag for each operand: True if it has a tangent.
          results: one flag for each result: True if it has a tangent.
        """
        moving_results = [n for n, has_tangent in enumerate(results) if has_tangent]
        moved = (o for o, moves in zip(self.operands, moving, strict=True) if moves)
        sums = {
            name: frozenset(moving_results.index(n) for n in numbers if n in moving_results)
            for name, numbers in self.sums.items()
        }
        return replace(
            self,
            operands=(*self.operands, *moved),
            results=tuple(self.results[n] for n in moving_results),
            sums=sums,
        )

    def transposed(self, linear: Sequence[bool]) -> ShardingRule:
        """The rule of the transpose, from other operands and results' cotangents to cotangents of linear operands.

        `linear` has one flag for each operand. An operand that devices share gets the sum of their cotangents.
        """
        pairs = [*zip(self.operands, linear, strict=True)]
        results = tuple(o for o, is_linear in pairs if is_linear)
        sums = {name: frozenset(n for n, r in enumerate(results) if name not in r) for name in self.sizes}
        fixed = (o for o, is_linear in pairs if not is_linear)
        return replace(self, operands=(*fixed, *self.results), results=results, sums=sums)

    def assign(self, specs: Sequence[Spec], mesh: Mapping[str, int]) -> Division:
        """The division of a call whose operands are divided by `specs`.

        Operands may wish for different axes of a name: the most devices win; of equal numbers, the first operand. An
        axis divides one name. Dims that it does not divide evenly stay whole.
        """
        wishes: list[tuple[int, str, tuple[str, ...]]] = []
        for dims, spec in zip(self.operands, self.fitting(specs, mesh), strict=True):
            wishes += [(_devices(axes, mesh), name, axes) for name, axes in zip(dims, spec, strict=True) if axes]
        axes_of: dict[str, tuple[str, ...]] = {}
        for _, name, axes in sorted(wishes, key=lambda wish: -wish[0]):
            taken = {axis for some in axes_of.values() for axis in some}
            if name not in axes_of and taken.isdisjoint(axes):
                axes_of[name] = axes
        return Division(self, axes_of, mesh)

    def fitting(self, specs: Sequence[Spec], mesh: Mapping[str, int]) -> list[Spec]:
        """For each operand, the axes of its spec that may divide its dims, without regard to the other operands.

        Axes are dropped from the end until they divide a dim evenly.
        """
        pairs = zip(self.operands, specs, strict=True)
        return [tuple(self._fitting(n, axes, mesh) for n, axes in zip(dims, s, strict=True)) for dims, s in pairs]

    def _fitting(self, name: str, axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
        while axes and not self._is_even(name, _devices(axes, mesh)):
            axes = axes[:-1]
        return axes

    def _is_even(self, name: str, parts: int) -> bool:
        return name in self.sizes and not any(n % parts for n in self.sizes[name])


@record
class Division:
    """The division of a call.

    Attributes:
      rule: the sharding rule of the call.
      axes: by name of a factor, the axes of the mesh that divide it.
      mesh: the sizes of the axes.
    """

    rule: ShardingRule
    axes: Mapping[str, tuple[str, ...]]
    mesh: Mapping[str, int]

    @property
    def operands(self) -> list[Spec]:
        """The axes that divide the dims of operands."""
        return [tuple(self.axes.get(name, ()) for name in dims) for dims in self.rule.operands]

    @property
    def results(self) -> list[Spec]:
        """The axes that divide the dims of results."""
        return [tuple(self.axes.get(name, ()) for name in dims) for dims in self.rule.results]

    @property
    def parts(self) -> dict[str, int]:
        """By name of a factor the number of its parts; names with one part are left out."""
        counts = {name: _devices(axes, self.mesh) for name, axes in self.axes.items()}
        return {name: count for name, count in counts.items() if count > 1}

    def without_last_axis(self, name: str, reason: str) -> ShardingRule:
        """The rule by which all axes of a name but the last may divide it; its dims are whole if that is one part."""
        most = _devices(self.axes[name][:-1], self.mesh)
        if most == 1:
            return self.rule.without(name, reason)
        sizes = {**self.rule.sizes, name: self.rule.sizes[name] | {most}}
        return replace(self.rule, sizes=sizes)

    def summed(self, result: int) -> tuple[str, ...]:
        """The axes of the mesh whose devices have addends of a result."""
        names = (name for name in self.axes if result in self.rule.sums.get(name, ()))
        return tuple(axis for name in names for axis in self.axes[name])


def _devices(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    return prod(mesh[axis] for axis in axes)


def part_types(
    types: Sequence[jax.ShapeDtypeStruct], dims: Sequence[Dims], parts: Mapping[str, int]
) -> list[jax.ShapeDtypeStruct]:
    """The types of the parts of arrays.

    Args:
      types: the types of the whole arrays.
      dims: for each array the names of its dims.
      parts: by name the number of parts; 1 for names that are left out.
    """
    shapes = [
        [n // parts.get(name, 1) for n, name in zip(t.shape, names, strict=True)]
        for t, names in zip(types, dims, strict=True)
    ]
    return [jax.ShapeDtypeStruct(tuple(shape), t.dtype) for t, shape in zip(types, shapes, strict=True)]


def rule_of(func: Func, operand_count: int, *, with_other_blocks: bool) -> ShardingRule:
    """The rule of a kernel.

    Args:
      func: the kernel as it was traced.
      operand_count: the number of its inputs that a call passes; the body closes over all further inputs.
      with_other_blocks: see `sharding_of`.
    """
    sharding = sharding_of(func, with_other_blocks=with_other_blocks)
    names: dict[tuple[int, int], str] = {}
    sizes: dict[str, frozenset[int]] = {}
    sums: dict[str, frozenset[int]] = {}
    reasons = dict(sharding.reasons)
    numbers = {param: n for n, param in enumerate(func.params)}
    outputs = [numbers[p] for p in func.outputs]
    captured = {numbers[p] for p in func.inputs[operand_count:]}
    for factor in sharding.factors:
        name = next(n for n in (factor.name, *(f"{factor.name}{k}" for k in range(99))) if n not in sizes)
        if captured.intersection(n for n, _ in factor.dims):
            reasons[name] = "the body closes over an array with a dim of its extent"
            continue
        names.update(dict.fromkeys(factor.dims, name))
        sizes[name] = factor.sizes
        sums[name] = frozenset(n for n, number in enumerate(outputs) if number in factor.addends)
    return ShardingRule(
        tuple(_dims(func, numbers[p], names) for p in func.inputs),
        tuple(_dims(func, number, names) for number in outputs),
        sizes,
        sums,
        reasons,
    )


def _dims(func: Func, number: int, names: Mapping[tuple[int, int], str]) -> Dims:
    param: Any = func.params[number]
    return tuple(names.get((number, n), f"{param.name}.{n}") for n in range(len(param.ref.shape)))
