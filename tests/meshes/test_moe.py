"""Mixtures of experts against a plain one, of all experts for all tokens, on one device."""

from __future__ import annotations

import re
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
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.lang.checks import marked_line
from tilekern.distributed import apply_experts, moe, route
from tilekern.errors import ArgumentError
from tilekern.testing import assert_close, in_float64

checks = pytest.mark.parametrize("check", [True, False])
TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 16, 6, 5, 8, 3


def operands(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Tokens, logits and matrices. Expert 2 is nobody's, expert 5 everybody's."""
    random = np.random.default_rng(0)
    shapes = [(TOKENS, HIDDEN), (TOKENS, EXPERTS), *[(EXPERTS, HIDDEN, INNER)] * 2, (EXPERTS, INNER, HIDDEN)]
    x, logits, *matrices = (random.standard_normal(shape) for shape in shapes)
    logits[:, 2], logits[:, 5] = -9, 4
    return [jnp.asarray(a, dtype) for a in (x, logits, *matrices)]


def dense(x: Any, weights: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    """All experts for all tokens, of which `weights` [T, E] takes some."""

    def product(spec: str, *arrays: Any) -> Any:
        return jnp.einsum(spec, *arrays, precision="highest")

    hidden = jax.nn.silu(product("th,ehf->tef", x, w_gate)) * product("th,ehf->tef", x, w_up)
    return product("te,teh->th", weights.astype(x.dtype), product("tef,efh->teh", hidden, w_down))


def naive(x: Any, logits: Any, *matrices: Any, chosen: int = CHOSEN) -> Any:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    _, experts = lax.top_k(wide, chosen)
    weights = jax.nn.softmax(wide, where=jax.nn.one_hot(experts, logits.shape[1]).sum(1) > 0)
    return dense(x, weights, *matrices)


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((devices,), ("expert",), (kind,), devices=jax.devices()[:devices])


def mapped(devices: int, check: bool = True, **options: Any) -> Callable[..., Any]:
    options = {"experts_per_token": CHOSEN, "target": "cpu:xla", **options}
    if devices == 0:
        return jax.jit(lambda *arrays: moe(*arrays, **options))

    def local(*arrays: Any) -> Any:
        return moe(*arrays, axis_name="expert", **options)

    specs = (P("expert"),) * 5
    return jax.jit(jax.shard_map(local, mesh=mesh_of(devices), in_specs=specs, out_specs=P("expert"), check_vma=check))


def agree(found: Any, wanted: Callable[..., Any], *arrays: Any, factor: float = 2, length: int = 64) -> None:
    oracles, lows = in_float64(wanted, *arrays), jax.jit(wanted)(*arrays)
    for f, oracle, low in zip(*map(jax.tree.leaves, (found, oracles, lows)), strict=True):
        assert_close(f, oracle, low, length=length, factor=factor)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("devices", [0, 1, 2, 4, 8])
def test_a_mixture_of_experts(devices: int) -> None:
    agree(mapped(devices)(*operands()), naive, *operands())


def test_64_bit_types() -> None:
    with jax.enable_x64(True):
        arrays = operands(jnp.float64)
        agree(mapped(4)(*arrays), naive, *arrays)


def test_the_native_backend() -> None:
    agree(mapped(4, target=None)(*operands()), naive, *operands())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("devices", "check", "dtype"), [(0, True, jnp.bfloat16), (4, True, jnp.bfloat16), (4, False, jnp.float32)]
)
def test_gradients(devices: int, check: bool, dtype: Any) -> None:
    scale = jnp.cos(jnp.arange(TOKENS * HIDDEN, dtype=jnp.float32)).reshape(TOKENS, HIDDEN)

    def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *a: (call(*a) * scale.astype(a[0].dtype)).sum(), tuple(range(5)))

    arrays = operands(dtype)
    agree(jax.jit(gradients(mapped(devices, check)))(*arrays), gradients(naive), *arrays, factor=3)


@pytest.mark.slow
def test_second_order_in_both_modes() -> None:
    def seconds(call: Callable[..., Any]) -> Callable[..., Any]:
        slope = jax.grad(lambda *a: jnp.sin(call(*a)).sum(), tuple(range(5)))

        def both_modes(*a: Any) -> Any:
            return jax.jvp(slope, a, a)[1], jax.grad(lambda x: sum((g * g).sum() for g in slope(x, *a[1:])))(a[0])

        return both_modes

    found = jax.jit(seconds(mapped(2)))(*operands())
    agree(found, seconds(naive), *operands(), factor=3, length=1024)


@settings(max_examples=4)
@given(
    devices=st.sampled_from([2, 4]),
    tokens=st.integers(1, 5),
    experts=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    data=st.data(),
)
def test_random_sizes_under_vmap(
    devices: int, tokens: int, experts: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    """Two batches of tokens for the same experts."""
    chosen = data.draw(st.integers(1, devices * experts))
    random, (hidden, inner) = np.random.default_rng(tokens), sizes
    shapes = [(2, devices * tokens, hidden), (2, devices * tokens, devices * experts)]
    shapes += [(devices * experts, hidden, inner)] * 2 + [(devices * experts, inner, hidden)]
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    found = jax.jit(jax.vmap(mapped(devices, experts_per_token=chosen), (0, 0, None, None, None)))(*arrays)
    agree(found, jax.vmap(partial(naive, chosen=chosen), (0, 0, None, None, None)), *arrays)


def clipped(gate: Any, up: Any) -> Any:
    """The activation of gpt-oss: https://huggingface.co/openai/gpt-oss-120b."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("devices", [0, 4])
def test_biases_and_activations_of_gpt_oss(devices: int) -> None:
    """Values and gradients of everything."""
    x, logits, *matrices = operands()
    random = np.random.default_rng(1)
    biases = [jnp.float32(random.standard_normal((EXPERTS, n))) for n in (INNER, INNER, HIDDEN)]

    def call(x: Any, logits: Any, *rest: Any) -> Any:
        axis = {"axis_name": "expert"} if devices else {}
        return moe(
            x, logits, *rest[:3], biases=rest[3:], activation=clipped, experts_per_token=2, target="cpu:xla", **axis
        )

    def wanted(x: Any, logits: Any, *rest: Any) -> Any:
        w_gate, w_up, w_down, b_gate, b_up, b_down = rest
        gates = jax.nn.softmax(logits, where=jax.nn.one_hot(lax.top_k(logits, 2)[1], EXPERTS).sum(1) > 0)

        def product(spec: str, *arrays: Any) -> Any:
            return jnp.einsum(spec, *arrays, precision="highest")

        hidden = clipped(product("th,ehf->tef", x, w_gate) + b_gate, product("th,ehf->tef", x, w_up) + b_up)
        return product("te,teh->th", gates, product("tef,efh->teh", hidden, w_down) + b_down)

    if devices:
        specs = (P("expert"),) * 8
        call = jax.shard_map(call, mesh=mesh_of(devices), in_specs=specs, out_specs=P("expert"))
    arrays = (x, logits, *matrices, *biases)
    agree(jax.jit(call)(*arrays), wanted, *arrays)

    def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *a: jnp.sin(call(*a)).sum(), tuple(range(8)))

    agree(jax.jit(gradients(call))(*arrays), gradients(wanted), *arrays, factor=3, length=256)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_named_activations(activation: str) -> None:
    x, logits, *matrices = operands()
    function = {"gelu": partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}[activation]
    found = mapped(0, activation=activation)(x, logits, *matrices)
    np.testing.assert_array_equal(found, mapped(0, activation=_times_up(function))(x, logits, *matrices))


