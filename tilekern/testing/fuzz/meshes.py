"""Random kernels, divided among devices by random meshes: values and gradients equal one device's.

They are the same bits, unless devices add up parts of a sum. A call that is refused, by an error of ours, is as good.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tilekern.errors import ArgumentError, NotDifferentiableError, ResourceError, TargetError, UnsupportedError
from tilekern.ir.core import Array
from tilekern.testing.programs.kernels import Sketch, sketch
from tilekern.testing.programs.values import Choose

DEVICES = 8
"""The number of devices that the mode needs."""

REFUSALS = (ArgumentError, NotDifferentiableError, ResourceError, TargetError, UnsupportedError)
"""Errors by which a call is refused."""

type Dims = tuple[tuple[str, ...], ...]

_MESHES = ((4,), (2,), (8,), (2, 2), (2, 4), (4, 2))
_KINDS = ("Auto", "Explicit", "mixed")
_SUMS = re.compile(r"\b(all-reduce|reduce-scatter)")
# A sum of a few thousand numbers, in another order; results are compared with the largest of an array.
_TERMS = 2.0**12


@dataclass(frozen=True, eq=False)
class Divided:
    """A call of a kernel on arrays that a mesh divides.

    Attributes:
      sketch: the kernel.
      mesh: the sizes of the axes of the mesh, `a` and `b`.
      kind: "Auto", "Explicit", or "mixed": the first axis is explicit, the second one automatic.
      specs: for each array, for each dim the axes that divide it.
      inside: the arrays are divided inside of the program, where dims need not be multiples of the devices.
      gradient: whether the gradients are compared, too.
      target: of the kernel.
    """

    sketch: Sketch
    mesh: tuple[int, ...]
    kind: str
    specs: tuple[Dims, ...]
    inside: bool
    gradient: bool
    target: str

    def script(self) -> str:
        """A program that makes the call again, and prints how far it is from one device's."""
        shape, names = self.mesh, tuple("ab"[: len(self.mesh)])
        specs = ", ".join(f"P{spec}" for spec in self._written)
        kinds = ", ".join(f"AxisType.{kind.name}" for kind in self._kinds)
        put = "lax.with_sharding_constraint" if self.inside else "device_put"
        return "\n".join(
            [
                "import os",
                f'os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={DEVICES}"',
                self.sketch.source,
                "from jax.sharding import AxisType, NamedSharding, PartitionSpec as P",
                f'jax.config.update("jax_enable_x64", True)  # gradient: {self.gradient}, {put}',
                *self.sketch.numbers,
                f"mesh = jax.make_mesh({shape}, {names}, ({kinds},), devices=jax.devices()[:{prod(shape)}])",
                f"put = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, [{specs}])]",
                "with jax.set_mesh(mesh):",
                f"    found = jax.jit(lambda *x: drawn(*x, target={self.target!r}))(*put)",
                f"for x, y in zip(found, drawn(*arrays, target={self.target!r})):",
                "    print(np.abs(np.asarray(x) - np.asarray(y)).max())",
            ]
        )

    @property
    def _kinds(self) -> tuple[AxisType, ...]:
        auto, explicit = AxisType.Auto, AxisType.Explicit
        kinds = {"Auto": (auto, auto), "Explicit": (explicit, explicit), "mixed": (explicit, auto)}[self.kind]
        return kinds[: len(self.mesh)]

    @property
    def _written(self) -> list[tuple[Any, ...]]:
        return [tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec) for spec in self.specs]

    @cached_property
    def _on_one_device(self) -> list[Array]:
        return jax.device_get(jax.jit(self._both)(*self.sketch.arrays))

    def check(self) -> str:
        """Compare the results on the mesh with the results on one device.

        Returns:
          "same", or "summed" where devices add up.

        Raises:
          AssertionError: they differ.
          TilekernError: the call is refused; other errors are none of ours.
        """
        with jax.enable_x64(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = self._on_one_device
            results, text = self._on_mesh()
        summed = _SUMS.search(text) is not None
        exact = not summed and self.target == "cpu:llvm"
        for number, (x, y) in enumerate(zip(results, expected, strict=True)):
            _compare(number, x, y, exact=exact)
        return "summed" if summed else "same"

    def _both(self, *arrays: Any) -> list[Any]:
        """The results, and the gradients by arrays of floats."""
        kernel = partial(self.sketch.kernel, target=self.target)
        if not self.gradient:
            return list(kernel(*arrays))
        integers = self.sketch.integers
        integer_of = {n: x for n, x in enumerate(arrays) if n in integers}

        def of_floats(*floats: Any) -> list[Any]:
            floats_left = iter(floats)
            return list(kernel(*(integer_of[n] if n in integer_of else next(floats_left) for n in range(len(arrays)))))

        results, pull = cast(Any, jax).vjp(of_floats, *(x for n, x in enumerate(arrays) if n not in integer_of))
        return [*results, *pull([_cotangent(x) for x in results])]

    def _on_mesh(self) -> tuple[list[Array], str]:
        shape, names = self.mesh, tuple("ab"[: len(self.mesh)])
        mesh = jax.make_mesh(shape, names, self._kinds, devices=jax.devices()[: prod(shape)])
        shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in self._written]

        def program(*arrays: Any) -> list[Any]:
            if self.inside:
                constrain = cast(Any, jax).lax.with_sharding_constraint
                arrays = tuple(map(constrain, arrays, shardings))
            return self._both(*arrays)

        with jax.set_mesh(mesh):
            whole = NamedSharding(mesh, PartitionSpec())
            pairs = zip(self.sketch.arrays, shardings, strict=True)
            put = [jax.device_put(x, whole if self.inside else s) for x, s in pairs]
            compiled = jax.jit(program).lower(*put).compile()
            return [np.asarray(x) for x in compiled(*put)], compiled.as_text() or ""


