import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernels.recurrences import check, check_gradients, packed
from tilekern.errors import ArgumentError
from tilekern.kernels.gated_delta_rule import gated_delta_rule, reference
from tilekern.kernels.gated_delta_rule.cases import CASES, Case
from tilekern.kernels.gated_delta_rule.channels import delta_rule_by_channel
from tilekern.kernels.gated_delta_rule.inverse import unit_lower_inverse, unit_lower_inverses
from tilekern.kernels.gated_delta_rule.kernel import gated_delta_rule_forward
from tilekern.testing import assert_close, in_float64

FLOATS = ("float32", "bfloat16", "float16", "float64")


def problem(tokens: int, dtype: Any = "float32", *, batch: int = 2, alike: float = 0.0) -> list[Any]:
    """Query, unit keys and value of two groups and four heads, beta, log decays, and a state.

    Keys are alike by a share of their length.
    """
    random = np.random.default_rng(0)
    query, key = random.standard_normal((2, batch, tokens, 2, 8))
    key = key * (1 - alike) + alike
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.standard_normal((batch, tokens, 4, 12))
    beta = random.uniform(0, 1, (batch, tokens, 4)).astype(np.float32)
    decays = -0.3 * random.exponential(size=(batch, tokens, 4)).astype(np.float32)
    state = random.standard_normal((batch, 4, 8, 12)).astype(np.float32)
    return [*(x.astype(jnp.dtype(dtype)) for x in (query, key, value)), beta, decays, state]


def by_channel(arrays: list[Any], *, strong: bool = False) -> list[Any]:
    """The problem with decays of channels, of which some are as good as 0 if `strong`."""
    random = np.random.default_rng(1)
    shape = (*arrays[4].shape, arrays[0].shape[3])
    decays = -(random.exponential(size=shape) ** 4 * 20 if strong else 0.3 * random.exponential(size=shape))
    return [*arrays[:4], decays.astype(np.float32), *arrays[5:]]


def check_call(arrays: Any, **keywords: Any) -> None:
    """Compare a call with the definition."""
    ids = keywords.get("segment_ids")
    check(partial(gated_delta_rule, **keywords), partial(reference, segment_ids=ids), arrays)


def check_call_of(arrays: Any, ids: Any = None, **blocks: int) -> None:
    """Compare a call of the kernel with these blocks with the definition."""
    check(lambda *a: gated_delta_rule_forward(*a, ids, **blocks), partial(reference, segment_ids=ids), arrays)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("blocks", [{}, {"block_t": 16, "block_v": 8}])
def test_floats(dtype: str, blocks: dict[str, int]) -> None:
    check_call(problem(37, dtype), **blocks)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("blocks", [{}, {"block_t": 16, "block_v": 8}, {"block_t": 7}])
def test_decays_of_channels(dtype: str, blocks: dict[str, int]) -> None:
    check_call(by_channel(problem(37, dtype)), **blocks)


@pytest.mark.parametrize("block_t", [1, 16, 64])
def test_strong_decays_of_channels(block_t: int) -> None:
    """The exponential of a difference of their sums would overflow, or lose its digits."""
    check_call(by_channel(problem(64), strong=True), block_t=block_t)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_decays_of_channels(dtype: str) -> None:
    arrays = by_channel(problem(17, dtype))
    check_gradients(partial(gated_delta_rule, block_t=16, block_v=8), reference, arrays)


@pytest.mark.slow
def test_packed_sequences_with_decays_of_channels() -> None:
    arrays, ids = by_channel(problem(25), strong=True), packed(25)
    check_call(arrays, segment_ids=ids, block_t=8)
    ours = partial(gated_delta_rule, block_t=8, segment_ids=ids)
    check_gradients(ours, partial(reference, segment_ids=ids), by_channel(problem(25)))


