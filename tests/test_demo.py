from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples import demo
from examples.demo import Config, Learned, Training, render, render_training, run, train


@pytest.mark.smoke
@pytest.mark.parametrize("length", [64, 333])
def test_the_model_is_the_same_on_both_attentions(length: int) -> None:
    config = Config(layers=2, width=64, heads=2, length=length, rounds=1)
    report = run(config)
    ours, theirs = report.runs["tilekern"], report.runs["jax.nn"]
    assert ours.logits.shape == (1, length, 256)
    assert 4.0 < ours.loss < 8.0  # untrained: about log(256) = 5.5 nats a byte
    assert abs(ours.loss - theirs.loss) < 1e-5
    # All in float32, through two blocks: some tens of roundings of the largest logit.
    assert report.difference <= 1e-5 * np.max(np.abs(theirs.logits))
    shown = render(config, report)
    assert f"{ours.loss:.6f}" in shown
    assert report.ir in shown and "fold" in report.ir


TINY = Training(Config(layers=1, width=32, heads=2, length=48), steps=25, batch=2)


@pytest.fixture(scope="module")
def learned() -> Learned:
    return train(TINY)


def test_the_model_learns_the_same_on_both_attentions(learned: Learned) -> None:
    for losses in learned.losses.values():
        assert losses.shape == (25,)
        assert losses[-5:].mean() < losses[:5].mean() - 0.5
    assert learned.same
    assert 0 < learned.difference("jax.nn, rounded") < 1e-3
    shown = render_training(TINY, learned)
    assert f"{learned.losses['tilekern'][-1]:.6f}" in shown and "no more than rounding errors explain" in shown


def test_an_attention_that_is_wrong_by_a_part_in_ten_thousand(
    learned: Learned, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = demo.TRAINED["tilekern"]
    monkeypatch.setattr(demo, "TRAINED", {"tilekern": lambda q, k, v: right(q, k, v) * 1.0001})
    wrong = replace(learned, losses={**learned.losses, **train(TINY).losses})
    assert not wrong.same
    assert "MORE THAN ROUNDING ERRORS EXPLAIN" in render_training(TINY, wrong)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    names = ("tilekern", "jax.nn", "jax.nn, rounded")
    learned = Learned({name: np.linspace(5, 2, 9, dtype=np.float32) + n for n, name in enumerate(names)}, {})
    demo.draw(learned, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
