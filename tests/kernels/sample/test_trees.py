"""Trees of drafts: which path is accepted, by a walk in NumPy, and that the tokens are draws from the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernels.sample.test_kernel import KEY, chi_squared, logits, words_of
from tilekern.errors import ArgumentError
from tilekern.kernels.sample import sample, verify_draft_tree, verify_drafts

TREE = np.array([-1, -1, -1, 0, 0, 1, 5])  # three children of the root; two of node 0; a chain of two behind node 1
CHAIN = np.arange(4) - 1


def walk(
    p: np.ndarray, drafts: np.ndarray, parents: np.ndarray, q: np.ndarray | None, uniform: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """The accepted nodes of one row, from p[N + 1, V] and q[N, V] in float64, and what the last token is drawn from."""
    node, nodes, residual = -1, list[int](), p[0]
    while True:
        for child in np.flatnonzero(parents == node):
            of_child = np.eye(p.shape[1])[drafts[child]] if q is None else q[child]
            if uniform[child] * of_child[drafts[child]] < residual[drafts[child]]:
                node, residual = int(child), p[child + 1]
                nodes.append(node)
                break
            left = np.maximum(residual - of_child, 0)
            residual = left / left.sum() if left.sum() > 0 else residual
        else:
            return nodes, residual


@pytest.mark.one_backend
@pytest.mark.parametrize("is_certain", [False, True])
def test_paths_are_those_of_a_walk(is_certain: bool) -> None:
    """Of random trees, each row with its own."""
    rows, nodes, words = 60, 9, 5
    random = np.random.default_rng(1)
    parents = np.stack([[random.integers(-1, min(n, 3)) if n else -1 for n in range(nodes)] for _ in range(rows)])
    x, y = random.normal(0, 1.5, (rows, nodes + 1, words)), random.normal(0, 1, (rows, nodes, words))
    drafts = random.integers(0, words, (rows, nodes))
    p, q = (np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True) for z in (x, y))
    found = verify_draft_tree(x.astype(np.float32), drafts, parents, KEY, None if is_certain else y.astype(np.float32))
    tokens, lens, path = map(np.asarray, found)
    places = np.arange(nodes, dtype=np.uint32) + np.uint32(1 << 31)
    lengths = set[int]()
    for n, key in enumerate(words_of(rows)):
        uniform = (np.asarray(tk.random_bits(key, places)) >> 8) * 2.0**-24
        accepted, residual = walk(p[n], drafts[n], parents[n], None if is_certain else q[n], uniform)
        k = len(accepted)
        lengths.add(k)
        assert lens[n] == k + 1 and path[n].tolist() == accepted + [-1] * (nodes - k)
        assert tokens[n, :k].tolist() == drafts[n, accepted].tolist() and residual[tokens[n, k]] > 0
        assert (tokens[n, k + 1 :] == -1).all()
    assert len(lengths) > 2


@pytest.mark.parametrize("is_certain", [False, True])
def test_a_chain_is_verified_as_by_verify_drafts(is_certain: bool) -> None:
    x = logits(40, 30, seed=5).reshape(8, 5, 30)
    drafts = np.asarray(sample(x[:, :4], jax.random.key(4), temperature=1.5))
    lens, of_drafts = np.arange(8) % 5, None if is_certain else x[:, :4] / 1.5
    for rate in ({}, {"temperature": 0.0}, {"top_k": 9}):
        tokens, count = verify_drafts(x, drafts, KEY, of_drafts, lens, **rate)
        of_tree = verify_draft_tree(x, drafts, CHAIN, KEY, of_drafts, lens, **rate)
        np.testing.assert_array_equal(of_tree[0], tokens)
        np.testing.assert_array_equal(of_tree[1], count)
        np.testing.assert_array_equal(of_tree[2], np.where(np.arange(4) < count[:, None] - 1, np.arange(4), -1))


def test_greedy_trees_follow_the_most_likely_tokens() -> None:
    x = logits(8, 30, seed=3).reshape(1, 8, 30)
    best = x[0].argmax(axis=1)
    drafts = np.full((1, 7), -1)
    drafts[0, [1, 5]] = best[0], best[2]  # a token outside of the vocabulary is never accepted
    tokens, lens, nodes = verify_draft_tree(x, drafts, TREE, KEY, temperature=0.0)
    assert nodes.tolist() == [[1, 5, -1, -1, -1, -1, -1]] and lens.tolist() == [3]
    assert tokens[0, :4].tolist() == [best[0], best[2], best[6], -1]
    _, lens, _ = verify_draft_tree(x, drafts, TREE, KEY, draft_lens=np.array([5]), temperature=0.0)
    assert lens.tolist() == [2]
    tokens, lens, nodes = verify_draft_tree(x[:, :1], drafts[:, :0], TREE[:0], KEY, temperature=0.0)
    assert tokens.tolist() == [[best[0]]] and lens.tolist() == [1] and nodes.shape == (1, 0)
    assert [a.shape for a in verify_draft_tree(x[:0], drafts[:0], TREE, KEY)] == [(0, 8), (0,), (0, 7)]


@pytest.mark.one_backend
@pytest.mark.parametrize("is_certain", [False, True])
def test_tokens_of_trees_are_draws_from_the_model(is_certain: bool) -> None:
    """χ² of the first, second and third token, over 200,000 rows; siblings are draws of one q, or differ."""
    random, rows = np.random.default_rng(0), 200_000
    p, q = random.dirichlet(np.full(6, 4), (2, 4)).astype(np.float32)
    depth = np.array([0, 1, 1, 1, 2, 2, 2, 3])  # of the root, and of each node
    x = jnp.broadcast_to(jnp.log(p[depth]), (rows, 8, 6))
    of_drafts = jnp.broadcast_to(jnp.log(q[depth[1:] - 1]), (rows, 7, 6))
    certain = jnp.broadcast_to(jnp.array([0, 3, 5, 1, 2, 4, 0]), (rows, 7))
    drafts = certain if is_certain else sample(of_drafts, jax.random.key(1))
    tokens, lens, _ = map(
        np.asarray, verify_draft_tree(x, drafts, TREE, jax.random.key(2), None if is_certain else of_drafts)
    )
    for place in range(3):
        drawn = tokens[lens > place, place]
        assert drawn.size > 3000
        assert chi_squared(np.bincount(drawn, minlength=6), drawn.size * p[place].astype(np.float64)) < 5
    chain = np.asarray(
        verify_drafts(x[:, :2], drafts[:, :1], jax.random.key(2), None if is_certain else of_drafts[:, :1])[1]
    )
    assert (lens >= 2).mean() > (chain >= 2).mean()  # more children, more accepted drafts


@pytest.mark.one_backend
def test_vmap_jit_and_export() -> None:
    x = logits(24, 11).reshape(3, 8, 11)
    drafts, keys = np.argsort(-x[:, 1:], axis=2)[:, :, 0], jax.random.split(jax.random.key(1), 3)
    whole = verify_draft_tree(x, drafts, TREE, keys)
    alone = jax.vmap(lambda a, d, k: verify_draft_tree(a[None], d[None], jnp.asarray(TREE), k[None]))(x, drafts, keys)
    exported = jax.export.export(jax.jit(verify_draft_tree))(x, drafts, TREE, keys)
    again = jax.export.deserialize(exported.serialize()).call(x, drafts, TREE, keys)
    for a, b, c in zip(whole, alone, again, strict=True):
        np.testing.assert_array_equal(a, b.reshape(a.shape))
        np.testing.assert_array_equal(a, c)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("keywords", "summary"),
    [
        ({"logits": jnp.ones((2, 7, 5))}, "the arrays of verify_draft_tree do not fit"),
        ({"draft_logits": jnp.ones((2, 7, 4))}, "the arrays of verify_draft_tree do not fit"),
        ({"parents": TREE[:6]}, "verify_draft_tree cannot take this parents"),
        ({"parents": TREE + 1}, "verify_draft_tree cannot take this parents"),
        ({"parents": TREE.astype(float)}, "verify_draft_tree cannot take this parents"),
    ],
)
def test_wrong_calls(keywords: dict[str, Any], summary: str) -> None:
    call: Any = {"logits": jnp.ones((2, 8, 5)), "draft_tokens": jnp.ones((2, 7), int), "parents": TREE, "key": KEY}
    with pytest.raises(ArgumentError, match=summary) as error:
        verify_draft_tree(**call | keywords)  # here
    assert error.value.fix and error.value.got and "# here" in error.value.loc.snippet()