@pytest.mark.one_backend
def test_equal_decays_of_channels_are_a_decay_of_the_head() -> None:
    arrays = problem(37)
    alike = [*arrays[:4], np.repeat(arrays[4][..., None], 8, axis=-1), arrays[5]]
    for found, expected in zip(gated_delta_rule(*alike), gated_delta_rule(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_any_length_and_chunk(tokens: int) -> None:
    for block_t in (16, 7, 1):
        check_call(problem(tokens), block_t=block_t)


@pytest.mark.parametrize("block_t", [16, 64])
def test_keys_that_are_nearly_the_same(block_t: int) -> None:
    """A power series of the chunk's matrix would lose all digits."""
    arrays = problem(64, alike=0.99)
    arrays[3], arrays[4] = np.ones_like(arrays[3]), np.zeros_like(arrays[4])
    check_call(arrays, block_t=block_t)


def test_without_decays_and_without_a_state() -> None:
    check_call(problem(20)[:4], block_t=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_gradients(dtype: str, tokens: int) -> None:
    check_gradients(partial(gated_delta_rule, block_t=16, block_v=8), reference, problem(tokens, dtype))


@pytest.mark.parametrize("block_t", [8, 5])
def test_packed_sequences(block_t: int) -> None:
    check_call(problem(41), segment_ids=packed(41), block_t=block_t)


def test_gradients_of_packed_sequences() -> None:
    ids = packed(25)
    ours = partial(gated_delta_rule, block_t=8, segment_ids=ids)
    check_gradients(ours, partial(reference, segment_ids=ids), problem(25))


def test_steps_of_one_token_continue_the_sequence() -> None:
    """Decoding."""
    *arrays, state = problem(19)
    oracle = in_float64(reference, *arrays, state)
    whole = gated_delta_rule(*arrays, state, block_t=8)
    parts = []
    for start, stop in ((0, 16), (16, 17), (17, 18), (18, 19)):
        out, state = gated_delta_rule(*(x[:, start:stop] for x in arrays), state)
        parts.append(out)
    assert_close(jnp.concatenate(parts, 1), oracle[0], whole[0], length=27)
    assert_close(state, oracle[1], whole[1], length=27)


def test_under_vmap() -> None:
    arrays = problem(19, batch=3)
    found = jax.vmap(partial(gated_delta_rule, block_t=8))(*(x[:, None] for x in arrays))
    for out, alone in zip(found, gated_delta_rule(*arrays, block_t=8), strict=True):
        np.testing.assert_allclose(out[:, 0], alone, rtol=2e-6, atol=2e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_the_inverse_of_a_chunk(size: int) -> None:
    @tk.kernel(out_type=lambda x: x)
    def inverse(x, out):
        tk.parallel(1)
        out[:, :] = unit_lower_inverse(x[:, :])

    a = np.tril(np.random.default_rng(0).integers(-2, 3, (size, size)), -1).astype(np.float32)
    np.testing.assert_array_equal(inverse(a) @ (np.eye(size) + a), np.eye(size))


@pytest.mark.one_backend
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_the_inverses_of_a_stack(size: int, in_parts: bool) -> None:
    @tk.kernel(out_type=lambda x: x)
    def inverses(x, out):
        tk.parallel(1)
        out[:, :, :] = unit_lower_inverses(x[:, :, :], in_parts)

    a = np.tril(np.random.default_rng(0).uniform(-0.5, 0.5, (3, size, size)), -1).astype(np.float32)
    found, exact = inverses(a), np.linalg.inv(np.eye(size) + a.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=0, atol=(2.0**-14 if in_parts else 2.0**-20) * np.abs(exact).max())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [2, 4])
def test_programs_of_several_heads(dtype: str, heads: int) -> None:
    check_call_of(problem(37, dtype), heads=heads, block_t=16, block_v=12)


@pytest.mark.parametrize("alike", [0.5, 0.99])
def test_keys_that_are_alike_in_programs_of_several_heads(alike: float) -> None:
    for dtype in ("float32", "bfloat16"):
        check_call_of(problem(64, dtype, alike=alike), heads=4, block_t=64, block_v=12)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decays_of_channels_in_programs_of_several_heads(dtype: str, strong: bool) -> None:
    ours = partial(delta_rule_by_channel, heads=4, block_t=16, block_v=12)
    check(lambda *a: ours(*a, None), reference, by_channel(problem(37, dtype), strong=strong))


@pytest.mark.slow
def test_gradients_of_decays_of_channels_in_programs_of_several_heads() -> None:
    ids = packed(25)
    ours = partial(delta_rule_by_channel, heads=2, block_t=8, block_v=12)
    arrays, expected = by_channel(problem(25)), partial(reference, segment_ids=ids)
    check(lambda *a: ours(*a, ids), expected, arrays)
    check_gradients(lambda *a: ours(*a, ids), expected, arrays)


def test_packed_sequences_in_programs_of_several_heads() -> None:
    check_call_of(problem(41), packed(41), heads=4, block_t=8, block_v=12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_programs_of_several_heads(dtype: str) -> None:
    ours = partial(gated_delta_rule_forward, heads=2, block_t=16, block_v=12)
    check_gradients(lambda *a: ours(*a, None), reference, problem(17, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    check_call(case.arrays(jax.random.key(0), dtype))


@pytest.mark.one_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    arrays = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    out, state = jax.eval_shape(gated_delta_rule, *arrays)
    assert out == arrays[2]
    assert state.shape == (case.batch, case.heads, case.depth, case.width)


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    arrays = problem(19, batch=1)
    ids = packed(19, batch=1)
    traced = gated_delta_rule_forward.trace(*arrays, ids, block_t=8, block_v=8)
    check(lambda *a: tk.interpret(traced)(*a, ids), partial(reference, segment_ids=ids), arrays)


@pytest.mark.one_backend
def test_no_tokens() -> None:
    *arrays, state = problem(0)
    out, last = gated_delta_rule(*arrays, state)
    assert out.shape == arrays[2].shape
    np.testing.assert_array_equal(last, state)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 9, 2, 8), jnp.int32)}, "query = int32[2, 9, 2, 8]"),
        ({1: jnp.zeros((2, 9, 2, 7))}, "key = float32[2, 9, 2, 7]"),
        ({2: jnp.zeros((2, 9, 3, 12))}, "value = float32[2, 9, 3, 12]"),
        ({3: jnp.zeros((2, 9))}, "beta = float32[2, 9]"),
        ({4: jnp.zeros(4)}, "log_decay = float32[4]"),
        ({4: jnp.zeros((2, 9, 4, 12))}, "log_decay = float32[2, 9, 4, 12]"),
        ({5: jnp.zeros((2, 4, 12, 8))}, "initial_state = float32[2, 4, 12, 8]"),
        ({6: jnp.zeros((2, 9))}, "segment_ids = float32[2, 9]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    *arrays, ids = [change.get(n, x) for n, x in enumerate([*problem(9), None])]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        gated_delta_rule(*arrays, segment_ids=ids)  # here
    assert "# here" in caught.value.loc.snippet()
