"""Kernels on meshes that divide calls: each device runs its part, with the collectives that the rule predicts."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tests.autodiff import kernels as users
from tests.lang.checks import like_first
from tilekern.errors import GatherWarning
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp as losses
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as attention
from tilekern.kernels.group_norm import api as large_norms
from tilekern.kernels.group_norm import group_norm
from tilekern.kernels.group_norm import reference as group_normalized
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.layer_norm import reference as normalized
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rope import reference as rotated
from tilekern.kernels.rope import rope
from tilekern.kernels.swiglu import reference as gated
from tilekern.kernels.swiglu import swiglu
from tilekern.testing import assert_close, in_float64

# Divided kernels are the first thing to look at with another version of JAX.
pytestmark = pytest.mark.smoke

MESHES = {kind: jax.make_mesh((2, 4), ("a", "b"), (getattr(AxisType, kind),) * 2) for kind in ("Auto", "Explicit")}
MESHES["both"] = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto, AxisType.Explicit))
MESH = MESHES["Explicit"]
kinds = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


@dataclass(frozen=True)
class Case:
    """A kernel, the same in plain JAX, and shapes whose dims 8 devices divide."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def arrays(self) -> list[Any]:
        random = np.random.default_rng(0)
        return [random.standard_normal(shape).astype(np.float32) for shape in self.shapes]


CASES = {
    "matmul": Case(matmul, jnp.matmul, ((16, 24), (24, 8))),
    "a batch of products": Case(matmul, jnp.matmul, ((8, 1, 8, 8), (8, 8, 16))),
    "layer_norm": Case(layer_norm, normalized, ((16, 24), (24,), (24,))),
    "group_norm": Case(
        group_norm,
        group_normalized,
        ((8, 3, 48), (48,), (48,)),
        keywords={"num_groups": 8, "activation": "silu"},
    ),
    "swiglu": Case(swiglu, gated, ((16, 24), (16, 24))),
    "rope": Case(rope, rotated, ((8, 8, 8, 16),)),
    "attention": Case(
        flash_attention,
        lambda *a, **k: attention(*a, **k)[0],
        ((8, 16, 8, 8), (8, 16, 4, 8), (8, 16, 4, 8)),
        keywords={"causal": True},
    ),
    "cross_entropy": Case(
        cross_entropy,
        lambda *a: losses(*a)[0],
        ((16, 8), (8, 24)),
        rest=(np.array([0, 23, 3, 3, 7, 1, -100, 9] * 2, np.int32),),
    ),
    "a user's norm": Case(users.norm, users.norm_reference, ((16, 24), (24,))),
    "a user's product": Case(users.product, jnp.matmul, ((16, 24), (24, 8))),
    "a user's attention": Case(users.attention, users.attention_reference, ((16, 8),) * 3),
    "a user's two passes": Case(users.two_passes, lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, ((16, 8),) * 3),
    "a user's recurrence": Case(users.recurrence, users.recurrence_reference, ((16, 8),) * 2),
    "a user's heads": Case(users.heads, users.heads_reference, ((8, 24), (2, 6))),
}


def put(x: Any, spec: P, mesh: Any = MESH) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def both(function: Callable[..., Any], case: Case, *arrays: Any) -> Any:
    """The result, and the cotangents of all arrays."""
    out, pull = jax.vjp(lambda *a: function(*a, *case.rest, **case.keywords), *arrays)
    return out, pull(jnp.cos(out))


