import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.recurrences import check, check_decoding, check_gradients, check_packed, packed
from tilekern.errors import ArgumentError
from tilekern.kernels.rg_lru import reference, rg_lru
from tilekern.kernels.rg_lru.cases import CASES, Case
from tilekern.kernels.rg_lru.kernel import rg_lru_forward

BLOCKS = {"block_t": 8, "block_c": 8}


def problem(tokens: int, dtype: Any = "float32", *, batch: int = 2, scale: float = 1.0) -> list[Any]:
    """x, both gates, the parameter and a state of twelve channels."""
    random = np.random.default_rng(0)
    x, of_input, of_recurrence = random.standard_normal((3, batch, tokens, 12))
    a_param, state = random.uniform(-5, 1, 12), random.standard_normal((batch, 12))
    arrays = [x, of_input, of_recurrence * scale, a_param * scale, state]
    return [a.astype(jnp.dtype(dtype if n < 3 else np.float32)) for n, a in enumerate(arrays)]


def both(**keywords: Any) -> tuple[Any, Any]:
    """The kernel with small tiles, and its definition."""
    return partial(rg_lru, **{**BLOCKS, **keywords}), partial(reference, **keywords)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_floats(dtype: str) -> None:
    check(*both(), problem(19, dtype))


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_lengths(tokens: int) -> None:
    check(*both(), problem(tokens))


@pytest.mark.parametrize(("tokens", "dtype"), [(19, "float32"), (16, "bfloat16")])
def test_gradients(tokens: int, dtype: str) -> None:
    check_gradients(*both(), problem(tokens, dtype))


@pytest.mark.parametrize("scale_first", [True, False])
def test_gradients_of_packed_sequences(scale_first: bool) -> None:
    ids = packed(23)
    check_gradients(*both(segment_ids=ids, scale_first=scale_first, exponent=4.0), problem(23))


@pytest.mark.parametrize("with_state", [True, False])
def test_first_tokens_that_are_not_scaled(with_state: bool) -> None:
    arrays = problem(19)[: 4 + with_state]
    check(*both(scale_first=False), arrays)
    check(*both(scale_first=False, segment_ids=packed(19)), arrays)


def test_decays_of_0_and_1() -> None:
    """Gates so large that decays are 1 or 0 in floating point; derivatives are finite, and 0 where it is 1."""
    arrays = problem(9, scale=200.0)
    check(*both(), arrays)
    check_gradients(*both(), arrays)


def test_packed_sequences_are_separate_ones() -> None:
    *arrays, state = problem(21, batch=1)
    check_packed(partial(rg_lru, **BLOCKS), arrays, state, 2e-6)


def test_steps_of_decoding_are_one_call_and_blocks_change_rounding_alone() -> None:
    *arrays, state = problem(5)
    check_decoding(rg_lru, arrays, state, 2e-6)


def test_under_vmap_and_checkpoint() -> None:
    x, of_input, of_recurrence, a_param, state = problem(9)

    def loss(x: Any, state: Any, function: Any) -> Any:
        return jnp.sin(function(x[None], of_input[:1], of_recurrence[:1], a_param, state[None])[0]).sum()

    ours, theirs = (
        jax.jit(jax.vmap(jax.grad(jax.checkpoint(partial(loss, function=f)), argnums=(0, 1))))(x, state)
        for f in (partial(rg_lru, **BLOCKS), reference)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    ours, definition = (partial(function, **case.keywords) for function in (rg_lru, reference))
    check(ours, definition, case.arrays(jax.random.key(0), dtype))


@pytest.mark.one_backend
def test_the_backward_pass_has_the_states_of_chunks_and_nothing_else_as_large() -> None:
    traced = rg_lru_forward.trace(*problem(64), None, block_t=16, block_c=12)
    states, backward = traced.gradient().backward
    (saved,) = states.ir.outputs
    assert np.prod(saved.ref.shape) == 2 * 4 * 12
    assert len(backward.ir.outputs) == 5


@pytest.mark.one_backend
def test_no_tokens() -> None:
    *arrays, state = problem(0)
    out, last = rg_lru(*arrays, state)
    assert out.shape == arrays[0].shape
    np.testing.assert_array_equal(last, state)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 9, 12), jnp.int32)}, "x = int32[2, 9, 12]"),
        ({1: jnp.zeros((2, 9, 11))}, "input_gate = float32[2, 9, 11]"),
        ({2: jnp.zeros((2, 9))}, "recurrence_gate = float32[2, 9]"),
        ({3: jnp.zeros((2, 12))}, "a_param = float32[2, 12]"),
        ({4: jnp.zeros((2, 1, 12))}, "initial_state = float32[2, 1, 12]"),
        ({5: jnp.zeros((2, 9))}, "segment_ids = float32[2, 9]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    *arrays, ids = [change.get(n, x) for n, x in enumerate([*problem(9), None])]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        rg_lru(*arrays, segment_ids=ids)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize("c", [0, -8.0, float("nan"), float("inf"), "8"])
def test_a_constant_that_makes_no_decays(c: Any) -> None:
    with pytest.raises(ArgumentError, match="exponent = "):
        rg_lru(*problem(9), exponent=c)
