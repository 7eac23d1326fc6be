"""The softcap: a bound of scores, and its cotangent, against NumPy in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.kernels.softcap import softcap_cotangent, softcapped
from tilekern.testing import assert_close

SCORES = np.linspace(-90, 90, 7, dtype=np.float32)
WIDE = SCORES.astype(np.float64)

pytestmark = pytest.mark.one_backend


def test_scores_are_bounded() -> None:
    out = softcapped(jnp.asarray(SCORES), 30.0)
    assert_close(out, 30 * np.tanh(WIDE / 30), 30 * np.tanh(SCORES / np.float32(30)))
    assert 29 < np.abs(out).max() < 30


def test_the_cotangent_of_scores() -> None:
    """d/ds c tanh(s / c) = 1 / cosh(s / c)²."""
    out = softcap_cotangent(jnp.asarray(SCORES), softcapped(jnp.asarray(SCORES), 30.0), 30.0)
    low = SCORES * (1 - np.square(np.tanh(SCORES / np.float32(30))))
    assert_close(out, WIDE / np.square(np.cosh(WIDE / 30)), low, factor=3)


def test_none_changes_nothing() -> None:
    scores = jnp.asarray(SCORES)
    assert softcapped(scores, None) is scores and softcap_cotangent(scores, scores, None) is scores
