import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernels.recurrences import check, check_gradients, packed, runs
from tilekern.errors import ArgumentError
from tilekern.kernels.causal_conv1d import causal_conv1d, reference
from tilekern.kernels.causal_conv1d.cases import CASES, Case
from tilekern.kernels.causal_conv1d.kernel import causal_conv1d_forward

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = {"block_t": 8, "block_c": 8}


def problem(tokens: int, dtype: Any = "float32", *, taps: int = 4, batch: int = 2) -> list[Any]:
    """x of twelve channels, weight, bias and state."""
    random = np.random.default_rng(0)
    shapes = [(batch, tokens, 12), (taps, 12), (12,), (batch, taps - 1, 12)]
    return [random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def both(**keywords: Any) -> tuple[Any, Any]:
    """The kernel with small tiles, and its definition."""
    return partial(causal_conv1d, **{**BLOCKS, **keywords}), partial(reference, **keywords)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype: str) -> None:
    check(*both(activation="silu"), problem(19, dtype))


@pytest.mark.parametrize(("tokens", "taps"), [(9, 1), (3, 2), (1, 4), (3, 4), (9, 11)])
def test_taps_and_lengths(tokens: int, taps: int) -> None:
    """Also fewer tokens than taps, and more taps than a tile has tokens."""
    check(*both(), problem(tokens, taps=taps))


@pytest.mark.parametrize(("tokens", "taps", "dtype"), [(19, 4, "float32"), (9, 2, "bfloat16"), (2, 4, "bfloat16")])
def test_gradients(tokens: int, taps: int, dtype: str) -> None:
    check_gradients(*both(activation="silu"), problem(tokens, dtype, taps=taps))


def test_gradients_of_packed_sequences() -> None:
    ids = packed(41)
    check_gradients(*both(segment_ids=ids), problem(41))


@pytest.mark.one_backend
def test_without_bias_and_state() -> None:
    check_gradients(*both(activation="silu"), problem(9)[:2])


def test_packed_sequences_are_separate_ones() -> None:
    x, weight, bias, state = problem(21, batch=1)
    run = partial(causal_conv1d, activation="silu", **BLOCKS)
    out, last = run(x, weight, bias, state, segment_ids=packed(21, batch=1))
    for start, stop in runs(21):
        alone, last_alone = run(x[:, start:stop], weight, bias, None if start else state)
        np.testing.assert_allclose(out[:, start:stop], alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(last, last_alone)


def test_steps_of_decoding_are_one_call() -> None:
    x, weight, bias, state = problem(5)
    whole, last = causal_conv1d(x, weight, bias, state, **BLOCKS)
    for t in range(5):
        out, state = causal_conv1d(x[:, t : t + 1], weight, bias, state)
        np.testing.assert_allclose(out, whole[:, t : t + 1], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_the_state_has_the_tokens_of_the_last_sequence_alone() -> None:
    x, weight, bias, state = problem(2)
    ids = np.array([[5, 6], [7, 7]])
    _, last = causal_conv1d(x, weight, bias, state, segment_ids=ids)
    zeros = np.zeros((1, 12), np.float32)
    np.testing.assert_array_equal(last[0], np.concatenate([zeros, zeros, x[0, 1:]]))
    np.testing.assert_array_equal(last[1], np.concatenate([state[1, 2:], x[1]]))


def test_blocks_change_rounding_alone() -> None:
    arrays = problem(19)
    run = partial(causal_conv1d, activation="silu")
    outs = [run(*arrays, block_t=t, block_c=c)[0] for t, c in ((1, 12), (5, 12), (64, 16))]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-6, atol=1e-6)


def test_under_vmap_and_checkpoint() -> None:
    x, weight, bias, state = problem(9, batch=3)

    def loss(x: Any, state: Any, function: Any) -> Any:
        return jnp.sin(function(x[None], weight, bias, state[None], activation="silu")[0]).sum()

    ours, theirs = (
        jax.jit(jax.vmap(jax.grad(jax.checkpoint(partial(loss, function=f)), argnums=(0, 1))))(x, state)
        for f in (partial(causal_conv1d, **BLOCKS), reference)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    ours, definition = (partial(function, **case.keywords) for function in (causal_conv1d, reference))
    check(ours, definition, case.arrays(jax.random.key(0), dtype))


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    arrays = problem(19, batch=1)
    traced = causal_conv1d_forward.trace(*arrays, packed(19, batch=1), activation="silu", **BLOCKS)
    expected = causal_conv1d(*arrays, segment_ids=packed(19, batch=1), activation="silu")[0]
    np.testing.assert_allclose(tk.interpret(traced)(*arrays, packed(19, batch=1)), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.one_backend
def test_no_tokens() -> None:
    x, weight, bias, state = problem(0)
    out, last = causal_conv1d(x, weight, bias, state)
    assert out.shape == x.shape
    np.testing.assert_array_equal(last, state)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 9, 12), jnp.int32)}, "x = int32[2, 9, 12]"),
        ({0: jnp.zeros((9, 12))}, "x = float32[9, 12]"),
        ({1: jnp.zeros((0, 12))}, "weight = float32[0, 12]"),
        ({1: jnp.zeros((12, 1, 4))}, "weight = float32[12, 1, 4]"),
        ({2: jnp.zeros((1, 12))}, "bias = float32[1, 12]"),
        ({3: jnp.zeros((2, 4, 12))}, "initial_state = float32[2, 4, 12]"),
        ({4: jnp.zeros((2, 9))}, "segment_ids = float32[2, 9]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    *arrays, ids = [change.get(n, x) for n, x in enumerate([*problem(9), None])]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        causal_conv1d(*arrays, segment_ids=ids)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_an_activation_that_there_is_not() -> None:
    with pytest.raises(ArgumentError, match="activation = 'gelu'"):
        causal_conv1d(*problem(9), activation="gelu")
