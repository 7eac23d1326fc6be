"""The training example: on a mesh it learns as on one device and in plain JAX, and goes on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import train
from examples.train import Config, compare, init, mesh_of, plain

TINY = Config(layers=2, width=32, heads=4, kv_heads=2, hidden=48, length=32, batch=4, steps=8, rate=1e-2)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,model=2,sequence=2", {}),
        ("model=2,data=4", {}),
        ("sequence=2,model=2", {"attention": "ulysses"}),
        pytest.param("data=2,model=2,sequence=2", {"experts": 4}, marks=pytest.mark.slow),
    ],
    ids=["ring", "no sequence", "ulysses", "experts"],
)
def test_the_mesh_learns_what_one_device_learns(mesh: str, options: Any) -> None:
    learned = compare(replace(TINY, **options), mesh_of(mesh))
    assert all(len(losses) == TINY.steps for losses in learned.losses.values())
    assert learned.losses["the mesh"][-1] < learned.losses["the mesh"][0] - 0.1
    assert learned.same("the mesh") and learned.same("one device")
    assert 0 < learned.difference("jnp, rounded") < 1e-4


def test_training_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, weights = mesh_of("data=2,model=2"), init(TINY)
    whole = train.train(TINY, mesh, plain, weights)
    every = train.batches
    monkeypatch.setattr(train, "batches", lambda config: every(config)[:4])
    train.train(TINY, mesh, plain, weights, tmp_path, every=4)
    monkeypatch.setattr(train, "batches", every)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
    again = train.train(TINY, mesh_of("data=4"), plain, weights, tmp_path)  # on another mesh
    np.testing.assert_allclose(again, whole, rtol=1e-5)
    with pytest.raises(ValueError, match=r"state\.npz is of another model"):
        train.train(Config(), mesh, plain, init(Config()), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=16", "needs 16 devices, and there are 8"),
        ("rows=2", "expects data=N,model=N,sequence=N"),
        ("data=0", "got 'data=0'"),
    ],
)
def test_meshes_that_there_are_not(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh_of(text)


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ("data=8", {}, "--batch 4 must be a multiple of data=8"),
        ("sequence=8", {"length": 24}, "--length 24 of two parts for each of sequence=8"),
        ("sequence=8", {"length": 20, "attention": "ulysses"}, "--length 20 of sequence=8"),
    ],
)
def test_meshes_that_do_not_divide_the_batch(mesh: str, options: Any, said: str) -> None:
    config = replace(TINY, **options)
    with pytest.raises(ValueError, match=said):
        train.as_rows(config, mesh_of(mesh), np.zeros((config.batch, config.length + 1), np.int32))


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    train.draw({"loss": np.linspace(5, 2, 9)}, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
