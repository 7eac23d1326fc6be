"""Kernels in `jax.shard_map`: results vary as operands do, and gradients are those of a single device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilekern as tk
from tests.autodiff.kernels import CASES
from tests.lang.checks import like_first, numbers
from tilekern.errors import ArgumentError, CarryError
from tilekern.kernels import cross_entropy, layer_norm, matmul, ragged_dot
from tilekern.kernels.cross_entropy import reference as cross_entropy_reference
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.layer_norm import reference as layer_norm_reference
from tilekern.kernels.matmul import reference as matmul_reference
from tilekern.kernels.ragged_dot import reference as ragged_dot_reference
from tilekern.nn import dot_product_attention
from tilekern.testing import assert_close, in_float64

checks = pytest.mark.parametrize("check", [True, False])


@tk.kernel(out_type=lambda x, w: x, linear=("x",))
def scale(x, w, out):
    """out[i] = x[i] * w[0], with nothing of w[1]."""
    i = tk.parallel(x.shape[0], 2)
    out[i] = x[i] * w[0]


@scale.defjvp
def _scale_jvp(primals, tangents):
    (x, w), (_, dw) = primals, tangents
    return scale(x, w), x * dw[0]


@scale.deftranspose
def _scale_transpose(cotangent, x, w):
    return {"x": scale(cotangent, w)}


def outer_type(x: Any, y: Any, s: Any) -> Any:
    return jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), x.dtype)


def body(x, y, s, out):
    """out[i, j] = sin(x[i]) y[j] + s x[i]."""
    i = tk.parallel(x.shape[0], 2)
    j = tk.parallel(y.shape[0], 2)
    out[i, j] = tk.fold(tk.serial(2), lambda n, acc: acc + n * s[()] * x[i][:, None], jnp.sin(x[i])[:, None] * y[j])


outer = tk.kernel(out_type=outer_type)(body)
derived = tk.kernel(out_type=outer_type)(body)


def plain(x: Any, y: Any, s: Any) -> Any:
    return jnp.sin(x)[:, None] * y + s * x[:, None]


@outer.defjvp
def _outer_jvp(primals, tangents):
    x, y, s = primals
    dx, dy, ds = (jnp.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True))
    moved = jnp.sin(x)[:, None] * dy + (jnp.cos(x) * dx)[:, None] * y + ds * x[:, None] + s * dx[:, None]
    return outer(x, y, s), moved


@tk.op(out_type=outer_type)
def outer_op(x, y, s):
    """Op around the kernel, with its own derivative."""
    return outer(x, y, s)


@outer_op.defjvp
def _outer_op_jvp(primals, tangents):
    (x, y, s), (dx, dy, ds) = primals, tangents
    return outer_op(x, y, s), _outer_jvp(primals, (dx, dy, ds))[1]


def mesh_of(**sizes: int) -> Any:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)


def agree(found: Any, wanted: Callable[..., Any], *arrays: Any, length: int) -> None:
    """Compare gradients with those of a single device."""
    oracles, lows = in_float64(wanted, *arrays), jax.jit(wanted)(*arrays)
    for f, oracle, low in zip(found, oracles, lows, strict=True):
        assert_close(f, oracle, low, length=length, factor=3)


X, W = jnp.arange(8.0), jnp.array([2.0, 3.0])
FOUR = mesh_of(data=4)


# --- types ----------------------------------------------------------------------------------------------------------


@checks
def test_results_vary_as_operands_do(check: bool) -> None:
    types: list[Any] = []

    def local(x: Any, w: Any) -> Any:
        types.extend(jax.typeof(y).mat.varying for y in (scale(x, w), scale(w, w), jax.vmap(scale)(x[None], w[None])))
        return scale(x, w)

    mapped = jax.shard_map(local, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check)
    np.testing.assert_array_equal(mapped(X, W), 2 * X)
    over = frozenset({"data"} if check else ())
    assert types[:3] == [over, frozenset(), over]


def test_a_varying_result_is_not_replicated() -> None:
    with pytest.raises(ValueError, match="replication which can't be statically inferred"):
        jax.shard_map(scale, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P())(X, W)


def test_an_unreduced_operand_is_refused() -> None:
    def local(x: Any) -> Any:
        return scale(lax.pcast(x, "data", to="unreduced"), W)

    with pytest.raises(ArgumentError, match="an array that a mesh divides by its type") as raised:
        jax.jit(jax.shard_map(local, mesh=FOUR, in_specs=P("data"), out_specs=P()))(X)
    assert raised.value.got == "array 0 = f32[2]{U:data}"
    assert "jax.lax.psum" in raised.value.fix


@checks
@pytest.mark.parametrize("spec", [P(), P("data")])
def test_arrays_that_a_body_closes_over(spec: Any, check: bool) -> None:
    table = jnp.arange(5.0)

    def local(x: Any, w: Any) -> Any:
        @like_first
        def captures(x, out):
            i = tk.parallel(x.shape[0], 2)
            out[i] = tk.fold(tk.serial(3), lambda n, acc: acc + n * w[1], x[i] * w[0] + table[3])

        return captures(x)

    def wanted(x: Any, w: Any) -> Any:
        return x * w[0] + 3 * w[1] + 3

    w = jnp.arange(2.0) if spec == P() else jnp.arange(8.0)
    mapped = jax.shard_map(local, mesh=FOUR, in_specs=(P("data"), spec), out_specs=P("data"), check_vma=check)
    parts = [wanted(X[2 * n : 2 * n + 2], w if spec == P() else w[2 * n : 2 * n + 2]) for n in range(4)]
    np.testing.assert_array_equal(jax.jit(mapped)(X, w), np.concatenate(parts))


def test_a_loop_that_carries_a_captured_value() -> None:
    """JAX's loops ask that carries vary alike; the value as an argument does not vary inside of the kernel."""

    def local(w: Any) -> Any:
        @like_first
        def captures(x, out):
            out[...] = lax.fori_loop(0, 2, lambda n, acc: acc * 2 + jnp.ones(2), w)

        return captures(w)

    with pytest.raises(CarryError, match="pass what the body closes over as an argument"):
        jax.shard_map(local, mesh=FOUR, in_specs=P("data"), out_specs=P("data"))(X)


