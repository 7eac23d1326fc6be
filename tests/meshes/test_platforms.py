"""Divided calls lowered for platforms that are not here, and exported."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tilekern.errors import TargetError
from tilekern.kernels.matmul import matmul

# Divided kernels are the first thing to look at with another version of JAX.
pytestmark = pytest.mark.smoke

MESHES = {kind: jax.make_mesh((2, 4), ("a", "b"), (getattr(AxisType, kind),) * 2) for kind in ("Auto", "Explicit")}
CUSTOM_CALL = re.compile(r"custom_call @(\w+)\(.*?: (\(.*?\) -> \S+)")


def product(kind: str) -> tuple[Any, Any, Any]:
    """A jitted product, and operands of which the mesh divides rows and the inner dim."""
    mesh = MESHES[kind]
    x = jax.device_put(np.ones((64, 96), np.float32), NamedSharding(mesh, P("a", "b")))
    w = jax.device_put(np.ones((96, 32), np.float32), NamedSharding(mesh, P("b")))
    return jax.jit(lambda x, w: matmul(x, w)), x, w


def calls(kind: str, platform: str) -> list[tuple[str, str]]:
    """The custom calls of the product's program for a platform, with their types."""
    function, *arrays = product(kind)
    with jax.set_mesh(MESHES[kind]):
        return CUSTOM_CALL.findall(function.trace(*arrays).lower(lowering_platforms=(platform,)).as_text())


def test_gpus_get_a_kernel_of_parts() -> None:
    pytest.importorskip("triton", reason="needs triton")
    part = "(tensor<32x24xf32>, tensor<24x32xf32>) -> tensor<32x32xf32>"
    assert calls("Explicit", "cuda") == [("triton_kernel_call_ffi", part)]
    # XLA asks for the kernel of parts when it divides the program.
    whole = "(tensor<64x96xf32>, tensor<96x32xf32>) -> tensor<64x32xf32>"
    assert calls("Auto", "cuda") == [("CustomSPMDPartitioning", whole)]


def test_tpus_get_a_kernel_of_parts() -> None:
    ((name, types),) = calls("Explicit", "tpu")
    assert name == "tpu_custom_call" and "32x24xf32" in types and types.endswith("tensor<32x32xf32>")


def test_tpus_refuse_automatic_axes_with_the_rule() -> None:
    with pytest.raises(TargetError) as raised:
        calls("Auto", "tpu")
    assert raised.value.summary == "XLA cannot divide the kernel matmul among TPUs"
    assert "axis0 k, k axis1 -> axis0 axis1" in raised.value.fix
    assert "jax.shard_map" in raised.value.fix


def test_a_gradient_compiles_for_four_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        monkeypatch.setenv(name, value)  # no metadata server is asked, no lock is taken
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("a", "b")))
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("b", None)))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda x, w: matmul(x, w).astype(jnp.float32).sum(), (0, 1)))
        text = gradient.lower(x, w).compile().as_text()
    found = sorted(re.findall(r"%matmul\S* = (bf16\[\d+,\d+\])\S* custom-call", text))
    assert found == ["bf16[256,256]", "bf16[256,256]"]  # the cotangents of parts
    assert "all-gather" not in text


@pytest.mark.parametrize("kind", MESHES)
def test_exported_programs(kind: str) -> None:
    """What an explicit mesh divides is divided in an exported program, too; automatic axes ask the host."""
    function, x, w = product(kind)
    with jax.set_mesh(MESHES[kind]):
        exported = jax.export.export(function, platforms=["cpu"], disabled_checks=tk.export.checks())(x, w)
        again = jax.export.deserialize(exported.serialize())
        np.testing.assert_array_equal(again.call(x, w), np.full((64, 32), 96))
    assert exported.nr_devices == 8
    assert ("all_reduce" in exported.mlir_module()) == (kind == "Explicit")
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