def _times_up(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gate, up: function(gate) * up


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"activation": "swish"}, "activation = 'swish'"),
        ({"biases": 3}, "biases = 3"),
        ({"biases": [jnp.zeros((EXPERTS, INNER))] * 3}, f"b_down[{EXPERTS}, {HIDDEN}]"),
    ],
)
def test_wrong_biases_and_activations(options: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)):
        moe(*operands(), experts_per_token=2, **options)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("chosen", "devices"), [([7, 6], 4), ([EXPERTS, 3], 4), ([-1, 0], 0)], ids=str)
def test_uneven_choices(chosen: list[int], devices: int) -> None:
    """All tokens choose the same experts. What is no expert adds nothing."""
    x, _, *matrices = operands()
    experts = jnp.tile(jnp.array(chosen, jnp.int32), (TOKENS, 1))
    gates = jnp.sin(jnp.arange(TOKENS * 2.0)).reshape(TOKENS, 2)

    def wanted(x: Any, gates: Any, *matrices: Any) -> Any:
        inside = (experts >= 0) & (experts < EXPERTS)
        weights = jnp.where(inside[..., None], jax.nn.one_hot(experts, EXPERTS, dtype=x.dtype) * gates[..., None], 0)
        return dense(x, weights.sum(1), *matrices)

    def call(x: Any, gates: Any, *matrices: Any) -> Any:
        if devices == 0:
            return apply_experts(x, experts, gates, *matrices, target="cpu:xla")

        def local(x: Any, experts: Any, gates: Any, *matrices: Any) -> Any:
            return apply_experts(x, experts, gates, *matrices, axis_name="expert", target="cpu:xla")

        each = P("expert")
        return jax.shard_map(local, mesh=mesh_of(devices), in_specs=(each,) * 6, out_specs=each)(
            x, experts, gates, *matrices
        )

    def both(call: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*a: Any) -> Any:
            out = call(*a)
            return (out**2).sum(), out

        return lambda *a: jax.grad(loss, tuple(range(5)), has_aux=True)(*a)

    arrays = (x, gates, *matrices)
    agree(jax.jit(both(call))(*arrays), both(wanted), *arrays, factor=3)


