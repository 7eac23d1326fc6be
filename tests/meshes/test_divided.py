"""Kernels in programs that XLA partitions: a warning about gathered operands, an error on explicit meshes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tilekern.errors import GatherWarning

# Divided kernels are the first thing to look at with another version of JAX.
pytestmark = pytest.mark.smoke

X, W = np.arange(8, dtype=np.float32), np.array([2, 3], np.float32)


def mesh_of(kind: AxisType, devices: int = 4) -> Any:
    return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


AUTO, EXPLICIT = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)


def put(x: Any, mesh: Any, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def scaled(name: str = "scale", divides: bool = False) -> Any:
    """Make a new kernel for each test, because a kernel warns only once; one that sees positions does not divide."""

    def scale(x, w, out):
        i = tk.parallel(x.shape[0], 2)
        seen = 0.0 if divides else 0.0 * i.index
        out[i] = tk.fold(tk.serial(2), lambda n, acc: acc + n * w[0] * x[i], jnp.zeros(2) + w[1] + seen)

    scale.__name__ = name
    kernel = tk.kernel(out_type=lambda x, w: x)(scale)

    @kernel.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return kernel(x, w), (0 if dx is None else dx * w[0]) + (0 if dw is None else dw[1] + x * dw[0])

    return kernel


WANTED = 2 * X + 3
targets = pytest.mark.parametrize("target", ["cpu:llvm", "cpu:xla"])


# --- automatic meshes -----------------------------------------------------------------------------------------------


def warned(function: Callable[..., Any], *arrays: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(function(*arrays), WANTED)
    return [warning for warning in caught if issubclass(warning.category, GatherWarning)]


@pytest.mark.parametrize("jitted", [False, True])
def test_divided_arguments_are_gathered_with_one_warning(jitted: bool) -> None:
    kernel = scaled(f"divided_{jitted}")
    x = put(X, AUTO, "data")
    (warning,) = warned(jax.jit(lambda x, w: kernel(x, w)) if jitted else kernel, x, W)
    text = str(warning.message)
    assert f"XLA divides a program among 4 devices, but not its call of divided_{jitted}:" in text
    assert "40 bytes at most" in text
    assert "jax.shard_map" in text
    assert warning.filename == __file__
    assert not warned(jax.jit(lambda x, w: kernel(x, w) + 0), x, W)


@pytest.mark.parametrize("way", ["call", "jit", "asked inside", "op"])
def test_a_kernel_that_divides_gathers_nothing(way: str) -> None:
    kernel = scaled(f"divides_{way}", divides=True)
    sharding = NamedSharding(AUTO, P("data"))
    ways = {
        "call": kernel,
        "jit": jax.jit(lambda x, w: kernel(x, w)),
        "asked inside": jax.jit(lambda x, w: kernel(jax.lax.with_sharding_constraint(x, sharding), w)),
        "op": tk.op(out_type=lambda x, w: x)(lambda x, w: kernel(x, w) + 0),
    }
    x = put(X, AUTO) if way == "asked inside" else put(X, AUTO, "data")
    assert not warned(ways[way], x, put(W, AUTO))
    assert ways[way](x, put(W, AUTO)).sharding.is_equivalent_to(sharding, 1)


@targets
def test_a_kernel_that_asserts_is_not_divided(target: str) -> None:
    """JAX would free the host's function before the program runs."""

    @tk.kernel(out_type=lambda x, w: x)
    def asserts(x, w, out):
        i = tk.parallel(x.shape[0], 2)
        tk.device_assert(x[i] >= 0, "negative")
        out[i] = x[i] * w[0] + w[1]

    with pytest.warns(GatherWarning) if target == "cpu:llvm" else warnings.catch_warnings():
        found = jax.jit(lambda x, w: asserts(x, w, target=target))(put(X, AUTO, "data"), put(W, AUTO))
    np.testing.assert_array_equal(found, WANTED)


