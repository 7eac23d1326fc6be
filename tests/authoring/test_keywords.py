"""Keywords that functions lack: the error names the argument that is meant."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from tests.lang.checks import refused
from tilekern import nn
from tilekern.authoring import takes_python_numbers, unknown_keyword
from tilekern.errors import ArgumentError
from tilekern.kernels import cross_entropy, flash_attention, matmul, rms_norm, softmax

X, QUERY = jnp.ones((4, 8)), jnp.ones((1, 4, 2, 8))


@pytest.mark.parametrize(
    ("function", "arrays", "keyword", "value", "ours"),
    [
        (rms_norm, [X, X[0]], "epsilon", 1e-6, "eps"),
        (nn.rms_norm, [X], "eps", 1e-6, "epsilon"),
        (nn.layer_norm, [X], "weight", X[0], "scale"),
        (nn.layer_norm, [X], "gamma", X[0], "scale"),
        (nn.softmax, [X], "dim", 0, "axis"),
        (softmax, [X], "dim", 0, "axis"),
        (nn.dot_product_attention, [QUERY] * 3, "attn_mask", None, "mask"),
        (flash_attention, [QUERY] * 3, "is_causal", True, "causal"),
        (flash_attention, [QUERY] * 3, "sm_scale", 1.0, "scale"),
        (flash_attention, [QUERY] * 3, "block_qs", 16, "block_q"),
        (matmul, [X, X.T], "transposed_rhs", True, "transpose_rhs"),
        (cross_entropy, [X, X.T], "targets", X[0], "labels"),
    ],
)
def test_the_error_names_our_argument(
    function: Callable[..., jax.Array], arrays: list[jax.Array], keyword: str, value: object, ours: str
) -> None:
    summary = f"{function.__name__} has no keyword argument '{keyword}'"
    with refused(ArgumentError, summary, expected=f"{ours}=", got=f"{keyword} = ", fix=f"write {ours}="):
        function(*arrays, **{keyword: value})  # <-


def test_a_keyword_that_is_like_none_lists_all() -> None:
    expected = "one of x, weight, eps, offset, target, block_rows, block_columns"
    with refused(ArgumentError, "rms_norm has no keyword", expected=expected, got="nonsense = 1", fix="help(rms_norm)"):
        rms_norm(X, nonsense=1)  # <-


def test_options_are_listed_behind_parameters() -> None:
    error = unknown_keyword("f", "nonsense", 1, ["x", "y"], ["block_m"])
    assert error.expected == "one of x, y, block_m"


def test_a_type_error_inside_of_the_function_stays() -> None:
    def inner() -> None: ...

    @takes_python_numbers
    def outer(x: object) -> None:
        inner(y=x)  # pyright: ignore[reportCallIssue] -- the error of this test

    with pytest.raises(TypeError, match="unexpected keyword argument 'y'") as raised:
        outer(x=1)
    assert not isinstance(raised.value, ArgumentError)