def _cotangent(result: Any) -> Any:
    """Multiples of 1/8, in the sharding of a result."""
    numbers = cast(Array, np.arange(result.size) * 5 % 17 - 8).reshape(result.shape) / 8
    return jnp.where(result == result, jnp.asarray(numbers.astype(result.dtype)), 0)


def _compare(number: int, result: Array, expected: Array, *, exact: bool) -> None:
    """Assert that two results are the same bits, or as near as two orders of a sum."""
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype), (
        f"result {number}: {result.shape}, {result.dtype}"
    )
    same = (result == expected) | ((result != result) & (expected != expected))
    if not exact and expected.dtype.kind == "f":
        size = max(1.0, float(np.abs(np.nan_to_num(expected)).max(initial=0)))
        same |= np.abs(result - expected) <= _TERMS * float(np.finfo(expected.dtype).eps) * size
    if not same.all():
        at = tuple(int(n) for n in np.argwhere(~same)[0])
        raise AssertionError(
            f"result {number}{list(at)} is {result[at]!r}, on one device {expected[at]!r}; "
            f"{np.count_nonzero(~same)} of {same.size} elements differ"
        )


def draw(choose: Choose) -> Divided:
    """The call that some choices make."""

    def pick[T](items: Sequence[T]) -> T:
        return items[choose(len(items) - 1)]

    shape, kind = pick(_MESHES), pick(_KINDS)
    kind = "Explicit" if kind == "mixed" and len(shape) == 1 else kind
    target = pick(["cpu:llvm"] * 4 + ["cpu:xla"])
    gradient, inside = choose(2) == 2, kind == "Auto" and choose(5) == 5
    drawn = sketch(choose)
    by_dim = {dim: pick(["a", "b", "", "ab"]) if dim != "m" else pick(["a", "ab", "a", "b"]) for dim in drawn.sizes}
    sizes = dict(zip("ab", shape, strict=False))
    specs = tuple(_spec(dims, by_dim, drawn.sizes, sizes, choose(7) == 7, inside) for dims in drawn.dims)
    return Divided(drawn, shape, kind, specs, inside, gradient, target)


def _spec(
    dims: Sequence[str],
    by_dim: Mapping[str, str],
    extents: Mapping[str, int],
    mesh: Mapping[str, int],
    whole: bool,
    uneven: bool,
) -> Dims:
    """The mesh axes for each dim of an array: the axes of the dim's name that divide it, each axis once."""
    taken: set[str] = set()
    axes_of_dims: list[tuple[str, ...]] = []
    for dim in dims:
        axes = [axis for axis in by_dim[dim] if axis in mesh and axis not in taken]
        fits = uneven or extents[dim] % prod(mesh[a] for a in axes) == 0
        axes = [] if whole or not fits else axes
        taken.update(axes)
        axes_of_dims.append(tuple(axes))
    return tuple(axes_of_dims)
