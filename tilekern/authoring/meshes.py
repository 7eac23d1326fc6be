"""Functions of arrays that explicit axes of a mesh divide, in parts that the author chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec

from tilekern import _meshes
from tilekern.kernel import Kernel


def gathered(x: jax.Array) -> jax.Array:
    """x, whole on each device. No explicit axis of a mesh divides the result by its type; automatic axes may."""
    return cast(Any, jax).reshard(x, PartitionSpec()) if _meshes.is_divided(jax.typeof(x)) else x


def advise_instead_of_gathers(kernel: Kernel, advice: str) -> None:
    """Say in the `GatherWarning` of a kernel's calls what callers can do about operands that devices gather."""
    # No method: it would be one more name of each kernel that a user declares.
    kernel._definition.rules.instead_of_gathers = advice  # pyright: ignore[reportPrivateUsage]


def by_rows(function: Callable[..., Any], rows: Sequence[Any], shared: Sequence[Any]) -> Any:
    """function(*rows, *shared); each device computes some rows if explicit axes of a mesh divide an operand.

    The axes that divide the first dim of the first array divide the first dims of all `rows`, and of the results. All
    other dims, and `shared`, are gathered. Derivatives with respect to `shared` are added up over devices.

    Args:
      function: of arrays; each row of its results depends on one row of each array in `rows`.
      rows: arrays with as many rows, or pytrees of such arrays.
      shared: further operands, arrays or pytrees of arrays.
    """
    avals = [jax.typeof(x) for x in jax.tree.leaves((rows, shared))]
    mesh = next((aval.sharding.mesh for aval in avals if _meshes.is_divided(aval)), None)
    if mesh is None:
        return function(*rows, *shared)
    axes = _meshes.spec_of(jax.typeof(jax.tree.leaves(rows)[0]))[0]
    divided = PartitionSpec(axes or None)
    specs = divided, PartitionSpec()

    def placed(group: Sequence[Any], spec: PartitionSpec) -> Sequence[Any]:
        return cast(Any, jax).tree.map(partial(cast(Any, jax).reshard, out_shardings=spec), list(group))

    def of_part(rows: Sequence[Any], shared: Sequence[Any]) -> Any:
        return function(*rows, *shared)

    run = cast(Callable[..., Any], jax.shard_map)(
        of_part, mesh=mesh, in_specs=specs, out_specs=divided, axis_names=_meshes.explicit_axes(mesh)
    )
    return run(placed(rows, divided), placed(shared, PartitionSpec()))
