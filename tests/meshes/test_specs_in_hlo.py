"""Shardings that XLA found, as specs: by axes of the mesh, or None where a part of an axis divides a dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilekern import _meshes

# The same eight devices in the same order: `parts` names each factor of two of the axes of a mesh.
PARTS = jax.make_mesh((2, 2, 2), ("p", "q", "r"))
AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "2x4": {"a": ("p",), "b": ("q", "r")},
    "4x2": {"a": ("p", "q"), "b": ("r",)},
    "8": {"a": ("p", "q", "r")},
    "2x2x2": {"a": ("p",), "b": ("q",), "c": ("r",)},
}


def specs_of_parts() -> Iterator[tuple[tuple[str, ...], ...]]:
    """Each way for three parts of axes, or fewer, to divide two dims."""
    for count in range(4):
        for parts in permutations(PARTS.axis_names, count):
            for dims in product(range(2), repeat=count):
                if list(dims) == sorted(dims):
                    yield tuple(tuple(p for p, d in zip(parts, dims, strict=True) if d == dim) for dim in range(2))


def by_axes(parts: tuple[str, ...], axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The axes whose parts are these, one after another; None if there are no such axes."""
    names: list[str] = []
    while parts:
        name = next((n for n, whole in axes.items() if parts[: len(whole)] == whole), None)
        if name is None:
            return None
        names.append(name)
        parts = parts[len(axes[name]) :]
    return tuple(names)


@pytest.mark.parametrize("name", AXES)
def test_a_spec_names_axes_and_never_a_part_of_an_axis(name: str) -> None:
    axes = AXES[name]
    mesh = jax.make_mesh(tuple(2 ** len(parts) for parts in axes.values()), tuple(axes))
    for spec in specs_of_parts():
        sharding = NamedSharding(PARTS, P(*(dim or None for dim in spec)))
        dims = [by_axes(parts, axes) for parts in spec]
        expected = None if None in dims else tuple(dims)
        found = _meshes.spec_in_hlo(SimpleNamespace(_hlo_sharding=sharding._to_xla_hlo_sharding(2)), mesh, 2)
        assert found == expected, spec
