"""Functions of the user that close over traced arrays: values and gradients as of a `Partial` that carries them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from tilekern.authoring import carry_arrays
from tilekern.errors import ArgumentError, TraceError
from tilekern.kernels.flash_attention import flash_attention

pytestmark = pytest.mark.one_backend

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.standard_normal((1, 9, 2, 8)).astype(np.float32) for _ in range(3))
SLOPES = jnp.array([0.5, -0.25], jnp.float32)


def mod(slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + slopes[n] * (i - j)


def closes(slopes: Any) -> Any:
    return lambda s, b, n, i, j: s + slopes[n] * (i - j)


def has_a_default(slopes: Any) -> Any:
    def found(s: Any, b: Any, n: Any, i: Any, j: Any, *, slopes: Any = slopes) -> Any:
        return s + slopes[n] * (i - j)

    return found


def closes_over_a_function(slopes: Any) -> Any:
    def distance(n: Any, i: Any, j: Any) -> Any:
        return slopes[n] * (i - j)

    return lambda s, b, n, i, j: s + distance(n, i, j)


def closes_over_a_tree(slopes: Any) -> Any:
    params: dict[str, Any] = {"slopes": [slopes], "name": "alibi"}
    return lambda s, b, n, i, j: s + params["slopes"][0][n] * (i - j)


def closes_over_itself(slopes: Any) -> Any:
    def found(s: Any, b: Any, n: Any, i: Any, j: Any, again: bool = True) -> Any:
        return found(s, b, n, i, j, False) if again else s + slopes[n] * (i - j)

    return found


def is_partial(slopes: Any) -> Any:
    return partial(lambda s, b, n, i, j, *, slopes: s + slopes[n] * (i - j), slopes=slopes)


WRITTEN: list[Callable[[Any], Any]] = [
    closes, has_a_default, closes_over_a_function, closes_over_a_tree, closes_over_itself, is_partial]  # fmt: skip


def loss(make: Callable[[Any], Any], q: Any, slopes: Any) -> Any:
    return (flash_attention(q, K, V, score_mod=make(slopes)) * V).sum()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", WRITTEN)
def test_gradients_are_those_of_a_partial(make: Callable[[Any], Any]) -> None:
    wraps: list[Callable[..., Any]] = [lambda f: f, jax.jit]
    for wrap in wraps:
        expected = wrap(jax.value_and_grad(partial(loss, lambda slopes: Partial(mod, slopes)), (0, 1)))(Q, SLOPES)
        found = wrap(jax.value_and_grad(partial(loss, make), (0, 1)))(Q, SLOPES)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    # The slopes are traced, and not differentiated.
    found = jax.jit(jax.grad(partial(loss, make)))(Q, SLOPES)
    np.testing.assert_array_equal(found, expected[1][0])


def test_a_mask_reads_traced_documents() -> None:
    documents = jnp.array([[0, 0, 0, 1, 1, 1, 2, 2, 2]])

    def loss(q: Any, ids: Any) -> Any:
        return flash_attention(q, K, V, mask_mod=lambda b, n, i, j: ids[b, i] == ids[b, j]).sum()

    def by_segments(q: Any, ids: Any) -> Any:
        return flash_attention(q, K, V, segment_ids=ids).sum()

    found = jax.jit(jax.grad(loss))(Q, documents)
    np.testing.assert_allclose(found, jax.grad(by_segments)(Q, documents), rtol=1e-5, atol=1e-6)


def test_arrays_read_in_another_way_are_for_the_forward_pass() -> None:
    """A tile of a carried array cannot be made of any index, so there is no derivative."""

    def loss(q: Any, slopes: Any) -> Any:
        return flash_attention(q, K, V, score_mod=lambda s, b, n, i, j: s * (2 * slopes)[n]).sum()

    assert jnp.isfinite(jax.jit(loss)(Q, SLOPES))
    with pytest.raises(TraceError, match=r"closes over a traced value(.|\n)*carries it in a jax.tree_util.Partial"):
        jax.jit(jax.grad(loss))(Q, SLOPES)


def test_no_traced_array_outlives_its_trace() -> None:
    with jax.checking_leaks():
        jax.jit(jax.grad(partial(loss, closes)))(Q, SLOPES)


def test_functions_without_traced_arrays_are_themselves() -> None:
    function = closes(SLOPES)
    assert carry_arrays(function).func is function and carry_arrays(function).args == ()
    half_made = eval("lambda: later", {"later": 1})
    assert carry_arrays(half_made).func is half_made


def test_a_function_that_closes_over_a_large_array_has_the_wrong_number_of_parameters() -> None:
    table = jnp.zeros((64, 256))
    with pytest.raises(ArgumentError, match=r"a function of \(s, b, n, i\): too many positional arguments") as caught:
        flash_attention(Q, K, V, score_mod=lambda s, b, n, i: s + table[n, i])
    assert caught.value.loc.file == __file__


def test_a_function_is_checked_once() -> None:
    """A second time only if it reads the array that it closes over as tiles do not allow."""
    table, calls = jnp.zeros((64, 256)), [0, 0]

    def count(number: int) -> None:
        calls[number] += 1

    def is_no_score(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        count(0)
        return table[i, j] > 0

    def without_arrays(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        count(1)
        return i > j

    for mod in (is_no_score, without_arrays):
        with pytest.raises(ArgumentError, match="flash_attention cannot take this score_mod"):
            flash_attention(Q, K, V, score_mod=mod)
    assert 0 < calls[0] == calls[1]
