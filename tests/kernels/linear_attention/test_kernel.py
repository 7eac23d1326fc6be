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
from tilekern.kernels.linear_attention import linear_attention, reference
from tilekern.kernels.linear_attention.cases import CASES, Case
from tilekern.kernels.linear_attention.kernel import linear_attention_forward
from tilekern.testing import assert_close, in_float64

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_t": 16, "block_v": 8}, {"block_t": 7}, {"block_t": 1})


def problem(tokens: int, dtype: Any = "float32", *, seed: int = 0, decay: float = 0.3, batch: int = 2) -> list[Any]:
    """Query, key and value of two groups and four heads, log decays, and a state."""
    random = np.random.default_rng(seed)
    shapes = [(batch, tokens, 2, 8), (batch, tokens, 2, 8), (batch, tokens, 4, 12)]
    arrays = [random.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]
    decays = -decay * random.exponential(size=(batch, tokens, 4)).astype(np.float32)
    return [*arrays, decays, random.standard_normal((batch, 4, 8, 12)).astype(np.float32)]


def check_call(arrays: Any, **keywords: Any) -> None:
    """Compare a call with the definition."""
    ids = keywords.get("segment_ids")
    check(partial(linear_attention, **keywords), partial(reference, segment_ids=ids), arrays)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("blocks", BLOCKS[:2])
def test_floats(dtype: str, blocks: dict[str, int]) -> None:
    check_call(problem(37, dtype), **blocks)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_any_length_and_chunk(tokens: int) -> None:
    for blocks in BLOCKS[1:]:
        check_call(problem(tokens), **blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_gradients(dtype: str, tokens: int) -> None:
    check_gradients(partial(linear_attention, block_t=16, block_v=8), reference, problem(tokens, dtype))


def test_constant_decays_of_heads_without_a_state() -> None:
    query, key, value, _, _ = problem(20)
    decays = np.log1p(-np.exp2(-5.0 - np.arange(4))).astype(np.float32)
    check_call([query, key, value, decays], block_t=8)
    check_gradients(partial(linear_attention, block_t=8), reference, [query, key, value, decays])


@pytest.mark.parametrize("decay", [0.0, 30.0])
def test_no_decay_and_strong_decay(decay: float) -> None:
    check_call(problem(33, decay=decay), block_t=16)


def test_the_state_continues_the_sequence() -> None:
    query, key, value, decays, state = problem(33)
    whole = linear_attention(query, key, value, decays, state, block_t=8)
    parts = []
    for part in (slice(0, 13), slice(13, 14), slice(14, 33)):
        out, state = linear_attention(query[:, part], key[:, part], value[:, part], decays[:, part], state, block_t=8)
        parts.append(out)
    oracle = in_float64(reference, *problem(33))
    assert_close(jnp.concatenate(parts, 1), oracle[0], whole[0], length=41)
    assert_close(state, oracle[1], whole[1], length=41)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_t", [8, 5, 64])
def test_packed_sequences(block_t: int, dtype: str) -> None:
    check_call(problem(41, dtype), segment_ids=packed(41), block_t=block_t)


def test_packed_sequences_are_separate_ones() -> None:
    *arrays, state = problem(41, batch=1)
    ids = packed(41, batch=1)
    out, last = linear_attention(*arrays, state, segment_ids=ids, block_t=8)
    for start, stop in runs(41):
        of_run = [x[:, start:stop] for x in arrays]
        alone, last_alone = linear_attention(*of_run, state if start == 0 else None, block_t=8)
        np.testing.assert_allclose(out[:, start:stop], alone, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(last, last_alone, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tokens", [17, 41])
def test_gradients_of_packed_sequences(tokens: int) -> None:
    ids = packed(tokens)
    ours = partial(linear_attention, block_t=8, segment_ids=ids)
    check_gradients(ours, partial(reference, segment_ids=ids), problem(tokens))


def test_under_vmap() -> None:
    *arrays, state = problem(19, batch=3)
    stacked = [x[:, None] for x in (*arrays, state)]
    found = jax.vmap(partial(linear_attention, block_t=8))(*stacked)
    for out, alone in zip(found, linear_attention(*arrays, state, block_t=8), strict=True):
        np.testing.assert_allclose(out[:, 0], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_layers_in_a_scan_with_checkpoints(policy: str) -> None:
    query, key, value, decays, _ = problem(21)

    def layers(function: Any, query: Any, key: Any, value: Any, decays: Any, **keywords: Any) -> Any:
        kept = jax.checkpoint(
            lambda v, scale: (jnp.tanh(function(query, key, v * scale, decays, **keywords)[0]), None),
            policy=getattr(jax.checkpoint_policies, policy),
        )
        return (jax.lax.scan(kept, value, jnp.ones(2, value.dtype))[0],)

    ours = partial(layers, partial(linear_attention, block_t=8))
    check_gradients(ours, partial(layers, reference), [query, key, value, decays])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    check_call(case.arrays(jax.random.key(0), dtype))


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    out, state = jax.eval_shape(linear_attention, *arrays)
    assert out == arrays[2]
    assert state.shape == (case.batch, case.heads, case.depth, case.width)


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    arrays = problem(19, batch=1)
    ids = packed(19, batch=1)
    traced = linear_attention_forward.trace(*arrays, ids, block_t=8, block_v=8)
    check(lambda *a: tk.interpret(traced)(*a, ids), partial(reference, segment_ids=ids), arrays)


@pytest.mark.one_backend
def test_the_backward_pass_has_the_states_of_chunks_and_nothing_else_as_large() -> None:
    traced = linear_attention_forward.trace(*problem(64), None, block_t=16, block_v=12)
    states, backward = traced.gradient().backward
    (saved,) = states.ir.outputs
    assert np.prod(saved.ref.shape) == 2 * 4 * 4 * 8 * 12
    assert len(backward.ir.outputs) == 5


@pytest.mark.one_backend
def test_no_tokens() -> None:
    query, key, value, decays, state = problem(0)
    out, last = linear_attention(query, key, value, decays, state)
    assert out.shape == value.shape
    np.testing.assert_array_equal(last, state)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 9, 2, 8), jnp.int32)}, "query = int32[2, 9, 2, 8]"),
        ({0: jnp.zeros((2, 9, 2, 8), jnp.bfloat16)}, "query = bfloat16[2, 9, 2, 8]"),
        ({1: jnp.zeros((2, 9, 2, 7))}, "key = float32[2, 9, 2, 7]"),
        ({2: jnp.zeros((2, 9, 3, 12))}, "value = float32[2, 9, 3, 12]"),
        ({3: jnp.zeros((2, 4, 9))}, "log_decay = float32[2, 4, 9]"),
        ({3: jnp.zeros(2)}, "log_decay = float32[2]"),
        ({4: jnp.zeros((2, 4, 12, 8))}, "initial_state = float32[2, 4, 12, 8]"),
        ({5: jnp.zeros((2, 8), jnp.int32)}, "segment_ids = int32[2, 8]"),
        ({5: jnp.zeros((2, 9))}, "segment_ids = float32[2, 9]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    *arrays, ids = [change.get(n, x) for n, x in enumerate([*problem(9), None])]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        linear_attention(*arrays, segment_ids=ids)  # here
    assert "# here" in caught.value.loc.snippet()
