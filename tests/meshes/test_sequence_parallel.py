"""Attention over sequences that devices hold in parts: as on one device, forward and in gradients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.lang.checks import refused
from tilekern.distributed import attention_bytes, from_zigzag, ring_attention, to_zigzag, ulysses_attention
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close, in_float64

MESH = jax.make_mesh((2, 4), ("batch", "time"), (AxisType.Auto,) * 2)
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 32, 4, 2, 8
# Not int32: ids are compared between devices, not their places among those of one.
SEGMENTS = np.repeat(np.array([[7, 7, 1, 2], [0, 1, 1, 1]], np.uint32), 8, axis=1)
FEATURES: dict[str, Mapping[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (9, None)},
    "softcap and scale": {"softcap": 2.0, "scale": 0.7},
    "lengths": {"kv_lengths": np.array([32, 11], np.int32)},
    "segments": {"segment_ids": (SEGMENTS, SEGMENTS), "causal": True},
    "sinks": {"sinks": np.array([0.5, -1, 2, 0], np.float32), "causal": True},
}


def operands(dtype: Any = np.float32, kv_heads: int = KV_HEADS) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, n, WIDTH) for n in (HEADS, kv_heads, kv_heads)]
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def divided(function: Callable[..., Any], features: Mapping[str, Any], check: bool = True) -> Callable[..., Any]:
    """A function of whole arrays whose batch and time a mesh divides."""
    spec, rows = P("batch", "time"), P("batch")
    given = {n: x for n, x in features.items() if n in ("segment_ids", "kv_lengths", "sinks")}
    specs = {"segment_ids": (spec, spec), "kv_lengths": rows, "sinks": P()}
    statics = {n: x for n, x in features.items() if n not in given}

    def local(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return function(q, k, v, axis_name="time", **statics, **arrays)

    in_specs = (spec, spec, spec, {n: specs[n] for n in given})
    mapped = jax.shard_map(local, mesh=MESH, in_specs=in_specs, out_specs=spec, check_vma=check)
    return lambda q, k, v: mapped(q, k, v, given)


def in_zigzag(function: Callable[..., Any], features: Mapping[str, Any]) -> Callable[..., Any]:
    """The function in the layout "zigzag", of arrays in the order of the sequence."""
    turned = dict(features)
    if "segment_ids" in turned:
        turned["segment_ids"] = tuple(to_zigzag(jnp.asarray(x), 4, 1) for x in turned["segment_ids"])
    run = divided(partial(function, layout="zigzag"), turned)
    return lambda *arrays: from_zigzag(run(*(to_zigzag(x, 4, 1) for x in arrays)), 4, 1)


def both(function: Callable[..., Any], *arrays: Any) -> Any:
    """The result, and the cotangents of all arrays."""
    out, pull = jax.vjp(function, *arrays)
    return out, pull(jnp.cos(out))


def agree(
    function: Callable[..., Any], features: Mapping[str, Any], *arrays: Any, of: Callable[..., Any] = both
) -> None:
    """Compare what `of` makes of the function and of the arrays with what it makes of the reference."""

    def naive(*arrays: Any) -> Any:
        return reference(*arrays, **features)[0]

    found = jax.jit(partial(of, function))(*arrays)
    oracle, low = in_float64(partial(of, naive), *arrays), jax.jit(partial(of, naive))(*arrays)
    for f, exact, rough in zip(*map(jax.tree.leaves, (found, oracle, low)), strict=True):
        assert_close(np.asarray(f), exact, np.asarray(rough), length=LENGTH, factor=3)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_a_ring(features: Mapping[str, Any]) -> None:
    agree(divided(ring_attention, features), features, *operands())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["causal", "window", "lengths", "segments"])
def test_a_ring_in_a_zigzag(name: str) -> None:
    agree(in_zigzag(ring_attention, FEATURES[name]), FEATURES[name], *operands())


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("function", [ring_attention, ulysses_attention])
def test_both_ways_without_checks_of_types(function: Any, dtype: Any) -> None:
    agree(divided(function, FEATURES["causal"], check=False), FEATURES["causal"], *operands(dtype))


@pytest.mark.parametrize(("kv_heads", "name"), [(1, "causal"), (2, "softcap and scale"), (4, "causal")])
def test_an_exchange_of_heads(kv_heads: int, name: str) -> None:
    agree(divided(ulysses_attention, FEATURES[name]), FEATURES[name], *operands(kv_heads=kv_heads))


def test_the_gradient_of_sinks_is_a_sum_over_devices() -> None:
    arrays, sinks = operands(), FEATURES["sinks"]["sinks"]

    def total(sinks: Any) -> Any:
        return (divided(ring_attention, {"causal": True, "sinks": sinks})(*arrays) ** 2).sum()

    def naive(sinks: Any, *arrays: Any) -> Any:
        return jax.grad(lambda s: (reference(*arrays, causal=True, sinks=s)[0] ** 2).sum())(sinks)

    found, oracle = jax.jit(jax.grad(total))(sinks), in_float64(naive, sinks, *arrays)
    assert_close(np.asarray(found), oracle, np.asarray(jax.jit(naive)(sinks, *arrays)), length=512, factor=3)


def linearized(function: Callable[..., Any], *arrays: Any) -> Any:
    """The tangents, by a linear function that also has a transpose."""
    _, push = jax.linearize(function, *arrays)
    return push(*map(jnp.cos, arrays))


def along_keys(function: Callable[..., Any], query: Any, key: Any, value: Any) -> Any:
    """A tangent of one operand, and the cotangent of that tangent."""

    def moved(query: Any) -> Any:
        return jax.jvp(lambda key: function(query, key, value), (key,), (jnp.cos(key),))[1]

    return moved(query), jax.grad(lambda query: jnp.sin(moved(query)).sum())(query)


def hessian_product(function: Callable[..., Any], *arrays: Any) -> Any:
    """Forward mode over reverse mode, each step of which is computed again."""
    gradient = jax.grad(lambda *a: jnp.sin(jax.checkpoint(function)(*a)).sum(), (0, 1, 2))
    return jax.jvp(gradient, arrays, tuple(map(jnp.cos, arrays)))[1]


def gradient_of_gradient(function: Callable[..., Any], *arrays: Any) -> Any:
    def along(*arrays: Any) -> Any:
        found = jax.grad(lambda *a: jnp.sin(function(*a)).sum(), (0, 1, 2))(*arrays)
        return sum((f * jnp.cos(a)).sum() for f, a in zip(found, arrays, strict=True))

    return jax.grad(along, (0, 1, 2))(*arrays)


@pytest.mark.parametrize(
    ("of", "name", "way"),
    [
        (linearized, "lengths", in_zigzag),
        (along_keys, "segments", divided),
        (hessian_product, "sinks", divided),
        (gradient_of_gradient, "softcap and scale", divided),
    ],
)
def test_other_derivatives_of_a_ring(of: Any, name: str, way: Any) -> None:
    agree(way(ring_attention, FEATURES[name]), FEATURES[name], *map(jnp.asarray, operands()), of=of)


def test_a_ring_under_vmap() -> None:
    """Of queries alone: the keys are those of all elements."""

    def each(function: Callable[..., Any], query: Any, key: Any, value: Any) -> Any:
        return jax.vmap(lambda query: both(function, query, key, value))(jnp.stack([query, -query]))

    agree(divided(ring_attention, FEATURES["causal"]), FEATURES["causal"], *operands(), of=each)


# --- the program ------------------------------------------------------------------------------------------------------


def test_no_device_has_more_than_one_other_part_and_no_exchange_waits() -> None:
    """Neither in the backward pass: no array of the whole sequence, and no gathers."""
    run = divided(ring_attention, {"causal": True})
    for function in (run, jax.grad(lambda *a: run(*a).sum(), (0, 1, 2))):
        text = jax.jit(function).lower(*operands()).compile().as_text()
        assert set(re.findall(r" (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)(?:-start)?\(", text)) <= {
            "collective-permute"
        }
        entry = text[text.index("ENTRY") :]
        assert not re.search(rf"f32\[1,{LENGTH},", entry)
    forward = jax.make_jaxpr(run)(*operands()).jaxpr.eqns[-1].params["jaxpr"]
    steps = [e.primitive.name for e in _flat(forward) if e.primitive.name in ("ppermute", "tilekern_call")]
    assert steps == ["ppermute", "ppermute", "tilekern_call"] * 3 + ["tilekern_call"]


def test_the_backward_pass_computes_nothing_of_the_forward_pass_again_and_keeps_none_of_its_keys() -> None:
    run = divided(partial(ring_attention, target="cpu:llvm"), {"causal": True})
    text = jax.jit(jax.grad(lambda *a: run(*a).sum(), (0, 1, 2))).lower(*operands()).compile().as_text()
    calls = re.findall(r"%flash_attention_([a-z_]+)[.\d]* = .*? custom-call\((.*?)\)", text)
    assert Counter(name for name, _ in calls) == {"forward": 4, "backward_query": 4, "backward_key": 4}
    keys: dict[str, set[str]] = {}
    for name, operands_of in calls:
        keys.setdefault(name, set()).update(re.findall(r"%ppermute[.\d]*", operands_of))
    assert len(keys["forward"]) == len(keys["backward_key"]) == 6
    assert keys["backward_query"] == keys["backward_key"] and keys["forward"].isdisjoint(keys["backward_key"])


def test_the_memory_of_a_device_shrinks_with_their_number() -> None:
    """A device that asks for the keys of all others at once would need as many parts as there are."""

    def temporaries(devices: int) -> int:
        mesh = jax.make_mesh((devices,), ("time",), (AxisType.Auto,), devices=jax.devices()[:devices])
        local = partial(ring_attention, axis_name="time")
        run = jax.shard_map(local, mesh=mesh, in_specs=P(None, "time"), out_specs=P(None, "time"))
        x = jax.ShapeDtypeStruct((1, 512, 4, 32), jnp.float32)
        gradient = jax.jit(jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1, 2)))
        return gradient.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 0.6 * temporaries(4)


def test_tpus_exchange_keys_beside_the_attention_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the schedule of XLA's compiler for four v5e: keys and values, asked for before a step and there behind it."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no device is asked, no lock is taken
        monkeypatch.setenv(name, "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh, part = Mesh(np.array(devices), ("time",), axis_types=(AxisType.Auto,)), P(None, "time")
    local = partial(ring_attention, axis_name="time", causal=True)
    run = jax.shard_map(local, mesh=mesh, in_specs=part, out_specs=part)
    x = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, part))
    gradient = jax.jit(jax.grad(lambda *a: run(*a).astype(jnp.float32).sum(), (0, 1, 2)))
    text = gradient.lower(x, x, x).compile().as_text()
    found = re.findall(r"= .* collective-permute-(start|done)\(|%flash_attention_(forward|backward_key)[.\d]* = ", text)
    order = "".join("<" if kind == "start" else ">" if kind == "done" else name[0] for kind, name in found)
    kernels = [n for n, kind in enumerate(order) if kind in "fb"]
    in_flight = [order[:n].count("<") - order[:n].count(">") for n in kernels]
    assert (re.sub("[<>]", "", order), in_flight) == ("ffffbbbb", [2, 2, 2, 0, 0, 2, 2, 2])
    assert not re.search(r" (all-[a-z]+|reduce-scatter)(-start)?\(", text)


def _flat(jaxpr: Any) -> list[Any]:
    found: list[Any] = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [p for n, p in equation.params.items() if n in ("jaxpr", "call_jaxpr")]
        found += _flat(inner[0]) if inner and equation.primitive.name != "tilekern_call" else [equation]
    return found


def test_the_bytes_that_devices_send() -> None:
    few = attention_bytes(4096, 32, 8, 128, 8)
    assert few.ring == 2 * 7 * 512 * 8 * 128 * 2
    assert few.ulysses == 2 * 7 / 8 * 512 * (32 + 8) * 128 * 2
    assert attention_bytes(4096, 32, 1, 128, 8).ring < attention_bytes(4096, 32, 1, 128, 8).ulysses


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_zigzag_of_a_length_that_does_not_divide() -> None:
    with refused(ArgumentError, "cannot be laid out in a zigzag", expected="8", got="= 12", fix="contiguous"):
        to_zigzag(jnp.ones((2, 12)), 4, 1)  # <-


def test_heads_that_devices_do_not_divide() -> None:
    q = np.ones((2, 32, 6, 8), np.float32)
    with pytest.raises(ArgumentError, match="cannot divide the heads") as raised:
        divided(ulysses_attention, {})(q, q, q)
    assert "6 and 6 heads, 4 devices of axis 'time'" in raised.value.got and "ring" in raised.value.fix


def test_a_part_that_cannot_be_halved() -> None:
    q = np.ones((2, 12, 2, 8), np.float32)
    with pytest.raises(ArgumentError, match="cannot halve a part") as raised:
        divided(partial(ring_attention, layout="zigzag"), {})(q, q, q)
    assert raised.value.got == "query of 3 positions" and "contiguous" in raised.value.fix


def test_an_axis_that_is_not_there() -> None:
    q = jnp.ones((1, 8, 2, 8))
    with refused(ArgumentError, "ring_attention needs a mesh axis", got="axis_name='time'", fix="shard_map"):
        ring_attention(q, q, q, axis_name="time")  # <-
