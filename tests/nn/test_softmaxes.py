"""`softmax` and `log_softmax` are those of jax.nn: axes, masks, dtypes, derivatives, errors."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern import nn
from tilekern.errors import ArgumentError
from tilekern.testing import assert_close, in_float64

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 5), np.float32)
MASK = RANDOM.random((2, 3, 5)) < 0.6
MASK[..., 0] = True
NAMES = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


@NAMES
def test_the_signature_is_that_of_jax(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, name)).parameters.values() for m in (nn, jax.nn))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@NAMES
@pytest.mark.parametrize("where", [None, MASK, MASK[:1, :, :1] | True, MASK[0]], ids=["all", "some", "spread", "rank"])
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), (2, 1), None, ()], ids=str)
def test_any_axes_with_and_without_a_mask(name: str, where: Any, axis: Any) -> None:
    ours, theirs = (partial(getattr(m, name), axis=axis, where=where) for m in (nn, jax.nn))
    oracle = in_float64(theirs, X)
    finite = np.isfinite(oracle)  # elsewhere log_softmax is -inf
    found, low = np.asarray(ours(X)), np.asarray(theirs(X))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(oracle))
    assert_close(found[finite], oracle[finite], low[finite], length=X.size)


@NAMES
def test_gradients_with_a_mask(name: str) -> None:
    def loss(function: Any, x: Any) -> Any:
        return jnp.sum(jnp.where(MASK, jnp.sin(function(x, where=MASK)), 0))

    found, low = (jax.grad(partial(loss, getattr(m, name)))(X) for m in (nn, jax.nn))
    oracle = in_float64(jax.grad(partial(loss, getattr(jax.nn, name))), X)
    assert_close(found, oracle, low, length=5, factor=3)
    assert (np.asarray(found)[~MASK] == 0).all()


@NAMES
def test_a_row_in_which_nothing_counts(name: str) -> None:
    where = np.arange(2)[:, None, None] > 0
    found = getattr(nn, name)(X, where=where)
    assert (np.asarray(found)[0] == (0 if name == "softmax" else -np.inf)).all()
    gradient = jax.grad(lambda x: jnp.where(where, getattr(nn, name)(x, where=where), 0).sum())(X)
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[0] == 0).all()


@NAMES
def test_integers_lists_and_numbers(name: str) -> None:
    ours, theirs = (getattr(m, name) for m in (nn, jax.nn))
    for x in ([[1, 2], [3, 5]], np.arange(4, dtype=np.int8)):
        found, expected = ours(jnp.asarray(x)), theirs(jnp.asarray(x))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    with jax.enable_x64(True):
        for kind in (np.int32, np.int64):
            assert ours(np.arange(4, dtype=kind)).dtype == theirs(jnp.arange(4, dtype=kind)).dtype
    assert ours(3.0, axis=None) == theirs(3.0, axis=None)
    assert ours(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert ours(jnp.zeros((0, 3))).shape == (0, 3)


@NAMES
@pytest.mark.parametrize("axis", [3, (0, 0), (1, -2), 1.5, "x"])
def test_axes_that_are_refused(name: str, axis: Any) -> None:
    with refused(ArgumentError, f"the axis of {name}", expected="[-3, 3)", got="axis = ", fix="leave it out"):
        getattr(nn, name)(X, axis)  # <-


@NAMES
def test_a_number_has_no_last_axis(name: str) -> None:
    with refused(
        ArgumentError, f"the axis of {name}", expected="at least one dim", got="for a number", fix="atleast_1d"
    ):
        getattr(nn, name)(1.0)  # <-


@NAMES
@pytest.mark.parametrize("where", [MASK[:, :2], X], ids=["shape", "dtype"])
def test_masks_that_are_refused(name: str, where: Any) -> None:
    with refused(ArgumentError, f"{name} cannot take this where", expected="[2, 3, 5]", got="where = ", fix="compare"):
        getattr(nn, name)(X, where=where)  # <-


@NAMES
@pytest.mark.parametrize("kind", [np.complex64, bool, jnp.float8_e5m2])
def test_dtypes_that_are_refused(name: str, kind: Any) -> None:
    with refused(ArgumentError, f"the arrays of {name}", expected="real", got=np.dtype(kind).name, fix="cast"):
        getattr(nn, name)(X.astype(kind))  # <-