def test_tokens_that_others_choose_do_not_touch() -> None:
    """NaN in one token and in the expert of nobody."""
    x, logits, w_gate, *rest = operands()
    found = mapped(4)(x.at[3].set(jnp.nan), logits, w_gate.at[2].set(jnp.nan), *rest)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(mapped(4)(*operands()), 3, 0))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_gates(gating: Any, normalize: bool) -> None:
    logits = operands()[1]

    def wanted(logits: Any) -> Any:
        every = jax.nn.softmax(logits) if gating == "softmax" else jax.nn.sigmoid(logits)
        gates = lax.top_k(every, CHOSEN)[0]
        return gates / gates.sum(1, keepdims=True) if normalize else gates

    experts, gates = route(logits, experts_per_token=CHOSEN, gating=gating, normalize=normalize)
    np.testing.assert_array_equal(experts, lax.top_k(logits, CHOSEN)[1])
    agree(gates, wanted, logits)


# --- exchanges --------------------------------------------------------------------------------------------------------


def emulated(operand: Any, output: Any, starts: Any, sizes: Any, places: Any, expected: Any, *, axis_name: str) -> Any:
    """`jax.lax.ragged_all_to_all` by its documentation, from gathered arrays; NaN if what comes is not as expected."""
    operands, starts, sizes, places = (lax.all_gather(a, axis_name) for a in (operand, starts, sizes, places))
    each = starts.shape[1] // starts.shape[0]
    mine = lax.axis_index(axis_name) * each + jnp.arange(each)
    row = jnp.arange(output.shape[0])
    for source in range(starts.shape[0]):
        for slot in range(each):
            start, size, place = (a[source, mine[slot]] for a in (starts, sizes, places))
            found = operands[source].at[start + row - place].get(mode="fill", fill_value=0)
            found = jnp.where(expected[source * each + slot] == size, found, jnp.nan)
            output = jnp.where(((row >= place) & (row < place + size))[:, None], found, output)
    return output


@pytest.mark.parametrize("devices", [2, 8])
def test_the_ragged_exchange(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has none for CPUs."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    np.testing.assert_array_equal(mapped(devices, exchange="ragged")(*operands()), mapped(devices)(*operands()))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("gradient", [False, True])
def test_the_platform_decides_how_rows_are_exchanged(platform: str, gradient: bool) -> None:
    call = mapped(4)
    function = jax.jit(jax.grad(lambda *a: call(*a).sum(), (0, 1, 2))) if gradient else call
    text = function.trace(*operands()).lower(lowering_platforms=(platform,)).as_text()
    assert len(re.findall(r"custom_call @ragged_all_to_all", text)) == (
        0 if platform == "cpu" else 4 if gradient else 2
    )
    assert ("stablehlo.all_to_all" in text) == (platform == "cpu" or gradient)


def test_the_ragged_exchange_compiles_for_four_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no device is asked, no lock is taken
        monkeypatch.setenv(name, "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh, each = Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,)), P("expert")
    shapes = (256, 128), (256, 8), (8, 128, 256), (8, 128, 256), (8, 256, 128)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, each)) for shape in shapes]
    local = partial(moe, experts_per_token=2, axis_name="expert")
    text = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=each)).lower(*types).compile().as_text()
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == 2
    assert not re.search(r" all-to-all(-start)?\(", text)


