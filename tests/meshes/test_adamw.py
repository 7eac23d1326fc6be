"""Steps of AdamW on 8 devices: each steps its part, without communication, and rounds as one device does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tilekern.training import adamw_in_place

SHAPES = {"matrix": (16, 40), "experts": (8, 6, 10), "vector": (24,)}
DIVISIONS = {
    "rows": {"matrix": ("a", None), "experts": (("a", "b"), None, None), "vector": ("a",)},
    "columns": {"matrix": ("b", "a"), "experts": (None, "a", None), "vector": (("a", "b"),)},
}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_divided_weights_have_the_bits_of_whole_ones(kind: AxisType, division: str) -> None:
    random = np.random.default_rng(0)
    weights = {n: jnp.asarray(random.standard_normal(s), jnp.bfloat16) for n, s in SHAPES.items()}
    gradients = {n: jnp.asarray(random.standard_normal(s), jnp.float32) for n, s in SHAPES.items()}
    optimizer = adamw_in_place(0.01)
    expected = jax.jit(optimizer.step)(weights, optimizer.init(weights), gradients)

    mesh = jax.make_mesh((2, 4), ("a", "b"), (kind, kind))

    def divided(tree: Any) -> Any:
        specs = {n: PartitionSpec(*DIVISIONS[division][n]) for n in tree}
        return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in tree.items()}

    with jax.set_mesh(mesh):
        here, moving = divided(weights), divided(gradients)
        state = optimizer.init(here)
        step = jax.jit(optimizer.step, donate_argnums=(0, 1))
        compiled = step.lower(here, state, moving).compile()
        found = compiled(here, state, moving)
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "collective-permute"))
    for ours, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(whole))
    for name, weight in found[0].items():
        wanted = NamedSharding(mesh, PartitionSpec(*DIVISIONS[division][name]))
        assert weight.sharding.is_equivalent_to(wanted, weight.ndim)
