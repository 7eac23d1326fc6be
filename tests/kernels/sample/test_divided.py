"""The steps of a device with a part of the vocabulary, its results merged without a mesh; programs of other targets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernels.sample.test_hidden import SCALE, logits_of, operands
from tests.kernels.sample.test_kernel import KEY, assert_best_agree, words_of
from tilekern.kernels.sample import sample
from tilekern.kernels.sample.arguments import Penalties
from tilekern.kernels.sample.best_of_parts import best_of_parts, best_tokens, merged
from tilekern.kernels.sample.checks import rates_of_rows
from tilekern.kernels.sample.divided import CANDIDATES, largest_tokens, penalized_products
from tilekern.kernels.sample.part_candidates import tokens_of_candidates
from tilekern.kernels.sample.product import Form, Operands


def halves(hidden: Any, weight: Any, stop: int | None = None) -> list[Operands]:
    """The operands of two devices, of which each has half of the tokens; `stop` of them all are no padding."""
    words = weight.shape[1] // 2
    firsts = [np.int32([0]), np.int32([words])]
    return [
        Operands(hidden, weight[:, int(f[0]) :][:, :words], first=f, stop=None if stop is None else np.int32(stop) - f)
        for f in firsts
    ]


@pytest.mark.parametrize("stop", [None, 200, 70])
def test_scores_of_parts_of_a_vocabulary(stop: int | None) -> None:
    """Padding is NaN, and more tokens than one half has."""
    hidden, weight = operands(5, 19, 264)
    expected = sample(logits_of(hidden, weight[:, :stop]), KEY)
    weight[:, stop or 264 :] = np.nan
    scale = np.full(5, SCALE)
    results = [best_tokens(half, words_of(5), scale, None, form=Form()) for half in halves(hidden, weight, stop)]
    best, tokens, second = (jnp.stack(part) for part in zip(*results, strict=True))
    np.testing.assert_array_equal(merged(best, tokens, second, scale), expected)


def test_candidates_of_parts_of_a_vocabulary() -> None:
    hidden, weight = operands(6, 19, 1400)
    rates = rates_of_rows("", (6,), 1400, 1.0, 9, 0.9, None)
    tokens, logits, dropped = zip(
        *(largest_tokens(half, None, form=Form()) for half in halves(hidden, weight)), strict=True
    )
    assert all(part.shape == (6, CANDIDATES) for part in (*tokens, *logits))
    x = logits_of(hidden, weight)
    for part, numbers, most, first in zip(logits, tokens, dropped, (0, 700), strict=True):
        np.testing.assert_array_equal(part, np.take_along_axis(x, np.asarray(numbers), axis=1))
        # No other token of the half is above `dropped`, and candidates are in falling order.
        others = x[:, first : first + 700].copy()
        np.put_along_axis(others, np.asarray(numbers) - first, -np.inf, axis=1)
        bound = np.where(most < 0, most ^ 0x7FFFFFFF, most).astype(np.int32).view(np.float32)
        assert (others.max(axis=1) <= bound).all()
    found = tokens_of_candidates(
        jnp.concatenate(logits, axis=1), jnp.concatenate(tokens, axis=1), jnp.maximum(*dropped), words_of(6), rates
    )
    expected, certain = sample(x, KEY, top_k=9, top_p=0.9), np.asarray(found) >= 0
    np.testing.assert_array_equal(np.asarray(found)[certain], np.asarray(expected)[certain])
    assert certain.any()


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e", "tpu:v6e"])
def test_parts_on_other_targets(target: str) -> None:
    """The program for a target, interpreted: tokens by their numbers in the whole vocabulary, and no padding."""
    hidden, weight = operands(5, 19, 512, "bfloat16")
    scale = np.full(5, SCALE)
    results: list[Any] = []
    for half in halves(jnp.asarray(hidden), jnp.asarray(weight), 400):
        inputs: Any = half, words_of(5), scale, None
        traced = best_of_parts.trace(*inputs, form=Form(), parts=2, block_b=16, block_v=128, block_d=16)
        best, tokens, second = traced.lower(target).interpret(*inputs)
        results.append((best, tokens + half.first, second))
    whole = (np.concatenate(part) for part in zip(*results, strict=True))
    np.testing.assert_array_equal(
        merged(*map(jnp.asarray, whole), scale), sample(logits_of(hidden, weight[:, :400]), KEY)
    )


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:llvm", "cuda:sm_90", "tpu:v6e"])
def test_logits_in_memory(target: str) -> None:
    """Behind their penalties; -inf for padding."""
    hidden, weight = operands(5, 19, 256)
    half = halves(hidden, weight, 160)[1]
    counts = np.arange(5 * 128, dtype=np.int32).reshape(5, 128) % 3
    presence = np.float32([0.5, 1, -2, 0, 4])
    penalties = Penalties(counts, presence=presence)
    traced = penalized_products.trace(half, penalties, form=Form(2.0), block_b=16, block_v=128, block_d=16)
    found = traced.lower(target).interpret(half, penalties) if target != "cpu:llvm" else None
    found = penalized_products(half, penalties, form=Form(2.0)) if found is None else found
    x = 2 * np.tanh(logits_of(hidden, weight)[:, 128:] / 2) - presence[:, None] * (counts > 0)
    np.testing.assert_allclose(np.asarray(found)[:, :32], x[:, :32], rtol=1e-5, atol=1e-5)
    assert (np.asarray(found)[:, 32:] == -np.inf).all()


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    hidden, weight = operands(5, 19, 166)
    half = halves(hidden, weight, 120)[1]
    inputs: Any = half, words_of(5), np.full(5, SCALE), None
    blocks: Any = {"form": Form(), "block_b": 4, "block_v": 16, "block_d": 8}
    traced = best_of_parts.trace(*inputs, **blocks, parts=3)
    assert_best_agree(tk.interpret(traced)(*inputs), best_of_parts(*inputs, **blocks, parts=3))
    logits = penalized_products.trace(half, None, **blocks)
    np.testing.assert_array_equal(tk.interpret(logits)(half, None), penalized_products(half, None, **blocks))
