"""Tokens of a vocabulary that devices hold in parts, against those of one device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.sample.test_hidden import logits_of, nearly_tied, operands
from tests.kernels.sample.test_kernel import KEY
from tilekern.distributed import sample as by_devices
from tilekern.distributed import vocab_parallel_sample_hidden
from tilekern.errors import ArgumentError, GatherWarning
from tilekern.kernels import QuantizedArray
from tilekern.kernels.sample import sample, sample_hidden

ROWS, WIDTH, WORDS = 6, 19, 808
HEAT = np.float32([0, 0.5, 1, 2, 9, 1])
WEIGHT = P(None, "model")


def mesh_of(devices: int) -> Any:
    return jax.make_mesh((devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:devices])


def divided(devices: int = 2, check: bool = True, **options: Any) -> Callable[..., Any]:
    """A function of hidden, weight and key, whose weight is divided along words."""
    local = partial(vocab_parallel_sample_hidden, axis_name="model", **options)
    specs = P(), WEIGHT, P()
    return jax.jit(jax.shard_map(local, mesh=mesh_of(devices), in_specs=specs, out_specs=P(), check_vma=check))


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize(
    "rates",
    [{}, {"temperature": HEAT}, {"top_k": 5}, {"min_p": 0.2, "temperature": HEAT}, {"top_p": 0.6}, {"top_k": 300}],
    ids=["plain", "greedy_too", "top_k", "min_p", "top_p", "many"],
)
def test_tokens_are_those_of_one_device(devices: int, rates: dict[str, Any]) -> None:
    hidden, weight = operands(ROWS, WIDTH, WORDS)
    found = divided(devices, check=devices == 2, **rates)(hidden, weight, KEY)
    np.testing.assert_array_equal(found, sample_hidden(hidden, weight, KEY, **rates))
    np.testing.assert_array_equal(found, sample(logits_of(hidden, weight), KEY, **rates))


@pytest.mark.parametrize("rates", [{}, {"top_k": 7, "top_p": 0.9}, {"top_p": 0.8}], ids=str)
def test_penalties_bias_and_transposed_weights(rates: dict[str, Any]) -> None:
    hidden, weight = operands(ROWS, WIDTH, WORDS)
    counts = np.arange(ROWS * WORDS).reshape(ROWS, WORDS) % 4 - 1
    bias = (np.arange(WORDS) % 5 / 4).astype(np.float32)
    options: Any = {**rates, "presence_penalty": 0.25, "frequency_penalty": 0.5, "transpose_weight": True}

    def local(hidden: Any, weight: Any, bias: Any, counts: Any) -> Any:
        return vocab_parallel_sample_hidden(hidden, weight, KEY, axis_name="model", bias=bias, counts=counts, **options)

    specs = P(), P("model", None), P("model"), WEIGHT
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=P()))
    found = run(hidden, weight.T, bias, counts)
    np.testing.assert_array_equal(found, sample_hidden(hidden, weight.T, KEY, bias=bias, counts=counts, **options))


@pytest.mark.parametrize(
    "rates", [{"temperature": 0.0}, {"temperature": HEAT[:3], "top_k": 1}, {"top_p": 0.0}], ids=str
)
def test_the_first_of_equal_logits_on_several_devices(rates: dict[str, Any]) -> None:
    """Largest logits of devices 1 and 3, of a row whose logits are all equal, and of the last device alone."""
    x = np.zeros((3, 32), np.float32)
    x[0, [9, 11, 25]], x[2, 31] = 2, 1
    found = divided(4, **rates)(np.eye(3, dtype=np.float32), x, KEY)
    np.testing.assert_array_equal(found, sample(x, KEY, **rates))
    if rates == {"temperature": 0.0}:
        assert found.tolist() == [9, 0, 31]


@pytest.mark.parametrize("rates", [{}, {"temperature": 0.0}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_infinities_and_nan(rates: dict[str, Any]) -> None:
    """All logits of a device, or of all devices, may be -inf."""
    inf, nan = np.inf, np.nan
    rows = [[-inf, -inf, nan, 0], [-inf] * 4, [0, inf, 1, inf], [nan, nan, nan, 2], [1e38, 3e38, -3e38, 0], [nan] * 4]
    draw = divided(2, **rates)
    for row in np.float32(rows):
        found = draw(np.ones((1, 1), np.float32), row[None], KEY)
        assert found.tolist() == sample(row[None], KEY, **rates).tolist(), row


@pytest.mark.parametrize("vocabulary", [29, 13])
@pytest.mark.parametrize("rates", [{}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0.0, "softcap": 2.0}], ids=str)
def test_padding_is_never_drawn(vocabulary: int, rates: dict[str, Any]) -> None:
    """Padding of large weights, on part of a device and on whole devices; also beside tokens of -inf."""
    softcap = rates.get("softcap")
    random = np.random.default_rng(2)
    x = random.integers(-3, 4, (3, 32)).astype(np.float32)
    x[:, vocabulary:] = 9
    x[1, 3:] = -1e38
    x[1, vocabulary:] = 1e38
    draw = divided(4, vocabulary=vocabulary, **rates)
    logits = x[:, :vocabulary] if softcap is None else softcap * np.tanh(x[:, :vocabulary] / softcap)
    plain = {name: value for name, value in rates.items() if name != "softcap"}
    found = draw(np.eye(3, dtype=np.float32), x, KEY)
    np.testing.assert_array_equal(found, sample(logits.astype(np.float32), KEY, **plain))
    impossible = np.full((1, 32), -np.inf, np.float32)
    impossible[:, vocabulary:] = 0
    alone = draw(np.ones((1, 1), np.float32), impossible, KEY)
    if softcap is None:
        np.testing.assert_array_equal(alone, sample(impossible[:, :vocabulary], KEY, **plain))


@pytest.mark.parametrize(
    ("dtype", "blocks", "scales"),
    [("int8", (2, 1), P()), ("int8", (1, 80), WEIGHT), ("int4", (1, 80), WEIGHT), ("float8_e4m3fn", (1, 1), P())],
)
def test_quantized_weights(dtype: str, blocks: tuple[int, int], scales: P) -> None:
    """Scales of the whole weight, of blocks of the inner dim, and of tokens, which are divided as tokens are."""
    hidden, _ = operands(5, 32, 80)
    random = np.random.default_rng(3)
    values = jnp.asarray(random.integers(-2, 3, (32, 80))).astype(dtype)
    weight = QuantizedArray(values, jnp.asarray(2.0 ** random.integers(-3, 1, blocks), jnp.float32))
    for rates in ({}, {"top_p": 0.6}):

        def local(hidden: Any, values: Any, scales: Any, rates: Any = rates) -> Any:
            weight = QuantizedArray(values, scales)
            return vocab_parallel_sample_hidden(hidden, weight, KEY, axis_name="model", **rates)

        run = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=(P(), WEIGHT, scales), out_specs=P()))
        expected = sample(logits_of(hidden, np.asarray(weight.dequantize())), KEY, **rates)
        np.testing.assert_array_equal(run(hidden, weight.values, weight.scales), expected)


@pytest.mark.parametrize("devices", [2, 8])
def test_scores_that_nearly_tie(devices: int) -> None:
    """Many rows that scores do not decide, in several rounds."""
    x = nearly_tied(400, 8)
    found = divided(devices)(np.eye(400, dtype=np.float32), x, KEY)
    np.testing.assert_array_equal(found, sample(x, KEY))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("rates", [{}, {"top_k": 400}, {"top_p": 0.6}], ids=str)
def test_devices_also_divide_rows(check: bool, rates: dict[str, Any]) -> None:
    """Rounds of the logits differ in number between devices of different rows."""
    hidden, weight = operands(8, WIDTH, WORDS)
    hidden[1:4] = 0  # all tokens are equal, so that candidates do not suffice
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("rows", "model"), kinds, devices=jax.devices()[:4])
    local = partial(vocab_parallel_sample_hidden, axis_name="model", **rates)
    specs = P("rows"), WEIGHT, P("rows")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=check))
    keys = jax.random.split(jax.random.key(0), 8)
    np.testing.assert_array_equal(run(hidden, weight, keys), sample_hidden(hidden, weight, keys, **rates))


def test_leading_dims_vmap_and_no_rows() -> None:
    hidden, weight = operands(6, WIDTH, WORDS)
    stacked, draw = hidden.reshape(2, 3, WIDTH), divided(2)
    whole = draw(stacked, weight, KEY)
    np.testing.assert_array_equal(whole, sample_hidden(stacked, weight, KEY))
    keys = jax.random.split(jax.random.key(5), (2, 3))
    found = jax.vmap(draw, in_axes=(0, None, 0))(stacked, weight, keys)
    np.testing.assert_array_equal(found, sample_hidden(stacked, weight, keys))
    assert draw(stacked[:, :0], weight, KEY).shape == (2, 0)


def computations(text: str) -> dict[str, str]:
    """The computations of an HLO module by name; the entry's name is "ENTRY"."""
    heads = re.finditer(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    return {"ENTRY" if head[1] else head[2]: head[3] for head in heads}


def exchanges(**rates: Any) -> tuple[dict[str, str], dict[str, list[tuple[str, str]]]]:
    """The computations of 4 rows on 8 devices, and the type and kind of each exchange in each of them."""
    shapes = (4, WIDTH), (WIDTH, 1 << 13)
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    text = divided(8, **rates).lower(*arrays, KEY).compile().as_text()
    assert f"f32[{WIDTH},{1 << 13}]" not in text  # the whole weight
    kinds = r"= (\(?\w+\[[\d,]*\]).* ((?:all|collective|reduce-scatter)[\w-]*)\("
    parts = computations(text)
    return parts, {name: re.findall(kinds, body) for name, body in parts.items()}


@pytest.mark.parametrize(("rates", "of_all"), [({}, "s32[8,3,4]"), ({"top_k": 9}, "s32[8,4,513]")], ids=str)
def test_what_devices_exchange(rates: dict[str, Any], of_all: str) -> None:
    """A few numbers of each row; logits in rounds alone, of which there is none if these numbers decide all rows."""
    parts, by_name = exchanges(**rates)
    bodies = re.findall(r"while\(.*body=%?([\w.\-]+)", parts["ENTRY"])
    (rounds,) = [name for name in bodies if by_name[name]]
    assert by_name["ENTRY"] == [(of_all, "all-reduce")]
    assert sorted(kind for _, kind in by_name[rounds]) == ["all-reduce", "all-to-all"]
    assert all(name in ("ENTRY", rounds) for name, of_body in by_name.items() if of_body)


def test_candidates_decide_each_row_but_those_of_no_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens would be the same if all rows were exchanged, in rounds that are slow."""
    inf = jnp.inf
    logits = jnp.array([[1, -inf], [-inf, -inf], [inf, 0]], jnp.float32)
    candidates = jnp.zeros((3, 2), jnp.int32), logits, jnp.zeros(3, jnp.int32)
    monkeypatch.setattr(by_devices, "largest_tokens", lambda *_, **__: candidates)
    monkeypatch.setattr(by_devices, "tokens_of_candidates", lambda *_, **__: jnp.arange(3, dtype=jnp.int32))
    one, draw = Mock(of_all=lambda x: x[None]), Mock()
    assert by_devices._by_candidates(one, draw, {"target": None}).tolist() == [0, -1, 2]


def test_what_devices_exchange_for_top_p_alone() -> None:
    """The logits and the tokens of each row. XLA knows that there is one round, and needs no loop."""
    _, by_name = exchanges(top_p=0.9)
    assert sorted(kind for of_body in by_name.values() for _, kind in of_body) == ["all-reduce", "all-to-all"]


@pytest.mark.one_backend
@pytest.mark.parametrize("rates", [{}, {"top_k": 4}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_call_of_all_devices_gathers_the_weight(kind: AxisType, rates: dict[str, Any]) -> None:
    """`sample_hidden` under `jax.jit` is right, moves the weight, and names the function that does not."""
    words = 416 + 8 * (len(rates) + 2 * ("top_k" in rates)) + 40 * (kind is AxisType.Auto)  # types that no test has had
    hidden, weight = operands(ROWS, WIDTH, words)
    mesh = jax.make_mesh((4,), ("model",), (kind,), devices=jax.devices()[:4])
    placed = jax.device_put(hidden, NamedSharding(mesh, P())), jax.device_put(weight, NamedSharding(mesh, WEIGHT))
    with jax.set_mesh(mesh), pytest.warns(GatherWarning, match=r"distributed\.vocab_parallel_sample_hidden") as caught:
        compiled = jax.jit(partial(sample_hidden, **rates)).lower(*placed, KEY).compile()
    assert kind is AxisType.Explicit or all(warning.filename == __file__ for warning in caught)
    assert re.search(rf"= f32\[{WIDTH},{words}\]\S* all-gather\(", compiled.as_text())
    np.testing.assert_array_equal(compiled(*placed, KEY), sample_hidden(hidden, weight, KEY, **rates))
    _, exchanged = exchanges(**rates)
    assert not [of_body for of_body in exchanged.values() if any(what == "all-gather" for _, what in of_body)]


@pytest.mark.one_backend
@pytest.mark.slow  # ten seconds of libtpu; make test has the weights of one device
def test_tpus_take_filters_of_large_weights() -> None:
    """Compiled for four v5e, with sizes of Qwen 2.5 7B: neither the weight nor a part of it is copied or exchanged."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no device is asked, no lock is taken
        os.environ.setdefault(name, "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = Mesh(np.array(topology.devices), ("model",), axis_types=(AxisType.Auto,))
    local = partial(vocab_parallel_sample_hidden, axis_name="model", top_k=20, top_p=0.8)
    specs, sizes = (P(), WEIGHT, P()), (((16, 3584), jnp.bfloat16), ((3584, 152064), jnp.bfloat16), ((2,), jnp.uint32))
    arrays = [
        jax.ShapeDtypeStruct(*size, sharding=NamedSharding(mesh, spec)) for size, spec in zip(sizes, specs, strict=True)
    ]
    compiled = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3584 * 152064 * 2 // 4 // 8


def test_memory_of_logits() -> None:
    """`top_p` alone has the logits of some rows in memory, never those of all."""
    rows, words = 256, 1 << 17
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 16), (16, words))]
    compiled = divided(8, top_p=0.9).lower(*arrays, KEY).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 4 * (4 << 20)


