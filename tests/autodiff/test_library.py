"""Derived gradients of the library's kernels, as if nobody had stated theirs, against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.library import DIFFERENTIABLE
from tilekern.testing import assert_close, in_float64


@dataclass(frozen=True)
class Case:
    """A call of a library kernel.

    Attributes:
      shapes: of the arrays of floats.
      length: of the longest sum in the gradient.
      rest: the other arrays.
      keywords: of the kernel and the reference.
      blocks: which divide no dim.
    """

    shapes: tuple[tuple[int, ...], ...]
    length: int
    rest: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    blocks: Mapping[str, int] = field(default_factory=dict[str, int])


_ROWS = {"block_rows": 5, "block_columns": 16}
CASES = {
    "rms_norm": Case(((12, 40), (40,)), 40, blocks=_ROWS),
    "layer_norm": Case(((12, 40), (40,), (40,)), 40, blocks=_ROWS),
    "group_norm": Case(
        ((2, 9, 12), (12,), (12,)),
        36,
        keywords={"num_groups": 3, "activation": "silu"},
        blocks={"block_s": 4, "block_g": 2},
    ),
    "softmax": Case(((12, 40),), 40, blocks=_ROWS),
    "swiglu": Case(((12, 40),) * 2, 1, blocks=_ROWS),
    "rope": Case(((2, 9, 3, 8),), 2, blocks={"block_t": 4, "block_n": 2}),
    "matmul": Case(((20, 30), (30, 25)), 30, blocks={"block_m": 16, "block_n": 16, "block_k": 16}),
    "ragged_dot": Case(((20, 12), (3, 12, 9)), 20, rest=(np.array([7, 0, 11], np.int32),), blocks={"block_m": 8}),
    "cross_entropy": Case(
        ((10, 12), (12, 21)),
        21,
        rest=(np.array([0, 20, 3, -100, 7, 7, 1, 2, 19, 5], np.int32),),
        keywords={"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0},
        blocks={"block_t": 4, "block_v": 8, "block_d": 8},
    ),
    "distillation": Case(
        ((10, 12), (12, 21)),
        21,
        rest=(np.linspace(-2, 2, 210, dtype=np.float32).reshape(10, 21),),
        keywords={"divergence": "jensen_shannon", "softcap": 5.0},
        blocks={"block_t": 4, "block_v": 8, "block_d": 8},
    ),
    "flash_attention": Case(
        ((2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8)),
        20,
        keywords={"causal": True, "softcap": 3.0},
        blocks={"block_q": 8, "block_k": 8},
    ),
    "causal_conv1d": Case(((2, 20, 12), (4, 12), (12,)), 40, blocks={"block_t": 8, "block_c": 8}),
    "gated_delta_rule": Case(
        ((2, 20, 2, 8), (2, 20, 2, 8), (2, 20, 4, 12)),
        32,
        rest=tuple(sign * np.linspace(0.01, 0.2, 160, dtype=np.float32).reshape(2, 20, 4) for sign in (1, -1)),
        blocks={"block_t": 8, "block_v": 8},
    ),
    "rg_lru": Case(((2, 20, 12), (2, 20, 12), (2, 20, 12), (12,)), 40, blocks={"block_t": 8, "block_c": 8}),
    "selective_scan": Case(
        ((2, 20, 12), (2, 20, 12)),
        80,
        rest=(
            -np.linspace(0.1, 2, 48, dtype=np.float32).reshape(12, 4),
            *np.cos(np.arange(320, dtype=np.float32)).reshape(2, 2, 20, 4),
        ),
        blocks={"block_t": 8, "block_c": 8},
        keywords={"dt_softplus": True},
    ),
    "linear_attention": Case(
        ((2, 20, 2, 8), (2, 20, 2, 8), (2, 20, 4, 12)),
        32,
        rest=(-np.linspace(0.01, 1, 160, dtype=np.float32).reshape(2, 20, 4),),
        blocks={"block_t": 8, "block_v": 8},
    ),
}


def without_rules(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[..., jax.Array]:
    """The public function of a kernel, on a copy of the kernel that has no stated derivative."""
    module = importlib.import_module(f"tilekern.kernels.{name}")
    if name == "matmul":
        return _copy(module.kernel.matmul)
    api, attribute = importlib.import_module(f"tilekern.kernels.{name}.api"), f"{name}_forward"
    kernel = getattr(api, attribute)
    if isinstance(kernel, tk.CustomOp):  # of the kernel that it calls for parts of the words
        kernel = getattr(module, f"{name}_parts")
    monkeypatch.setattr(api, attribute, _copy(kernel))
    return getattr(module, name)


def _copy(kernel: Any) -> Any:
    return tk.kernel(out_type=kernel._definition.out_type)(kernel.__wrapped__)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernel = CASES[name], without_rules(monkeypatch, name)
    reference = importlib.import_module(f"tilekern.kernels.{name}").reference
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(dtype) for shape in case.shapes]

    def gradient(function: Callable[..., Any], *arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *a: jax.tree.leaves(function(*a, *case.rest, **case.keywords))[0], *arrays)
        weights = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
        return pull(jnp.asarray(weights, out.dtype))

    found = gradient(partial(kernel, **case.blocks), *arrays)
    oracle = in_float64(partial(gradient, reference), *arrays)
    low = gradient(partial(reference, dtype=dtype) if name != "matmul" else reference, *arrays)
    for f, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(f, exact, naive, length=case.length, factor=3)
