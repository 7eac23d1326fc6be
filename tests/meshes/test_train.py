"""The training example: on a mesh it learns as on one device and in plain JAX, and goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples import train
from examples.train import PLAIN, Config, compare, init, mesh_of

TINY = Config(layers=2, width=32, heads=4, kv_heads=2, hidden=48, length=24, batch=4, steps=8, rate=1e-2)


def test_the_mesh_learns_what_one_device_learns() -> None:
    learned = compare(TINY, mesh_of("model=2,data=4"))
    assert all(len(losses) == TINY.steps for losses in learned.losses.values())
    assert learned.losses["the mesh"][-1] < learned.losses["the mesh"][0] - 0.1
    assert learned.same("the mesh") and learned.same("one device")
    assert 0 < learned.difference("jnp, rounded") < 1e-4


def test_training_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, weights = mesh_of("data=2,model=2"), init(TINY)
    whole = train.train(TINY, mesh, PLAIN, weights)
    every = train.batches
    monkeypatch.setattr(train, "batches", lambda config: every(config)[:4])
    train.train(TINY, mesh, PLAIN, weights, tmp_path, every=4)
    monkeypatch.setattr(train, "batches", every)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
    again = train.train(TINY, mesh, PLAIN, weights, tmp_path)
    np.testing.assert_allclose(again, whole, rtol=1e-6)
    with pytest.raises(ValueError, match=r"state\.npz is of another model"):
        train.train(Config(), mesh, PLAIN, init(Config()), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=16", "needs 16 devices, and there are 8"),
        ("rows=2", "expects data=N,model=N"),
        ("data=0", "got 'data=0'"),
    ],
)
def test_meshes_that_there_are_not(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh_of(text)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    train.draw({"loss": np.linspace(5, 2, 9)}, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