H, W = jnp.ones((2, 3)), jnp.ones((3, 8))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((H, jnp.ones((3, 1 << 20))), {}, "V from 1 to 2\\^19"),
        ((H, jnp.ones((4, 8))), {}, r"weight = float32\[4, 4\]"),
        ((H, W), {"axis_name": "data"}, r"one of \['model'\]"),
        ((H, W), {"vocabulary": 9}, "an int from 1 to 8"),
        ((H, W), {"vocabulary": 0}, "an int from 1 to 8"),
        ((H, W), {"top_p": 2.0}, "cannot take this top_p"),
        ((H, W), {"softcap": 0.0}, "cannot take this softcap"),
        ((H, W), {"presence_penalty": 1.0}, "cannot apply these penalties"),
        ((H, W), {"bias": jnp.ones(8)}, "arrays of vocab_parallel_sample_hidden do not fit"),
    ],
)
def test_wrong_calls(arrays: Any, options: dict[str, Any], message: str) -> None:
    def local(hidden: Any, weight: Any) -> Any:
        call: Any = {"axis_name": "model"} | options
        return vocab_parallel_sample_hidden(hidden, weight, KEY, **call)  # here

    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=(P(), WEIGHT), out_specs=P())
    with pytest.raises(ArgumentError, match=message) as error:
        run(*arrays)
    assert "# here" in error.value.loc.snippet()


@pytest.mark.one_backend
def test_a_call_outside_of_shard_map() -> None:
    with pytest.raises(ArgumentError, match=r"jax\.shard_map"):
        vocab_parallel_sample_hidden(H, W, KEY, axis_name="model")