@pytest.mark.parametrize("gradient", [False, True])
def test_rows_are_exchanged_twice(gradient: bool) -> None:
    """There and back; so are their cotangents. Only counts are gathered."""
    call = mapped(4)
    function = jax.jit(jax.grad(lambda *a: call(*a).sum(), (0, 1, 2))) if gradient else call
    text = function.lower(*operands()).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == (4 if gradient else 2)
    assert re.findall(r"= ([^ {]+)\S* all-gather\(", text) == ["s32[4,4,2]"]
    assert not re.findall(r" (all-reduce|reduce-scatter|collective-permute)\(", text)


def test_a_mesh_of_data_and_experts() -> None:
    """Experts are divided by one axis, tokens by both: gradients of experts are sums over the other."""
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(*arrays: Any) -> Any:
        return moe(*arrays, experts_per_token=CHOSEN, axis_name="expert", target="cpu:xla")

    tokens, matrices = P(("data", "expert")), P("expert")
    specs = (tokens, tokens, matrices, matrices, matrices)
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens)

    def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *a: (call(*a) ** 2).sum(), tuple(range(5)))

    agree(jax.jit(gradients(call))(*operands()), gradients(naive), *operands(), factor=3)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [0, 9, 2.0])
def test_a_token_has_some_of_the_experts(chosen: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        moe(*operands(), experts_per_token=chosen)
    assert raised.value.expected == "experts_per_token from 1 to 8, dim 1 of logits"
    assert raised.value.got == f"experts_per_token={chosen!r}"


def test_an_unknown_gating_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown gating") as raised:
        route(operands()[1], experts_per_token=2, gating="tanh")  # type: ignore[arg-type]
    assert raised.value.got == "gating='tanh'"


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown exchange") as raised:
        moe(*operands(), experts_per_token=2, exchange="sparse")  # type: ignore[arg-type]
    assert raised.value.expected == "None or one of 'ragged', 'dense'"


def test_an_unknown_axis_is_refused() -> None:
    def local(*arrays: Any) -> Any:
        return moe(*arrays, experts_per_token=2, axis_name="experts")  # <-

    with pytest.raises(ArgumentError, match="moe needs a mesh axis") as raised:
        jax.shard_map(local, mesh=mesh_of(2), in_specs=(P("expert"),) * 5, out_specs=P("expert"))(*operands())
    assert raised.value.got == "axis_name='experts'"
    assert raised.value.loc.line == marked_line(local.__code__)


def test_logits_of_other_experts_are_refused() -> None:
    x, logits, *matrices = operands()
    with pytest.raises(ArgumentError, match="a logit for each token and expert") as raised:
        moe(x, logits[:, :7], *matrices, experts_per_token=2)
    assert raised.value.expected == "logits[16, 8]: 8 experts, dim 0 of w_gate, in all"
    assert raised.value.got == "logits = float32[16, 7]"


@pytest.mark.parametrize(
    ("experts", "fix"),
    [
        (6, "pad them to 8 experts, with logits of -inf"),
        (4, "let in_specs divide dim 0 of w_gate, w_up and w_down by 'expert'"),
    ],
)
def test_experts_that_an_axis_does_not_divide_are_refused(experts: int, fix: str) -> None:
    """The matrices are not divided, because the axis cannot."""
    x, logits, *matrices = operands()

    def local(*arrays: Any) -> Any:
        return moe(*arrays, experts_per_token=2, axis_name="expert")

    specs = (P("expert"), P("expert"), P(), P(), P())
    with pytest.raises(ArgumentError) as raised:
        jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=P("expert"))(
            x, logits[:, :experts], *(w[:experts] for w in matrices)
        )
    wanted = f"logits[4, {4 * experts}]: {experts} experts, dim 0 of w_gate, times 4 devices of mesh axis 'expert'"
    assert raised.value.expected == wanted
    assert raised.value.fix == fix


def test_matrices_that_do_not_fit_are_refused() -> None:
    x, logits, w_gate, w_up, w_down = operands()
    with pytest.raises(ArgumentError, match="the arrays of moe do not fit") as raised:
        moe(x, logits, w_gate, w_up, w_down.swapaxes(1, 2), experts_per_token=2)
    assert "w_down = float32[8, 6, 5]" in raised.value.got
    assert "w_down[E, F, H]" in raised.value.expected


def test_choices_of_other_tokens_are_refused() -> None:
    x, logits, *matrices = operands()
    experts, gates = route(logits, experts_per_token=2)
    with pytest.raises(ArgumentError, match="the arrays of apply_experts do not fit") as raised:
        apply_experts(x, experts[:3], gates, *matrices)
    assert "experts = int32[3, 2]" in raised.value.got