@kinds
@pytest.mark.parametrize("spec", [P("a", None, "b"), P(("a", "b"), None, None), P(None, None, "b")], ids=str)
def test_large_samples_of_a_group_norm(kind: str, spec: P, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op computes them in parts: its kernels divide by their rules, and what is between them by JAX's."""
    monkeypatch.setattr(large_norms, "ONE_PROGRAM", 0)
    case, mesh = CASES["group_norm"], MESHES[kind]
    arrays = case.arrays()
    with jax.set_mesh(mesh):
        given = [put(x, s, mesh) for x, s in zip(arrays, (spec, *[P(spec[-1])] * 2), strict=True)]
        found = jax.jit(partial(both, case.kernel, case))(*given)
    oracle, low = on_one_device("group_norm")
    for f, exact, naive in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(np.asarray(f), exact, naive, length=64, factor=3)
    if kind == "Explicit":
        assert [jax.typeof(x).sharding.spec for x in (found[0], found[1][0])] == [spec, spec]


@cache
def on_one_device(name: str) -> tuple[Any, Any]:
    """The same in float64, and naively."""
    case = CASES[name]
    plain, arrays = partial(both, case.plain, case), case.arrays()
    return in_float64(plain, *arrays), jax.device_get(jax.jit(plain)(*arrays))


@st.composite
def specs(draw: Any, shapes: tuple[tuple[int, ...], ...]) -> list[P]:
    """A random sharding of each array: axes on different dims, which they divide."""
    found: list[P] = []
    for shape in shapes:
        dims: list[list[str]] = [[] for _ in shape]
        for axis in draw(st.permutations(["a", "b"])):
            fitting = [n for n, size in enumerate(shape) if size % (MESH.shape[axis] * (8 if dims[n] else 1)) == 0]
            chosen = draw(st.sampled_from([None, *fitting]))
            if chosen is not None:
                dims[chosen].append(axis)
        found.append(P(*(tuple(d) or None for d in dims)))
    return found


@settings(max_examples=settings().max_examples // 6)
@given(
    name=st.sampled_from(sorted(CASES)),
    data=st.data(),
    kind=st.sampled_from(sorted(MESHES)),
    target=st.sampled_from(["cpu", "cpu", "cpu:xla"]),
)
def test_results_and_gradients_are_those_of_a_single_device(name: str, data: Any, kind: str, target: str) -> None:
    case, mesh = CASES[name], MESHES[kind]
    drawn = data.draw(specs(case.shapes))
    given = [put(x, spec, mesh) for x, spec in zip(case.arrays(), drawn, strict=True)]

    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        kernel = partial(case.kernel, target=target)
        found = jax.jit(partial(both, kernel, case))(*given)
    for x, g in zip(given, found[1], strict=True):
        assert jax.typeof(x) == jax.typeof(g)
    oracle, low = on_one_device(name)
    for f, exact, naive in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(np.asarray(f), exact, naive, length=64, factor=3)


def test_gradients_of_a_batch_that_one_axis_divides_and_sums_that_another_divides() -> None:
    """`jax.vmap` puts the `shard_map` of the batch's axis into that of the sum's axis."""
    case = CASES["a batch of products"]
    given = [put(x, spec) for x, spec in zip(case.arrays(), (P(), P("a", "b")), strict=True)]
    with jax.set_mesh(MESH):
        found = jax.jit(partial(both, case.kernel, case))(*given)
    oracle, low = on_one_device("a batch of products")
    for f, exact, naive in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(np.asarray(f), exact, naive, length=64)


@pytest.mark.parametrize(("name", "dim"), [("attention", 2), ("rope", 2), ("swiglu", 1)])
def test_gradients_in_a_shard_map_of_another_axis(name: str, dim: int) -> None:
    """The user's `shard_map` takes parts of a dim by `b`, and in it `a` divides the first dim by its type."""
    case = CASES[name]
    part = P(*(None,) * dim, "b")
    given = [put(x, P("a", *part[1:])) for x in case.arrays()]
    kernel = partial(case.kernel, **case.keywords)
    outer = jax.shard_map(
        kernel, mesh=MESH.abstract_mesh, axis_names={"b"}, in_specs=(part,) * len(given), out_specs=part
    )
    with jax.set_mesh(MESH):
        found = jax.jit(partial(both, outer, Case(outer, outer, ())))(*given)
    oracle, low = on_one_device(name)
    for f, exact, naive in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(np.asarray(f), exact, naive, length=64)


def collectives(function: Callable[..., Any], *arrays: Any) -> Counter[str]:
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return Counter(re.findall(r" (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", text))


@kinds
@pytest.mark.parametrize(
    ("x", "w", "out", "wanted"),
    [
        (P("a"), P(), P("a", None), {}),
        (P("a"), P(None, "b"), P("a", "b"), {}),
        (P(None, "b"), P("b"), P(None, None), {"all-reduce": 1}),
        (P("a", "b"), P("b"), P("a", None), {"all-reduce": 1}),
        (P(("a", "b")), P(), P(("a", "b"), None), {}),
        (P("a", "b"), P(), P("a", None), {"all-reduce": 1}),  # a part of w is at hand
        (P("a"), P("a"), P("a", None), {"all-gather": 1}),  # one axis divides one name
    ],
)
def test_the_collectives_of_a_product(x: P, w: P, out: P, wanted: dict[str, int], kind: str) -> None:
    mesh = MESHES[kind]
    arrays = put(np.ones((16, 24), np.float32), x, mesh), put(np.ones((24, 8), np.float32), w, mesh)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        assert matmul(*arrays).sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
        assert collectives(matmul, *arrays) == wanted


@kinds
@pytest.mark.parametrize("split_k", [None, 3, 16])
def test_a_split_sum_that_devices_divide_is_added_up_once(split_k: int | None, kind: str) -> None:
    mesh = MESHES[kind]
    x, w = (np.ones(shape, np.float32) for shape in ((16, 4096), (4096, 8)))
    arrays = put(x, P(None, "b"), mesh), put(w, P("b"), mesh)
    split = partial(matmul, split_k=split_k)
    with jax.set_mesh(mesh):
        assert (split(*arrays) == 4096).all()
        assert collectives(split, *arrays) == {"all-reduce": 1}


@kinds
def test_a_batch_of_products_is_divided(kind: str) -> None:
    mesh = MESHES[kind]
    x, w = (put(np.ones(shape, np.float32), P("b"), mesh) for shape in ((4, 16, 24), (4, 24, 8)))
    with jax.set_mesh(mesh):
        assert (matmul(x, w) == 24).all() and collectives(matmul, x, w) == {}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "specs", [(P("a", "b"), P("a")), (P("a"), P(None, "a")), (P(None, "a", "b"), P("b", None, "a")), (P(), P("b", "a"))]
)
@kinds
def test_batches_that_a_mesh_divides_in_different_ways(kind: str, specs: tuple[P, P]) -> None:
    """w lacks the first dim of the batch; gradients add up along it."""
    mesh, random = MESHES[kind], np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 16, 24), (4, 24, 8)))

    def both(function: Any, x: Any, w: Any) -> Any:
        out, pull = jax.vjp(function, x, w)
        return out, pull(jnp.cos(out))

    oracle, low = in_float64(partial(both, jnp.matmul), x, w), both(jnp.matmul, x, w)
    with jax.set_mesh(mesh):
        found = jax.jit(partial(both, matmul))(*(put(a, s, mesh) for a, s in zip((x, w), specs, strict=True)))
    for out, exact, naive in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(out, exact, naive, length=32, factor=3)