def test_other_shapes_warn_again() -> None:
    kernel = scaled("shapes")
    assert len(warned(kernel, put(X, AUTO, "data"), W)) == 1
    with pytest.warns(GatherWarning, match="72 bytes"):
        kernel(put(np.ones(16, np.float32), AUTO, "data"), W)


def test_the_kernels_of_an_op_warn() -> None:
    kernel = scaled("inside")
    outside = tk.op(out_type=lambda x, w: x)(lambda x, w: kernel(x, w) + 0)
    (warning,) = warned(outside, put(X, AUTO, "data"), W)
    assert "its call of inside" in str(warning.message)


def test_the_portable_backend_is_plain_jax() -> None:
    kernel = scaled("portable")
    x = put(np.ones((64, 2), np.float32), AUTO, "data")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        result = jax.vmap(lambda x: kernel(x, W, target="cpu:xla"))(x)
    assert result.sharding.is_equivalent_to(x.sharding, 2)


def test_what_is_asked_to_be_divided_inside_is_gathered() -> None:
    kernel = scaled("asked")
    divided = NamedSharding(AUTO, P("data"))
    function = jax.jit(lambda x, w: kernel(jax.lax.with_sharding_constraint(x, divided), w))
    assert len(warned(function, put(X, AUTO), put(W, AUTO))) == 1


def mapped(function: Callable[..., Any], mesh: Any, check: bool = True) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check)


