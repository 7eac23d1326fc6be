"""Drafts of speculative decoding: which are accepted, and that the tokens are draws from the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sample.test_kernel import COUNTS, KEY, X, chi_squared, logits
from tilekern.errors import ArgumentError
from tilekern.kernels.sample import sample, verify_drafts


def test_greedy_drafts_are_accepted_up_to_the_first_other_token() -> None:
    x = logits(4, 30, seed=3).reshape(1, 4, 30)
    best = x.argmax(axis=2)
    for wrong in range(4):
        drafts = best[:, :3].copy()
        if wrong < 3:
            drafts[0, wrong] = (best[0, wrong] + 1) % 30
        tokens, lens = verify_drafts(x, drafts, KEY, temperature=0.0)
        assert lens.tolist() == [wrong + 1]
        assert tokens.tolist() == [[*best[0, : wrong + 1].tolist(), *[-1] * (3 - wrong)]]


def test_lens_of_drafts_and_tokens_outside_of_the_vocabulary() -> None:
    x = logits(4, 30, seed=3).reshape(1, 4, 30)
    best = x.argmax(axis=2)
    tokens, lens = verify_drafts(x, best[:, :3], KEY, draft_lens=np.array([1]), temperature=0.0)
    assert lens.tolist() == [2] and tokens.tolist() == [[*best[0, :2].tolist(), -1, -1]]
    tokens, lens = verify_drafts(x, np.array([[-1, 99, 0]]), KEY, temperature=0.0)
    assert lens.tolist() == [1] and tokens[0, 0] == best[0, 0]
    tokens, lens = verify_drafts(x[:, :1], best[:, :0], KEY, temperature=0.0)
    assert lens.tolist() == [1] and tokens.tolist() == [[best[0, 0]]]


@pytest.mark.one_backend
@pytest.mark.parametrize("is_certain", [False, True])
def test_tokens_of_drafts_are_draws_from_the_model(is_certain: bool) -> None:
    """χ² of the first token, and of the second where the first draft was accepted, over 200,000 rows."""
    random, rows = np.random.default_rng(0), 200_000
    p, q = random.dirichlet(np.ones(6), (2, 3)).astype(np.float32)
    x = jnp.broadcast_to(jnp.log(p), (rows, 3, 6))
    of_drafts = jnp.broadcast_to(jnp.log(q[:2]), (rows, 2, 6))
    drafts = sample(of_drafts, jax.random.key(1)) if not is_certain else jnp.full((rows, 2), 4)
    tokens, lens = verify_drafts(x, drafts, jax.random.key(2), None if is_certain else of_drafts)
    tokens, lens = np.asarray(tokens), np.asarray(lens)
    assert chi_squared(np.bincount(tokens[:, 0], minlength=6), rows * p[0]) < 5
    second = tokens[lens >= 2, 1]
    assert chi_squared(np.bincount(second, minlength=6), second.size * p[1]) < 5
    rate = p[0, 4] if is_certain else np.minimum(p[0], q[0]).sum()
    assert abs((lens >= 2).mean() - rate) < 5 * np.sqrt(0.25 / rows)


def test_equal_distributions_accept_all_drafts() -> None:
    x = logits(10, 40).reshape(2, 5, 40)
    drafts = sample(x[:, :4], jax.random.key(4), top_p=0.9)
    tokens, lens = verify_drafts(x, drafts, KEY, x[:, :4])
    assert lens.tolist() == [5, 5] and (tokens[:, :4] == drafts).all()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "arrays",
    [
        (X, COUNTS, KEY),
        (jnp.ones((2, 4, 5)), jnp.ones((2, 4), int), KEY),
        (jnp.ones((2, 4, 5)), jnp.ones((2, 3)), KEY),
        (jnp.ones((2, 4, 5)), jnp.ones((2, 3), int), KEY, jnp.ones((2, 4, 5))),
        (jnp.ones((2, 4, 5)), jnp.ones((2, 3), int), KEY, None, jnp.ones(3, int)),
    ],
)
def test_wrong_calls_of_drafts(arrays: Any) -> None:
    with pytest.raises(ArgumentError, match="the arrays of verify_drafts do not fit"):
        verify_drafts(*arrays)
