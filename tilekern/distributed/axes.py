"""Mesh axes by their names."""

from __future__ import annotations

import jax
from jax import lax

from tilekern.authoring import hide_frames
from tilekern.errors import ArgumentError

hide_frames(__file__)


def axis_size(axis_name: str, function: str) -> int:
    """The number of devices of a mesh axis over which the `jax.shard_map` around the call is manual.

    Raises:
      tilekern.errors.ArgumentError: no such axis is manual around the call.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        axes = sorted(jax.sharding.get_abstract_mesh().manual_axes)
        raise ArgumentError(
            f"{function} needs a mesh axis over which the jax.shard_map around it is manual",
            expected=f"axis_name: one of {axes}" if axes else "a call inside of jax.shard_map",
            got=f"axis_name={axis_name!r}",
            fix="name an axis of the mesh that jax.shard_map is given, and list it in axis_names if that is set",
        ) from None