# --- gradients ------------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_replicated_operand_is_summed_over_devices() -> None:
    def local(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: (scale(x, w) + x * w[1]).sum())(w)

    mapped = jax.shard_map(local, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P())
    np.testing.assert_array_equal(mapped(X, W), [28, 28])
    np.testing.assert_array_equal(jax.jit(mapped)(X, W), [28, 28])


def test_each_device_adds_its_part_to_the_gradient() -> None:
    @like_first
    def times(x, w, out):
        out[...] = x[...] * w[...]

    @times.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return times(x, w), (0 if dx is None else dx * w) + (0 if dw is None else x * dw)

    def local(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: times(x, w).sum())(w)

    mapped = jax.shard_map(local, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P())
    np.testing.assert_array_equal(mapped(X, W), [12, 16])  # of the first device: [0, 1]


@checks
def test_gradients_through_a_sharded_call(check: bool) -> None:
    mapped = jax.shard_map(scale, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check)
    for function in (mapped, jax.jit(mapped)):
        found = jax.grad(lambda x, w, f=function: f(x, w).sum(), (0, 1))(X, W)
        np.testing.assert_array_equal(found[0], np.full(8, 2))
        np.testing.assert_array_equal(found[1], [28, 0])


def test_a_rule_may_return_what_does_not_vary() -> None:
    @like_first
    def constant(x, out):
        out[...] = x[...] * 0 + 3

    @constant.defjvp
    def _(primals, tangents):
        return jnp.full(primals[0].shape, 3.0), jnp.zeros(primals[0].shape)

    def local(x: Any) -> Any:
        return jax.value_and_grad(lambda x: (x * constant(x)).sum())(x)[1]

    mapped = jax.shard_map(local, mesh=FOUR, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(mapped(X), np.full(8, 3))


def test_a_transpose_may_return_what_does_not_vary() -> None:
    """JAX refuses the cotangent of an operand that varies if its type does not."""

    @tk.kernel(out_type=lambda x, w: x, linear=("x",))
    def nothing(x, w, out):
        out[...] = x[...] * w[...] * 0

    @nothing.deftranspose
    def _(cotangent, x, w):
        return {"x": jnp.zeros(x.shape)}

    def local(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: (nothing(w, x) + x * w).sum())(w)

    mapped = jax.shard_map(local, mesh=FOUR, in_specs=(P("data"), P()), out_specs=P())
    np.testing.assert_array_equal(mapped(X, W), [12, 16])


@checks
@pytest.mark.parametrize("order", [1, 2])
def test_attention_with_replicated_keys(order: int, check: bool) -> None:
    q, k, v = (numbers(2, 8, 2, 4) / 100 + n for n in range(3))
    specs = (P(None, "data"), P(), P())

    def loss(call: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda *a: (call(*a) ** 2).sum()  # noqa: E731
        if order == 1:
            return first
        return lambda *a: sum((g**2).sum() for g in jax.grad(first, (0, 1, 2))(*a))

    mapped = jax.shard_map(dot_product_attention, mesh=FOUR, in_specs=specs, out_specs=P(None, "data"), check_vma=check)
    wanted = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))
    agree(jax.jit(jax.grad(loss(mapped), (0, 1, 2)))(q, k, v), wanted, q, k, v, length=q.size)


