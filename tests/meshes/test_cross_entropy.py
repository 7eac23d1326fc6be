"""Cross entropy of a vocabulary that devices hold in parts, against one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tilekern.distributed import vocab_parallel_cross_entropy
from tilekern.errors import ArgumentError
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close, in_float64

TOKENS, WIDTH, VOCABULARY = 10, 12, 40
LABELS = np.array([0, 9, 10, 39, 40, -1, -100, 20, 2**31 - 1, 5])
EVERY = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 1e-2, "temperature": 1.5, "ignore_index": 20}
checks = pytest.mark.parametrize("check", [True, False])
SPECS = P(), P(None, "model"), P()


def divided(function: Callable[..., Any], devices: int = 4, check: bool = True) -> Callable[..., Any]:
    """A function of hidden, weight and labels whose weight is divided along words."""
    mesh = jax.make_mesh((devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPECS, out_specs=P(), check_vma=check))


def parallel(**options: Any) -> Callable[..., Any]:
    return partial(vocab_parallel_cross_entropy, axis_name="model", return_logsumexp=True, **options)


def arrays(dtype: Any = jnp.float32) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (WIDTH, VOCABULARY)
    return tuple(jnp.asarray(random.standard_normal(s), dtype) for s in shapes)


def agree(found: Any, wanted: Callable[..., Any], *inputs: Any, factor: float = 2) -> None:
    oracles, lows = in_float64(wanted, *inputs), jax.jit(wanted)(*inputs)
    for f, oracle, low in zip(*map(jax.tree.leaves, (found, oracles, lows)), strict=True):
        assert_close(f, oracle, low, length=WIDTH + VOCABULARY, factor=factor)


@checks
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_gradients_are_those_of_one_device(check: bool, options: dict[str, Any], dtype: str) -> None:
    hidden, weight = arrays(dtype)
    run = divided(parallel(**options), check=check)
    agree(run(hidden, weight, LABELS), partial(reference, labels=LABELS, **options), hidden, weight)

    def number(function: Callable[..., Any], hidden: Any, weight: Any) -> jax.Array:
        loss, logsumexp = function(hidden, weight, labels=LABELS)
        return jnp.sum(jnp.sin(jnp.where(jnp.isnan(loss), 0, loss))) + jnp.sum(jnp.cos(logsumexp))

    given = partial(number, lambda h, w, labels: run(h, w, labels))
    found = jax.grad(given, (0, 1))(hidden, weight)
    agree(found, jax.grad(partial(number, partial(reference, **options)), (0, 1)), hidden, weight, factor=3)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_any_number_of_devices_and_any_leading_dims(devices: int) -> None:
    hidden, weight = arrays()
    labels = LABELS.reshape(2, 5)
    found = divided(parallel(), devices)(hidden.reshape(2, 5, WIDTH), weight, labels)
    wanted = cross_entropy(hidden.reshape(2, 5, WIDTH), weight, labels, return_logsumexp=True)
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-5)


def test_forward_mode_and_second_order() -> None:
    hidden, weight = arrays()
    run, moved = divided(parallel()), jnp.cos(hidden)

    def first(function: Callable[..., Any], hidden: Any) -> Any:
        return jax.jvp(lambda h: jnp.nansum(function(h)[0]), (hidden,), (moved,))[1]

    ours, theirs = (lambda h: run(h, weight, LABELS)), partial(reference, weight=weight, labels=LABELS)
    for order in (first, lambda f, h: jax.grad(partial(first, f))(h)):
        np.testing.assert_allclose(order(ours, hidden), order(theirs, hidden), rtol=2e-4, atol=2e-4)


def test_infinite_logits_of_one_device() -> None:
    """All words of a device may be impossible; an infinite logit is an infinite loss of the others."""
    hidden, weight = jnp.ones((2, 1)), jnp.zeros((1, 8)).at[0, :2].set(-jnp.inf)
    loss, _ = divided(parallel())(hidden, weight, np.array([1, 7]))
    np.testing.assert_allclose(loss, [np.inf, np.log(6)], rtol=1e-6)
    loss, _ = divided(parallel())(hidden, -weight, np.array([3, 7]))
    np.testing.assert_array_equal(loss, [np.inf, np.inf])


def test_what_devices_exchange() -> None:
    """Numbers for each token, and neither logits nor weights."""
    hidden, weight = arrays()
    text = divided(parallel()).lower(hidden, weight, LABELS).compile().as_text()
    results = re.findall(r"= (.*) (?:all-\w+|collective-permute)\(", text)
    made = [shape for result in results for shape in re.findall(r"\w+\[[\d,]*\]", result)]
    assert len(made) == 3 and set(made) == {f"f32[{TOKENS}]"}


def test_errors() -> None:
    hidden, weight = arrays()
    with pytest.raises(ArgumentError, match=r"jax\.shard_map"):
        vocab_parallel_cross_entropy(hidden, weight, jnp.asarray(LABELS), axis_name="model")
    with pytest.raises(ArgumentError, match=r"labels = int32\[3\]"):
        divided(parallel())(hidden, weight, np.zeros(3, np.int32))
    with pytest.raises(ArgumentError, match="temperature = 0"):
        divided(parallel(temperature=0))(hidden, weight, LABELS)
