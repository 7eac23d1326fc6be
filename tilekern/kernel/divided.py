"""Calls whose operands a mesh divides: each device runs the kernel on its part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tilekern import _jax, _meshes, source
from tilekern.errors import ArgumentError, GatherWarning
from tilekern.kernel.primitive import Callee, bind
from tilekern.kernel.sharding_rule import Division, ShardingRule, Spec

gather_warnings = _jax.Cache[tuple[Any, ...], None](512)
"""Callees and types of operands or results for which a `GatherWarning` was given."""

_ADVICE = (
    "print kernel.sharding_rule(...) to see what may be divided, and why the rest may not; devices must divide a dim "
    "evenly"
)


def divide(callee: Callee, specs: Sequence[Spec], mesh: Mapping[str, int]) -> Division | None:
    """The division of a call by its operands' shardings; None if the call has no sharding rule.

    Args:
      callee: what the call runs.
      specs: for each operand the axes that divide its dims.
      mesh: the sizes of the axes.
    """
    rule = callee.rule
    if rule is None:
        return None
    division = rule.assign(specs, mesh)
    while isinstance(reason := callee.part(division.parts), str):
        # The first name that cannot be divided by itself, else the first name of all, gets fewer axes, or none.
        names = [name for name, count in division.parts.items() if isinstance(callee.part({name: count}), str)]
        division = division.without_last_axis((names or [*division.parts])[0], reason).assign(specs, mesh)
    return division


def on_explicit_mesh(callee: Callee, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a call of which explicit axes of a mesh divide operands.

    Raises:
      ArgumentError: operands are addends of a sum, or the kernel has no sharding rule.
    """
    avals = [jax.typeof(x) for x in operands]
    mesh = next(a.sharding.mesh for a in avals if not a.sharding.mesh.empty)
    specs = [_meshes.spec_of(a) for a in avals]
    division = None if any(map(_meshes.is_addend, avals)) else divide(callee, specs, dict(mesh.shape))
    if division is None:
        raise _refused(callee, avals)
    moved = [
        _moved(callee, n, x, *pair) for n, (x, *pair) in enumerate(zip(operands, specs, division.operands, strict=True))
    ]
    on_device = on_part(callee, division)
    if mesh.manual_axes:
        # Inside of another shard_map, JAX 0.12.0.1 writes the outer axes, too, into the specs of residuals, and then
        # refuses the program. With jax.checkpoint the operands are the only residuals. A backward pass that needs
        # results computes the kernel again; otherwise JAX removes the second computation.
        on_device = cast(Any, jax).checkpoint(on_device)
    shard_map = cast(Callable[..., Any], jax.shard_map)
    run = shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(map(_partition_spec, division.operands)),
        out_specs=tuple(map(_partition_spec, division.results)),
        axis_names=_meshes.explicit_axes(mesh),
    )
    return list(run(*moved))


def on_part(callee: Callee, division: Division) -> Callable[..., tuple[Any, ...]]:
    """The function that each device runs on its parts, in a `jax.shard_map`."""
    part = callee.part(division.parts)
    assert not isinstance(part, str)

    def run(*operands: Any) -> tuple[Any, ...]:
        results = bind(part, *operands)
        pairs = ((r, division.summed(n)) for n, r in enumerate(results))
        return tuple(cast(Any, jax.lax).psum(r, axes) if axes else r for r, axes in pairs)

    return run


def _partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))


def _moved(callee: Callee, number: int, operand: Any, spec: Spec, needed: Spec) -> Any:
    """An operand, divided as `needed`; warns once if devices gather it for that."""
    if spec == needed:
        return operand
    _warn_if_gathered(callee, number, operand, spec, needed)
    return cast(Any, jax).reshard(operand, _partition_spec(needed))


def _warn_if_gathered(callee: Callee, number: int, operand: Any, spec: Spec, needed: Spec) -> None:
    if any(set(axes) - set(needed_axes) for axes, needed_axes in zip(spec, needed, strict=True)):
        _warn_once(callee, number, operand, f"as {_partition_spec(spec)}", f"as {_partition_spec(needed)}")