@checks
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("function", "reference"),
    [(layer_norm, layer_norm_reference), (matmul, matmul_reference)],
    ids=["layer_norm", "matmul"],
)
def test_rows_with_replicated_weights(function: Any, reference: Any, order: int, check: bool) -> None:
    """Each device has its rows; the gradients of weights are sums over all devices."""
    x = numbers(8, 6) / 10
    others = (numbers(6) / 10 + 1, numbers(6) / 10) if function is layer_norm else (numbers(6, 6) / 30,)
    specs = (P("data"), *[P()] * len(others))

    def loss(call: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda *a: (call(*a) ** 2).sum()  # noqa: E731
        if order == 1:
            return first
        return lambda *a: sum((g**2).sum() for g in jax.grad(first, tuple(range(len(a))))(*a))

    mapped = jax.shard_map(function, mesh=FOUR, in_specs=specs, out_specs=P("data"), check_vma=check)
    every = tuple(range(len(specs)))
    found = jax.jit(jax.grad(loss(mapped), every))(x, *others)
    agree(found, jax.grad(loss(reference), every), x, *others, length=x.size)


@checks
@pytest.mark.parametrize("order", [1, 2])
def test_groups_of_rows_with_replicated_matrices(order: int, check: bool) -> None:
    """Each device has rows and sizes of its own; the gradients of the matrices are sums over all devices."""
    lhs, rhs = jnp.sin(numbers(16, 3)), jnp.cos(numbers(2, 3, 4))
    sizes = jnp.array([[1, 3], [0, 2], [4, 0], [2, 2]], jnp.int32)

    def loss(call: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda *a: (call(*a) ** 2).sum()  # noqa: E731
        if order == 1:
            return first
        return lambda *a: sum((g**2).sum() for g in jax.grad(first, (0, 1))(*a))

    def local(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return ragged_dot(lhs, rhs, sizes[0])

    def naive(lhs: Any, rhs: Any) -> Any:
        each = jax.vmap(ragged_dot_reference, (0, None, 0))(lhs.reshape(4, 4, 3), rhs, sizes)
        return each.reshape(16, 4)

    specs = P("data"), P(), P("data")
    mapped = jax.shard_map(local, mesh=FOUR, in_specs=specs, out_specs=P("data"), check_vma=check)
    found = jax.jit(jax.grad(loss(lambda *a: mapped(*a, sizes)), (0, 1)))(lhs, rhs)
    agree(found, jax.grad(loss(naive), (0, 1)), lhs, rhs, length=48)


@checks
@pytest.mark.parametrize("order", [1, 2])
def test_losses_of_tokens_on_each_device(order: int, check: bool) -> None:
    """The weight is replicated: its gradient is a sum over all devices."""
    hidden, weight, labels = numbers(8, 3) / 10, jnp.sin(numbers(3, 7)), jnp.arange(8) % 7

    def loss(call: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda *a: (call(*a, labels) ** 2).sum()  # noqa: E731
        if order == 1:
            return first
        return lambda *a: sum((g**2).sum() for g in jax.grad(first, (0, 1))(*a))

    specs = P("data"), P(), P("data")
    mapped = jax.shard_map(cross_entropy, mesh=FOUR, in_specs=specs, out_specs=P("data"), check_vma=check)
    found = jax.jit(jax.grad(loss(mapped), (0, 1)))(hidden, weight)
    agree(found, jax.grad(loss(cross_entropy_reference), (0, 1)), hidden, weight, length=24)


@checks
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["norm", "product", "two passes", "nested"])
def test_derived_gradients_with_replicated_operands(name: str, order: int, check: bool) -> None:
    """Rows of the first operand are on all devices; what adds up over them, and saved carries, vary as they do."""
    (case,) = (case for case in CASES if case.name == name)
    _, *others = case.arrays(dtype=jnp.float32)
    x = jnp.sin(numbers(8, case.shapes[0][1]))

    def loss(call: Callable[..., Any]) -> Callable[..., Any]:
        first = lambda *a: (call(*a) ** 2).sum()  # noqa: E731
        if order == 1:
            return first
        return lambda *a: sum((g**2).sum() for g in jax.grad(first, tuple(range(len(a))))(*a))

    specs = (P("data"), *[P()] * len(others))
    mapped = jax.shard_map(case.kernel, mesh=FOUR, in_specs=specs, out_specs=P("data"), check_vma=check)
    every = tuple(range(len(specs)))
    found = jax.jit(jax.grad(loss(mapped), every))(x, *others)
    agree(found, jax.grad(loss(case.reference), every), x, *others, length=x.size)


@checks
@pytest.mark.parametrize("divided", [(), (1,), (0, 1)], ids=["none", "second", "both"])
@pytest.mark.parametrize(
    ("function", "definition"),
    [(ragged_dot, ragged_dot_reference), (cross_entropy, cross_entropy_reference)],
    ids=["ragged_dot", "cross_entropy"],
)
def test_operands_of_each_device(function: Any, definition: Any, divided: tuple[int, ...], check: bool) -> None:
    """The second operand is divided, or both, or the integers alone. Replicated ones get sums over devices."""
    shapes = {ragged_dot: ((6, 3), (2, 3, 4)), cross_entropy: ((6, 3), (3, 7))}[function]
    pair = [jnp.sin(numbers(*((4,) * (n in divided) + s)) + n) for n, s in enumerate(shapes)]
    integers = (jnp.arange(8) % 5 if function is ragged_dot else jnp.arange(24) % 7).reshape(4, -1)

    def local(a: Any, b: Any, c: Any) -> Any:
        a, b = (x[0] if n in divided else x for n, x in enumerate((a, b)))
        return function(a, b, c[0])[None]

    specs = *(P("data") if n in divided else P() for n in range(2)), P("data")
    mapped = jax.shard_map(local, mesh=FOUR, in_specs=specs, out_specs=P("data"), check_vma=check)
    naive = jax.vmap(definition, (*(0 if n in divided else None for n in range(2)), 0))
    found, wanted = (jax.grad(lambda a, b, f=f: (f(a, b, integers) ** 2).sum(), (0, 1)) for f in (mapped, naive))
    agree(jax.jit(found)(*pair), wanted, *pair, length=48)


def test_attention_that_knows_its_place_on_the_mesh() -> None:
    """Queries are sharded, as in ring attention; the offset is the device's; sinks and slopes are replicated."""
    mesh = mesh_of(batch=2, time=2)
    q, k, v = (np.sin(n + numbers(2, 8, 2, 4)) for n in range(3))
    sinks, slopes = numbers(2) / 7, numbers(2) / 9

    def attend(offset: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
        tilt = jax.tree_util.Partial(lambda slopes, s, b, n, i, j: s + slopes[n] * j, slopes)
        return flash_attention(q, k, v, causal=True, q_offset=offset(), sinks=sinks, score_mod=tilt)

    queries, keys = P("batch", "time"), P("batch")
    local = partial(attend, lambda: 4 * lax.axis_index("time"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(queries, keys, keys, P(), P()), out_specs=queries)

    def naive(q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2 + slopes[:, None, None] * jnp.arange(8)
        scores = jnp.where(jnp.tri(8, dtype=bool), scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1)).astype(scores.dtype)
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=3), axis=3)[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def gradient(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *a: (call(*a) ** 2).sum(), (0, 1, 2, 3, 4))

    agree(jax.jit(gradient(mapped))(q, k, v, sinks, slopes), gradient(naive), q, k, v, sinks, slopes, length=q.size)


@checks
@pytest.mark.parametrize("how", ["grad of vmap", "vmap of grad"])
def test_vmap_over_an_axis_of_the_mesh(how: str, check: bool) -> None:
    mapped = jax.shard_map(
        outer, mesh=mesh_of(a=2, b=2), in_specs=(P("a"), P(), P()), out_specs=P("a"), check_vma=check
    )

    def gradient(call: Callable[..., Any], **over: Any) -> Callable[..., Any]:
        def loss(call: Callable[..., Any]) -> Callable[..., Any]:
            return jax.grad(lambda *a: (call(*a) ** 2).sum(), (0, 1, 2))

        if how == "grad of vmap":
            return loss(jax.vmap(call, (0, None, None), **over))
        return jax.vmap(loss(call), (0, None, None), **over)

    arrays = numbers(2, 4) / 7, numbers(2) / 3, np.float32(2)
    found = jax.jit(gradient(mapped, spmd_axis_name="b"))(*arrays)
    agree(found, gradient(plain), *arrays, length=16)


# --- random programs ------------------------------------------------------------------------------------------------


def _scanned(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, s: lax.scan(lambda c, row: (c, call(row[None], y, s)[0]), 0, x)[1]


def _with_rule(call: Callable[..., Any]) -> Callable[..., Any]:
    ruled = jax.custom_vjp(call)
    ruled.defvjp(lambda *a: (call(*a), a), lambda a, g: jax.vjp(call, *a)[1](g))
    return ruled


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "call": lambda call: call,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda call: lambda x, y, s: jax.vmap(call, (0, None, None))(x[:, None], y, s)[:, 0],
    "scan": _scanned,
    "cond": lambda call: lambda x, y, s: lax.cond(s > 0, call, lambda *a: 0 * call(*a), x, y, s),
    "custom_vjp": _with_rule,
    "map": lambda call: lambda x, y, s: lax.map(lambda row: call(row[None], y, s)[0], x),
}


@settings(max_examples=settings().max_examples // 6)
@given(
    axes=st.sampled_from([(("a", 4),), (("a", 2), ("b", 2)), (("a", 2), ("b", 4)), (("a", 2), ("b", 2), ("c", 2))]),
    owners=st.lists(st.sampled_from(["x", "y", "none"]), min_size=3, max_size=3),
    call=st.sampled_from([outer, outer_op, derived]),
    target=st.sampled_from(["cpu", "cpu:xla"]),
    wrapper=st.sampled_from(sorted(WRAPPERS)),
    check=st.booleans(),
    inside=st.booleans(),
    rest=st.booleans(),
)
def test_gradients_are_those_of_a_single_device(
    axes: Any, owners: Any, call: Any, target: str, wrapper: str, check: bool, inside: bool, rest: bool
) -> None:
    """Meshes, manual or partly manual, the sharding of operands, and transformations are random."""
    # Another axis, XLA's, makes the mesh partly manual.
    rest = rest and np.prod([size for _, size in axes]) < 8
    mesh, manual = mesh_of(**dict(axes), **({"rest": 2} if rest else {})), {name for name, _ in axes}
    shard_map = partial(jax.shard_map, mesh=mesh, axis_names=manual)
    rows = tuple(name for (name, _), owner in zip(axes, owners, strict=False) if owner == "x")
    columns = tuple(name for (name, _), owner in zip(axes, owners, strict=False) if owner == "y")
    specs = (P(rows), P(columns), P())
    x, y, s = numbers(16) / 7, numbers(8) / 5, np.float32(1.5)
    c = numbers(16, 8) / 100
    local = WRAPPERS[wrapper](lambda *a: call(*a, target=target))
    if check and inside:
        in_specs = (*specs, P(rows, columns))

        def gradient(x: Any, y: Any, s: Any, c: Any) -> Any:
            return jax.grad(lambda *a: (local(*a) * c).sum(), (0, 1, 2))(x, y, s)

        found = jax.jit(shard_map(gradient, in_specs=in_specs, out_specs=specs))(x, y, s, c)
    else:
        mapped = shard_map(local, in_specs=specs, out_specs=P(rows, columns), check_vma=check)
        found = jax.jit(jax.grad(lambda *a: (mapped(*a) * c).sum(), (0, 1, 2)))(x, y, s)
    agree(found, jax.grad(lambda x, y, s, c: (plain(x, y, s) * c).sum(), (0, 1, 2)), x, y, s, c, length=c.size)
