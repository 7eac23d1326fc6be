"""One of two processes of four devices each: `python two_processes.py NUMBER PORT`, see `test_processes`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import rms_norm


def loss(x: Any, scale: Any, w: Any) -> Any:
    return (matmul(rms_norm(x, scale), w) ** 2).sum()


def plain(x: Any, scale: Any, w: Any) -> Any:
    normed = x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * scale
    return ((normed @ w) ** 2).sum()


def check(kind: AxisType) -> None:
    """Compare the gradients of rows and weights on all eight devices with those of one."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind,) * 2)
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in ((32, 48), (48,), (48, 16))]
    specs = P("data", None), P(), P(None, "model")
    given = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    wanted = jax.jit(jax.grad(plain, (0, 1, 2)))(*map(jnp.asarray, arrays))
    for ours, theirs in zip(found, wanted, strict=True):
        whole = multihost_utils.process_allgather(ours, tiled=True)
        np.testing.assert_allclose(whole, theirs, rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    for kind in (AxisType.Explicit, AxisType.Auto):
        check(kind)