def _warn_once(callee: Callee, number: int, operand: Any, division: str, needed: str) -> None:
    shape = (callee.name, number, operand.shape, division)
    if shape in gather_warnings:
        return
    gather_warnings[shape] = None
    advice = callee.divisible.instead_of_gathers if callee.divisible is not None else ""
    message = (
        f"each device gathers operand {number} of {callee.name}, {operand.size * operand.dtype.itemsize} bytes, "
        f"which is divided {division}, and is needed {needed}.\n"
        f"  fix: {advice or _ADVICE}"
    )
    loc = source.current()
    warnings.warn_explicit(message, GatherWarning, loc.file, loc.line)


def _refused(callee: Callee, avals: Sequence[Any]) -> ArgumentError:
    number, aval = next((n, a) for n, a in enumerate(avals) if _meshes.is_divided(a))
    return ArgumentError(
        f"{callee.name} is called with an array that a mesh divides by its type",
        expected="arrays that are whole on each device, or a call in jax.shard_map",
        got=f"array {number} = {aval.str_short(short_dtypes=True)}",
        fix="wrap the call in jax.shard_map: then each device calls it for its own part; or make the array whole on "
        "each device first, by jax.reshard(x, jax.P()), or jax.lax.psum of addends",
    )


# --- automatic meshes -------------------------------------------------------------------------------------------------


def partitioned(callee: Callee) -> Callable[..., Sequence[jax.Array]]:
    """The jitted program of a call in a program that XLA divides: XLA asks it for the program of a device's part."""
    rule = callee.rule
    assert rule is not None

    def partition(mesh: Any, operands: Sequence[Any], results: Any) -> tuple[Any, ...]:
        division = _division_for(callee, rule, mesh, operands)
        sharding = _shardings(mesh, division, operands)
        run = on_part(callee, division)

        def of_part(*operands: Any) -> tuple[Any, ...]:
            with _meshes.outside_of_meshes():
                return run(*operands)

        return mesh, of_part, tuple(map(sharding, division.results)), tuple(map(sharding, division.operands))

    def together(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(bind(callee, *operands))  # for its types: JAX lowers what `partition` returns

    def program(*operands: jax.Array) -> Sequence[jax.Array]:
        text, needed, sizes = rule.as_shardy(operands, callee.outputs)
        partitionable = cast(Any, custom_partitioning)(together)
        partitionable.def_partition(
            partition=partition,
            decode_shardings=False,  # JAX raises an error where a part of an axis divides a dim
            sharding_rule=text,
            need_replication_factors=needed,
            **sizes,
        )
        return partitionable(*operands)

    program.__name__ = callee.name
    return jax.jit(program)


def _division_for(callee: Callee, rule: ShardingRule, mesh: Any, operands: Sequence[Any]) -> Division:
    """The division by the shardings that XLA chose; a division without axes where they name no mesh.

    Nor does it have axes where a part of an axis divides a dim, as two of four devices 6 tiles.
    """
    if mesh.empty:
        return Division(rule, {}, {})
    found_specs = [_meshes.spec_in_hlo(x.sharding, mesh, len(x.shape)) for x in operands]
    specs = [spec for spec in found_specs if spec is not None]
    if len(specs) < len(found_specs):
        number = found_specs.index(None)
        _warn_once(callee, number, operands[number], "by a part of an axis of the mesh", "whole")
        return Division(rule, {}, {})
    division = divide(callee, specs, dict(mesh.shape))
    assert division is not None
    # An axis that divides another dim is XLA's choice, as for weights that are gathered for a product.
    needed = division.rule.fitting(specs, dict(mesh.shape)) if division.axes else division.operands
    for number, (operand, *pair) in enumerate(zip(operands, specs, needed, strict=True)):
        _warn_if_gathered(callee, number, operand, *pair)
    return division


def _shardings(mesh: Any, division: Division, operands: Sequence[Any]) -> Callable[[Spec], Any]:
    if division.mesh:
        return lambda spec: NamedSharding(mesh, _partition_spec(spec))
    replicated = _meshes.replicated_like(next(x.sharding for x in operands))
    return lambda spec: replicated
