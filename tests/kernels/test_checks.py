"""Checks that public functions share: intervals of numbers, and the error for an argument."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from tilekern.errors import ArgumentError
from tilekern.kernels import flash_attention, rope
from tilekern.kernels.checks import lies_in, refusal, softcap_of_scores

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0, True), (1, True), (0.5, True), (np.float32(1), True), (Fraction(1, 2), True)),
        *((-1e-9, False), (1.1, False), (float("nan"), False), (10**400, False), ("0.5", False), (None, False)),
    ],
)
def test_numbers_in_an_interval(value: object, expected: bool) -> None:
    assert lies_in(value, 0, 1) is expected


def test_a_refusal_shows_the_argument_or_words() -> None:
    error = refusal("f", "rate", "a number", "no number", "give one")
    assert (error.summary, error.got) == ("f cannot take this rate", "rate = 'no number' (str)")
    assert refusal("f", "rate", "a number", None, "give one", got="a rate of 2").got == "a rate of 2"


@pytest.mark.parametrize("softcap", [0, 1e31, True, "30"])
def test_softcaps_that_are_refused(softcap: object) -> None:
    with pytest.raises(ArgumentError, match="f cannot take this softcap"):
        softcap_of_scores("f", softcap)
    assert softcap_of_scores("f", 30) == 30 and softcap_of_scores("f", None) is None


def test_words_that_a_user_gives_are_shown_as_an_argument() -> None:
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(ArgumentError, match="flash_attention cannot take this causal") as caught:
        flash_attention(x, x, x, causal="top left")  # type: ignore[arg-type]  # here
    assert "causal = 'top left'" in caught.value.got and "# here" in caught.value.loc.snippet()


def test_a_list_in_the_place_of_an_array_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        rope([1.0, 2.0])  # type: ignore[arg-type]
    assert caught.value.fix.startswith("make an array of a list: jnp.asarray(x); ")
