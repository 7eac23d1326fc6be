"""Compiling for TPUs ahead of time, with libtpu, on a machine that has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
CHIPS = tuple(_TOPOLOGIES)


@cache
def _mesh(chip: str) -> Mesh:
    pytest.importorskip("libtpu", reason="needs libtpu")
    # No metadata server is asked, no lock is taken: nothing runs.
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[chip])
    return Mesh(np.array(topology.devices[:1]), ("device",), axis_types=(AxisType.Auto,))


def compiled(function: Callable[..., Any], arrays: Sequence[Any], chip: str) -> Any:
    """The executable of a function of arrays (or their shapes and dtypes) on one core of a chip."""
    mesh = _mesh(chip)
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    # Pallas asks the abstract mesh for the kind of the device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, out_shardings=sharding).lower(*shapes)
    return lowered.compile()
