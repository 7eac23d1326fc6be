"""Ops on explicit meshes: JAX's rules divide their operations, and each kernel inside divides by its own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tests.lang.checks import marked_line
from tilekern.errors import ArgumentError

MESH = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
SPECS = {"x": P("data", None), "up": P(None, "model"), "down": P("model", None)}
SIZES = {"x": (8, 6), "up": (6, 4), "down": (4, 6)}


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def product(x: Any, w: Any, out: Any, *, rows: tk.Block = 2) -> None:
    i = tk.parallel(x.shape[0], rows)
    j = tk.parallel(w.shape[1], 2)
    steps = tk.serial(w.shape[0], 2)
    out[i, j] = tk.fold(steps, lambda k, acc: acc + tk.dot(x[i, k], w[k, j]), jnp.zeros((i.size, j.size), jnp.float32))


def layer_type(x: Any, up: Any, down: Any) -> Any:
    return jax.ShapeDtypeStruct((x.shape[0], down.shape[1]), x.dtype), jax.ShapeDtypeStruct((), x.dtype)


def made() -> Any:
    """A layer: a product, an activation, a product, and the sum of what is between them; two results."""

    @tk.op(out_type=layer_type)
    def layer(x: Any, up: Any, down: Any, *, parts: tk.Block = 2) -> tuple[Any, Any]:
        halves = jnp.split(x, parts, axis=1)
        hidden = jnp.sin(sum(product(h, w) for h, w in zip(halves, jnp.split(up, parts), strict=True)))
        return product(hidden, down), hidden.sum()

    return layer


def with_rules() -> Any:
    """The same, with a derivative of its own: that of the second result is stated to be zero."""
    layer = made()

    @tk.op(out_type=lambda x, up, down, t: layer_type(x, up, down)[0], linear=("t",))
    def tangent(x: Any, up: Any, down: Any, t: Any) -> Any:
        return product(jnp.cos(product(x, up)) * product(t, up), down)

    @tangent.deftranspose
    def _(ct: Any, x: Any, up: Any, down: Any, t: Any) -> Any:
        return {"t": product(jnp.cos(product(x, up)) * product(ct, down.T), up.T)}

    @layer.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        assert tangents[1:] == (None, None)
        return layer(*primals), (tangent(*primals, tangents[0]), None)

    return layer


def arrays(divided: bool) -> list[jax.Array]:
    random = np.random.default_rng(0)
    values = {name: random.normal(size=size).astype(np.float32) for name, size in SIZES.items()}
    return [jax.device_put(v, NamedSharding(MESH, SPECS[n])) if divided else v for n, v in values.items()]


def loss(layer: Callable[..., Any], *arrays: Any) -> Any:
    out, total = layer(*arrays)
    return (out * out).sum() + jnp.sin(total)


# Of a layer and its arrays: what is computed, in which each derivative and transformation of JAX appears.
WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda layer, *a: layer(*a),
    "jit": lambda layer, *a: jax.jit(lambda *a: layer(*a))(*a),
    "gradient": lambda layer, *a: jax.jit(jax.grad(lambda *a: loss(layer, *a), (0, 1, 2)))(*a),
    "one result": lambda layer, *a: jax.grad(lambda *a: layer(*a)[1], (0, 1))(*a),
    "tangent": lambda layer, x, *a: jax.jvp(lambda x: layer(x, *a), (x,), (x,)),
    "second": lambda layer, x, *a: jax.jit(jax.grad(lambda x: (jax.grad(loss, 1)(layer, x, *a) ** 2).sum()))(x),
    "vmap": lambda layer, x, *a: jax.vmap(lambda s: layer(s * x, *a), out_axes=(0, 0))(jnp.arange(1.0, 4)),
    "vmap of gradients": lambda layer, x, *a: jax.jit(
        jax.vmap(jax.grad(lambda s, *a: loss(layer, s * x, *a), (0, 2)), (0, None, None))
    )(jnp.arange(1.0, 4), *a),
    "checkpoint": lambda layer, *a: jax.jit(jax.grad(jax.checkpoint(lambda *a: loss(layer, *a)), (0, 2)))(*a),
    "in an op": lambda layer, *a: tk.op(out_type=layer_type)(lambda x, up, down: layer(x, up, down))(*a),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_op_on_divided_arrays_is_that_on_one_device(way: str) -> None:
    wanted = WAYS[way](made(), *arrays(divided=False))
    with jax.set_mesh(MESH):
        found = WAYS[way](made(), *arrays(divided=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("way", ["call", "jit", "gradient"])
def test_the_mesh_need_not_be_set(way: str) -> None:
    """Types name it. JAX itself has no gradients outside of jit then."""
    wanted, found = (WAYS[way](made(), *arrays(divided)) for divided in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


def test_results_are_divided_as_jax_divides_them() -> None:
    with jax.set_mesh(MESH):
        out, total = made()(*arrays(divided=True))
    assert jax.typeof(out).sharding.spec == P("data", None)
    assert jax.typeof(total).sharding.spec == P()


def test_gradients_are_divided_as_their_arrays() -> None:
    given = arrays(divided=True)
    with jax.set_mesh(MESH):
        found = jax.grad(lambda *a: loss(made(), *a), (0, 1, 2))(*given)
    assert [jax.typeof(g).sharding.spec for g in found] == list(SPECS.values())


@pytest.mark.parametrize("way", ["gradient", "tangent", "vmap of gradients"])
def test_stated_rules_count_on_a_mesh(way: str) -> None:
    """By the rule the second result does not move, which a derivative of the body would contradict."""

    def of_x(layer: Any, x: Any, *a: Any) -> Any:
        if way == "tangent":
            return jax.jvp(lambda x: layer(x, *a), (x,), (x,))
        gradient = jax.grad(lambda x: loss(layer, x, *a))
        return jax.jit(gradient)(x) if way == "gradient" else jax.vmap(lambda s: gradient(s * x))(jnp.arange(1.0, 4))

    wanted = of_x(with_rules(), *arrays(divided=False))
    with jax.set_mesh(MESH):
        found = of_x(with_rules(), *arrays(divided=True))
        derived = of_x(made(), *arrays(divided=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)
    assert any(not np.allclose(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(derived), strict=True))


def test_blocks_are_those_of_the_target() -> None:
    """They are known when the op is lowered; types do not depend on them."""
    seen: list[int] = []

    @tk.op(out_type=lambda x, up, down: layer_type(x, up, down)[0])
    def layer(x: Any, up: Any, down: Any, *, rows: tk.Block = 1) -> Any:
        seen.append(rows)
        return product(product(x, up, rows=rows), down)

    @layer.schedule("cpu")
    def _(x: Any, up: Any, down: Any) -> dict[str, int]:
        return {"rows": 2}

    with jax.set_mesh(MESH):
        layer(*arrays(divided=True))
    assert seen[-1] == 2


def test_an_op_in_a_shard_map_over_some_axes() -> None:
    layer = made()
    wanted = layer(*arrays(divided=False))[0]

    def local(*a: Any) -> Any:
        return layer(*a)[0]

    with jax.set_mesh(MESH):
        specs = P("data"), P(), P()
        run = jax.shard_map(local, in_specs=specs, out_specs=P("data"), axis_names={"data"})
        found = jax.jit(run)(*arrays(divided=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_an_exported_op_keeps_its_mesh() -> None:
    layer = made()
    with jax.set_mesh(MESH):
        exported = jax.export.export(jax.jit(lambda *a: layer(*a, target="cpu:xla")))(*arrays(divided=True))
        found = exported.call(*arrays(divided=True))
    np.testing.assert_allclose(found[0], layer(*arrays(divided=False))[0], rtol=1e-5, atol=1e-5)


def test_an_addend_is_refused_by_the_kernel_inside() -> None:
    @tk.op(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
    def layer(x: Any, w: Any) -> Any:
        return product(x, w)  # <-

    x, up, _ = arrays(divided=False)
    addends = NamedSharding(MESH, P(unreduced={"data"}))
    with jax.set_mesh(MESH), pytest.raises(ArgumentError) as raised:
        jax.jit(lambda x: layer(jax.reshard(x, addends), up))(x)
    assert raised.value.summary == "product is called with an array that a mesh divides by its type"
    assert "jax.lax.psum of addends" in raised.value.fix
    assert (raised.value.loc.file, raised.value.loc.line) == (__file__, marked_line(layer.__wrapped__.__code__))
