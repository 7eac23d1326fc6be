"""Sines and cosines: the short way to 1.7 units of the last place, Mosaic's for angles that it does not serve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lower.mosaic.legalize.legality import legalized
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tests.lower.triton.legalize.meaning import several
from tilekern.ir.control import Switch
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import F32
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.legalize.sines import LIMIT

TINY = np.finfo(F32).smallest_subnormal


def both(x: np.ndarray) -> tuple[Func, list[np.ndarray]]:
    return several(lambda b, x: [b.op(Elementwise, x, function=name) for name in ("sin", "cos")], x)


def computed(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sine and cosine of the angles, as the first program stores them."""
    return tuple(out[: len(x)] for out in legalized(*both(x)))


def worst(x: np.ndarray) -> float:
    """The largest error of both functions, in units of the last place."""
    errors = []
    for got, function in zip(computed(x), (np.sin, np.cos), strict=True):
        exact = function(x.astype(np.longdouble)).astype(np.float64)
        unit = np.spacing(np.maximum(np.abs(exact), np.finfo(F32).tiny).astype(F32))
        errors.append(np.abs(got.astype(np.float64) - exact) / unit)
    return float(np.max(errors))


def test_angles_below_the_limit() -> None:
    random = np.random.default_rng(0)
    wide = random.uniform(-LIMIT, LIMIT, 300_000)
    small = np.exp(random.uniform(-40, np.log(LIMIT), 300_000)) * random.choice([-1, 1], 300_000)
    assert worst(np.concatenate([wide, small]).astype(F32)) < 1.7


def test_angles_next_to_the_zeros_of_both() -> None:
    """The reduced angle there is far smaller than the angle's last digit."""
    zeros = (np.arange(1, int(LIMIT * 2 / np.pi)) * (np.pi / 2)).astype(F32)
    assert (
        worst(np.concatenate([np.nextafter(zeros, np.float32(0)), zeros, np.nextafter(zeros, np.float32(np.inf))]))
        < 1.7
    )


def test_special_angles() -> None:
    """Signs of zeros, and tiles with an angle that takes the long way."""
    zeros = np.array([0.0, -0.0, TINY, -TINY, 1e-30, -1e-30], F32)
    for special in (1.0, 3e5, np.inf, np.nan):
        x = np.array([*zeros, special], F32)
        with np.errstate(invalid="ignore"):
            wanted = np.sin(x), np.cos(x)
        for got, exact in zip(computed(x), wanted, strict=True):
            assert_same(got[:-1], exact[:-1])
            np.testing.assert_allclose(got[-1:], exact[-1:], rtol=3e-7)


def test_both_of_one_angle_take_one_reduction() -> None:
    legal = legalize(both(np.ones((8, 128), F32))[0], "v5e")
    assert sum(isinstance(op, Switch) for op in legal.walk()) == 1
    assert sum(isinstance(op, Elementwise) and op.function in ("sin", "cos") for op in legal.walk()) == 2


@tk.kernel(out_type=lambda x: (x, x))
def turned(x: tk.Ref, sine: tk.Ref, cosine: tk.Ref, *, block: tk.Block = 16) -> None:
    i = tk.parallel(x.shape[0], block)
    sine[i], cosine[i] = jnp.sin(x[i]), jnp.cos(x[i])


@needs_libtpu
@pytest.mark.parametrize("shape", [(64, 100), (1000,), (64, 3, 64)])
@pytest.mark.parametrize("chip", CHIPS)
def test_it_compiles(shape: tuple[int, ...], chip: str) -> None:
    assert turned.trace(jax.ShapeDtypeStruct(shape, F32)).lower(chip).compile().resources.vmem_bytes > 0
