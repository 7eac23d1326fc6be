"""The server loop of `examples/generate.py`: the tokens of a plain loop, whatever runs beside a sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.generate import Server, Settings, excerpts, plain, restored
from examples.llama import Model
from examples.train import Config, init

CONFIG = Config(layers=2, width=64, heads=4, kv_heads=2, hidden=64)
MODEL, WEIGHTS = Model.of(CONFIG), init(CONFIG)
PROMPTS = [prompt[:n] for prompt, n in zip(excerpts(5), (1, 7, 33, 12, 20), strict=True)]
SETTINGS = Settings(new=12, slots=2, page=8, pages=16, chunk=8)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_greedy_tokens_are_those_of_a_plain_loop(drafts: int) -> None:
    """More prompts than slots, and prompts longer than a chunk; the last page of a sequence is filled in part."""
    server = Server(MODEL, WEIGHTS, replace(SETTINGS, drafts=drafts))
    expected = plain(MODEL, WEIGHTS, PROMPTS, SETTINGS.new).tokens
    result = server.run(PROMPTS)
    assert result.tokens == expected
    assert 0 <= result.accepted <= result.guessed <= drafts * SETTINGS.new * len(PROMPTS)
    assert server.run(PROMPTS[:3]).tokens == expected[:3]  # pages were given back


def test_a_model_that_guesses_with_all_of_its_layers_accepts_every_draft() -> None:
    server = Server(MODEL, WEIGHTS, replace(SETTINGS, drafts=3, draft_layers=MODEL.layers))
    result = server.run(PROMPTS)
    assert result.tokens == plain(MODEL, WEIGHTS, PROMPTS, SETTINGS.new).tokens
    assert result.accepted == result.guessed > 0


def test_drawn_tokens_depend_on_the_seed() -> None:
    hot = replace(SETTINGS, temperature=1.0, drafts=2)
    first, again, other = (
        Server(MODEL, WEIGHTS, replace(hot, seed=seed)).run(PROMPTS[:2]).tokens for seed in (0, 0, 1)
    )
    assert first == again != other
    assert all(0 <= token < 256 for tokens in first for token in tokens)


def test_a_sequence_waits_until_there_are_pages() -> None:
    """A pool for one long sequence at a time."""
    server = Server(MODEL, WEIGHTS, replace(SETTINGS, pages=6))
    assert server.run(PROMPTS).tokens == plain(MODEL, WEIGHTS, PROMPTS, SETTINGS.new).tokens


@pytest.mark.parametrize("prompt", [[], [7] * 200])
def test_prompts_that_do_not_fit(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match=f"expected a prompt of 1 to 116 tokens; prompt 0 has {len(prompt)}"):
        Server(MODEL, WEIGHTS, SETTINGS).run([prompt])


def test_models_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="without experts; got experts=4"):
        Model.of(replace(CONFIG, experts=4))
    with pytest.raises(ValueError, match="draft_layers from 1 to 2; got 3"):
        Server(MODEL, WEIGHTS, replace(SETTINGS, draft_layers=3))


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    saved = jax.tree.map(lambda x: x + 1, WEIGHTS)
    np.savez(tmp_path / "state.npz", **{f"{n}": x for n, x in enumerate(jax.tree.leaves(saved))})
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path, CONFIG), saved)
    with pytest.raises(ValueError, match="of another model"):
        restored(tmp_path, replace(CONFIG, width=128))