def test_what_cannot_be_divided_is_gathered_with_one_warning() -> None:
    @like_first
    def flipped(x, out):
        out[:] = x[:][::-1]

    x = put(np.arange(8, dtype=np.float32), P("a"))
    with jax.set_mesh(MESH):
        with pytest.warns(
            GatherWarning, match=r"gathers operand 0 of flipped, 32 bytes.*P\('a',\).*P\(None,\)"
        ) as caught:
            result = flipped(x)
        np.testing.assert_array_equal(result, np.arange(8.0)[::-1])
        assert jax.typeof(result).sharding.spec == P(None)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", GatherWarning)
            flipped(x)


@pytest.mark.parametrize(
    ("rows", "spec", "said"),
    [
        (16, P(None, "b"), "of normed, 1536 bytes, .*P(None, 'b').*P(None, None)"),
        (10, P("b"), "of normed, 960 bytes, .*P('b', None).*P(None, None).*evenly"),
    ],
    ids=["what must be whole", "what does not divide"],
)
def test_xla_gathers_with_one_warning(rows: int, spec: P, said: str) -> None:
    """Arguments must divide. Values inside of a program need not: XLA pads them, but not for a kernel."""
    kernel = tk.kernel(out_type=lambda x: x)(normed)
    mesh = MESHES["Auto"]
    x = np.random.default_rng(0).standard_normal((rows, 24)).astype(np.float32)
    function = jax.jit(lambda x: kernel(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))))
    with pytest.warns(GatherWarning) as caught:
        found = function(x)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), str(caught[0].message), re.DOTALL)
    np.testing.assert_allclose(found, x / np.abs(x).sum(axis=1, keepdims=True), rtol=1e-5)


def normed(x, out):
    i = tk.parallel(x.shape[0], 2)
    row = x[i, :]
    out[i, :] = row / jnp.abs(row).sum(axis=1, keepdims=True)


def test_arrays_that_the_devices_of_an_explicit_axis_do_not_divide() -> None:
    """JAX itself refuses them, and says which dim."""
    with jax.set_mesh(MESH), pytest.raises(ValueError, match="does not evenly divide the dimension size 10"):
        jax.jit(lambda x, w: matmul(jax.reshard(x, P("b")), w))(np.ones((10, 24)), np.ones((24, 8)))


