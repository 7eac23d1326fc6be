"""Rows drawn in rounds with their logits in memory: the tokens of `sample`, on one device, on meshes and on TPUs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.kernels.sample.test_hidden import logits_of, operands
from tests.kernels.sample.test_kernel import KEY, words_of
from tilekern.kernels.sample import sample, sample_hidden
from tilekern.kernels.sample.arguments import Rates
from tilekern.kernels.sample.checks import penalties_of_rows, rates_of_rows
from tilekern.kernels.sample.completed import remaining_tokens
from tilekern.kernels.sample.product import Form, Operands

RATES: list[dict[str, Any]] = [
    {},
    {"top_p": 0.6},
    {"top_k": 7, "top_p": 0.9},
    {"min_p": 0.1, "temperature": 2.0},
    {"top_k": 30, "temperature": 0.0},
]


def rates_of(rows: int, words: int, rate: dict[str, Any]) -> Rates:
    names = "temperature", "top_k", "top_p", "min_p"
    return rates_of_rows(
        "", (rows,), words, *(rate.get(name, 1.0 if name == "temperature" else None) for name in names)
    )


@pytest.mark.one_backend
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_rows_drawn_in_rounds(rate: dict[str, Any]) -> None:
    """Three rounds, the last one of fewer rows; penalties; rows with a token keep it, whatever it is."""
    rows, words = 45, 300
    hidden, weight = operands(rows, 19, words)
    counts = np.arange(rows * words).reshape(rows, words) % 3
    penalties = penalties_of_rows("", (rows,), words, counts, None, 0.5, None)
    rates = rates_of(rows, words, rate)
    tokens = np.where(np.arange(rows) % 9 == 4, words - 1, -1).astype(np.int32)
    arrays: Any = Operands(hidden, weight), words_of(rows), rates, penalties, tokens
    found = jax.jit(partial(remaining_tokens, form=Form(), logits_in_memory=True))(*arrays)
    drawn = np.asarray(sample(logits_of(hidden, weight), KEY, counts=counts, presence_penalty=0.5, **rate))
    np.testing.assert_array_equal(found, np.where(tokens < 0, drawn, tokens))
    assert (np.asarray(found) != tokens).any()
    # No round at all, and one row.
    np.testing.assert_array_equal(remaining_tokens(*arrays[:4], drawn, form=Form(), logits_in_memory=True), drawn)


@pytest.mark.one_backend
def test_rounds_of_infinities_and_nan() -> None:
    inf, nan = np.inf, np.nan
    x = np.float32([[-inf, 1, nan, 0], [-inf] * 4, [0, inf, 1, inf], [nan, nan, nan, 2], [nan] * 4, [1e38, 3e38, 0, 0]])
    for row in x:
        for rate in RATES:
            rates = rates_of(1, 4, rate)
            arrays: Any = Operands(np.ones((1, 1), np.float32), row[None]), words_of(1), rates, None, np.int32([-1])
            found = remaining_tokens(*arrays, form=Form(), logits_in_memory=True)
            assert found.tolist() == sample(row[None], KEY, **rate).tolist(), (row, rate)


@pytest.mark.one_backend
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("rate", [{}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}], ids=str)
def test_tpus_take_filters_of_large_weights(topology: str, rate: dict[str, Any]) -> None:
    """Compiled with sizes of Qwen 2.5 7B: no copy of the weight, and no logits of all rows."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no device is asked, no lock is taken
        os.environ.setdefault(name, "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sizes = ((64, 3584), jnp.bfloat16), ((3584, 152064), jnp.bfloat16), ((2,), jnp.uint32)
    arrays = [jax.ShapeDtypeStruct(*size, sharding=SingleDeviceSharding(device)) for size in sizes]
    compiled = jax.jit(partial(sample_hidden, **rate)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 152064 * 4


@pytest.mark.one_backend
def test_rounds_of_rows_that_explicit_axes_divide() -> None:
    """Each device has rounds of its own, as many as its rows need."""
    hidden, weight = operands(8, 8, 50)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    of_rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("rows",), ()))
    rates = rates_of(8, 50, {"top_p": 0.7})
    tokens = np.int32([-1, -1, 3, 3, 3, 3, 3, 3])
    expected = np.where(tokens < 0, sample(logits_of(hidden, weight), KEY, top_p=0.7), tokens)
    placed = jax.device_put((hidden, words_of(8), rates, tokens), of_rows)

    def draw(hidden: Any, keys: Any, rates: Any, tokens: Any, weight: Any) -> Any:
        arrays = Operands(hidden, weight), keys, rates, None, tokens
        return remaining_tokens(*arrays, form=Form(), logits_in_memory=True)

    with jax.set_mesh(mesh):
        compiled = jax.jit(draw).lower(*placed, jax.device_put(weight, whole)).compile()
        found = compiled(*placed, jax.device_put(weight, whole))
    np.testing.assert_array_equal(found, expected)
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