def _beside(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An op on whole arrays, in a program that has sharded arrays, too."""
    op = tk.op(out_type=lambda x, w: x)(lambda x, w: kernel(x, w))
    return jax.jit(lambda x, w, other: op(x, w) + 0 * other)


@pytest.mark.parametrize(
    "how", ["one device", "replicated", "shard_map", "jitted shard_map", "unchecked", "explicit", "explicit op"]
)
def test_nothing_is_gathered_and_nobody_warned(how: str) -> None:
    kernel = scaled(f"silent_{how}")
    x, w = put(X, AUTO, "data"), put(W, AUTO)
    calls: dict[str, Callable[[], Any]] = {
        "one device": lambda: warned(jax.jit(kernel), X, W),
        "replicated": lambda: warned(jax.jit(lambda x, w: kernel(x, w)), put(X, AUTO), w) + warned(kernel, X, w),
        "shard_map": lambda: warned(mapped(kernel, AUTO), x, w),
        "jitted shard_map": lambda: warned(jax.jit(mapped(kernel, AUTO)), x, w),
        "unchecked": lambda: warned(jax.jit(mapped(kernel, AUTO, check=False)), x, w),
        "explicit": lambda: warned(jax.jit(kernel), put(X, EXPLICIT), put(W, EXPLICIT)),
        "explicit op": lambda: warned(_beside(kernel), put(X, EXPLICIT), put(W, EXPLICIT), put(X, EXPLICIT, "data")),
    }
    assert calls[how]() == []


def test_a_shard_map_over_some_axes_gathers() -> None:
    kernel = scaled("partly")
    mesh = jax.make_mesh((2, 2), ("data", "rest"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    local = jax.shard_map(kernel, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    (warning,) = warned(jax.jit(local), put(X, mesh, ("data", "rest")), put(W, mesh))
    assert "the mesh's 'rest' of 2" in str(warning.message)
    assert "24 bytes at most" in str(warning.message)


# --- explicit meshes ------------------------------------------------------------------------------------------------


def _ways(kernel: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "call": kernel,
        "jit": jax.jit(kernel),
        "vmap": lambda x, w: jax.vmap(kernel, (0, None))(x[None], w)[0],
        "grad": lambda x, w: jax.grad(lambda w: kernel(x, w).sum())(w),
        "op": tk.op(out_type=lambda x, w: x)(lambda x, w: kernel(x, w)),
    }


@targets
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("way", _ways(jnp.add))
def test_replicated_arrays_on_an_explicit_mesh(way: str, devices: int, target: str) -> None:
    mesh, kernel = mesh_of(AxisType.Explicit, devices), scaled()
    with jax.set_mesh(mesh):
        x, w = put(X, mesh), put(W, mesh)
        result = _ways(lambda x, w: kernel(x, w, target=target))[way](x, w)
        np.testing.assert_array_equal(result, [X.sum(), 8] if way == "grad" else WANTED)
        assert jax.typeof(result) == jax.typeof(w if way == "grad" else x)
        assert jax.typeof(jnp.add(result, 1)) == jax.typeof(result)


@targets
def test_an_axis_of_one_device_divides_nothing(target: str) -> None:
    mesh, kernel = mesh_of(AxisType.Explicit, 1), scaled()
    with jax.set_mesh(mesh):
        x, w = put(X, mesh, "data"), put(W, mesh)
        np.testing.assert_array_equal(x + kernel(x, w, target=target), X + WANTED)
        both = jax.vmap(lambda x: kernel(x, w, target=target))(jnp.stack([x, x]))
        np.testing.assert_array_equal(both, [WANTED, WANTED])
        found = jax.jit(jax.grad(lambda x: (x * kernel(x, w, target=target)).sum()))(x)
        np.testing.assert_array_equal(found, WANTED + 2 * X)


@targets
@pytest.mark.parametrize("way", ["call", "jit", "vmap", "vmap over the mesh"])
def test_divided_arrays_on_an_explicit_mesh(way: str, target: str) -> None:
    kernel = scaled(divides=True)

    def call(x: Any, w: Any) -> Any:
        return kernel(x, w, target=target)

    ways = {
        "call": call,
        "jit": jax.jit(call),
        "vmap": jax.vmap(call, (None, 0)),
        "vmap over the mesh": jax.vmap(call, (0, None)),
    }
    rows = np.stack([X + n for n in range(4)])
    x = put(rows if way == "vmap over the mesh" else X, EXPLICIT, "data")
    w = put(np.stack([W + n for n in range(3)]) if way == "vmap" else W, EXPLICIT)
    wanted = {"vmap": np.stack([2 * X + 3 + n * (X + 1) for n in range(3)]), "vmap over the mesh": 2 * rows + 3}
    with jax.set_mesh(EXPLICIT):
        found = ways[way](x, w)
        np.testing.assert_array_equal(found, wanted.get(way, WANTED))
        assert jax.typeof(found).sharding.spec == (
            P(None, "data") if way == "vmap" else P("data", *[None] * (x.ndim - 1))
        )


def test_the_remedies_on_an_explicit_mesh() -> None:
    kernel = scaled()
    with jax.set_mesh(EXPLICIT):
        x, w = put(X, EXPLICIT, "data"), put(W, EXPLICIT)
        np.testing.assert_array_equal(jax.jit(mapped(kernel, EXPLICIT))(x, w), WANTED)
        np.testing.assert_array_equal(kernel(jax.reshard(x, jax.P()), w), WANTED)


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradients_that_add_up_undivided_rows_have_the_bits_of_one_device(kind: AxisType) -> None:
    """Forty programs add to the gradient of each row of x; devices divide the rows."""

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((40, *x.shape), x.dtype))
    def repeated(x: tk.Ref, out: tk.Ref) -> None:
        i, j = tk.parallel(40), tk.parallel(x.shape[0], 2)
        out[i, j, :] = jnp.exp(x[j, :])

    x = np.random.default_rng(0).normal(size=(16, 40)).astype(np.float32)
    scale = np.random.default_rng(1).normal(size=(40, 16, 40)).astype(np.float32)
    gradient = jax.grad(lambda x: (repeated(x, target="cpu:llvm") * scale).sum())
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        found = jax.jit(gradient)(put(x, mesh, "data", None))
    assert not found.is_fully_replicated
    assert np.asarray(found).tobytes() == np.asarray(jax.jit(gradient)(x)).tobytes()