def test_pmap() -> None:
    """Of a gradient, and the gradient of a pmap."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 4, 6), (6, 5)))

    def loss(product: Any, x: Any, w: Any) -> Any:
        return jnp.sin(product(x, w)).sum()

    inside = jax.pmap(jax.grad(partial(loss, matmul), (0, 1)), in_axes=(0, None))(x, w)
    outside = jax.grad(partial(loss, jax.pmap(matmul, in_axes=(0, None))), (0, 1))(x, w)
    wanted, low = (
        in_float64(jax.grad(partial(loss, jnp.matmul), (0, 1)), x, w),
        jax.grad(partial(loss, jnp.matmul), (0, 1))(x, w),
    )
    for dx, dw in ((inside[0], inside[1].sum(axis=0)), outside):
        assert_close(np.asarray(dx), wanted[0], np.asarray(low[0]), length=32, factor=3)
        assert_close(np.asarray(dw), wanted[1], np.asarray(low[1]), length=32, factor=3)


def test_a_kernel_that_computes_with_the_size_of_an_array_is_not_divided_along_it() -> None:
    """On a part it would divide by another number."""

    @like_first
    def shared_out(x, out):
        i = tk.parallel(x.shape[0], 2)
        out[i] = x[i] / x.shape[0]

    x = put(np.arange(8, dtype=np.float32), P("a"))
    with jax.set_mesh(MESH), pytest.warns(GatherWarning, match="operand 0 of shared_out"):
        np.testing.assert_array_equal(shared_out(x), np.arange(8) / 8)


@kinds
def test_as_many_devices_as_are_proved_divide_a_dim(kind: str) -> None:
    """Tiles of 4 rows, which depend on each other: 2 devices have whole tiles of 16 rows, and 8 have not."""

    @tk.kernel(out_type=lambda x: x)
    def centered(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i, :] = x[i, :] - x[i, :].mean(axis=0)

    mesh, x = MESHES[kind], np.arange(16.0 * 4, dtype=np.float32).reshape(16, 4)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        found = jax.jit(lambda x: centered(x))(put(x, P(("a", "b")), mesh))
    np.testing.assert_array_equal(found, centered(x))
    if kind == "Explicit":
        assert jax.typeof(found).sharding.spec == P("a", None)


@kinds
def test_a_part_of_one_group_may_leave_out_its_number(kind: str) -> None:
    """On each of 4 devices the body is traced for one group, whose heads have their own numbers."""

    @like_first
    def scaled(x, w, out):
        shared = x.shape[0] // w.shape[0]
        g, n = tk.parallel(w.shape[0]), tk.parallel(shared)
        head = n if w.shape[0] == 1 else g * shared + n
        out[head, :] = x[head, :] * w[g]

    mesh = MESHES[kind]
    x, w = np.arange(8.0 * 3, dtype=np.float32).reshape(8, 3), np.arange(4, dtype=np.float32)
    with jax.set_mesh(mesh):
        arrays = put(x, P("b"), mesh), put(w, P("b"), mesh)
        assert collectives(lambda x, w: scaled(x, w), *arrays) == {}
        np.testing.assert_array_equal(scaled(*arrays), x * np.repeat(w, 2)[:, None])


@kinds
def test_a_stated_rule(kind: str) -> None:
    """The author knows that rows come in pairs, which the accesses do not say."""

    @tk.kernel(out_type=lambda x, w: (x, tk.Sum(w)))
    def swapped(x, w, out, total):
        i = tk.parallel(x.shape[0])
        out[i, :] = x[i + 1 - 2 * (i % 2), :] * w[:]
        total.at[:].add(x[i, :])

    @swapped.defsharding
    def _(x, w):
        return "i j, j -> i j, j"

    mesh = MESHES[kind]
    x, w = (
        put(np.arange(64.0, dtype=np.float32).reshape(8, 8), P("b", "a"), mesh),
        put(np.ones(8, np.float32), P(), mesh),
    )
    with jax.set_mesh(mesh):
        function = jax.jit(lambda x, w: swapped(x, w))
        out, total = function(x, w)
        assert collectives(lambda x, w: swapped(x, w), x, w) == {"all-reduce": 1}
        gradient = jax.jit(jax.grad(lambda x: (swapped(x, w)[0] ** 2).sum()))(x)
    expected = np.asarray(x).reshape(4, 2, 8)[:, ::-1].reshape(8, 8)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(total, np.asarray(x).sum(axis=0))
    np.testing.assert_array_equal(gradient, 2 * np.asarray(x))
