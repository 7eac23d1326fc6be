import numpy as np
import pytest

from examples.demo import Config, render, run


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
