"""Choices of the kernels: whatever the choice, the results are the same but for rounding."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern.kernels
from tilekern.kernel import CustomOp, Kernel
from tilekern.kernels.causal_conv1d.kernel import causal_conv1d_backward_kernel
from tilekern.kernels.flash_attention.arguments import Config, Extras, Tangents
from tilekern.kernels.flash_attention.derivatives import flash_attention_backward
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.gated_delta_rule.kernel import gated_delta_rule_forward
from tilekern.kernels.linear_attention.kernel import linear_attention_forward
from tilekern.kernels.matmul.symmetric import symmetric_matmul_forward
from tilekern.kernels.mla_attention.arguments import Latents, Scales
from tilekern.kernels.mla_attention.op import mla_selected_op
from tilekern.kernels.paged_attention.arguments import Settings, Tables
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward
from tilekern.kernels.sample.arguments import Rates
from tilekern.kernels.sample.completed import remaining_tokens
from tilekern.kernels.sample.product import Form, Operands

RANDOM = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    """Normal numbers."""
    return RANDOM.normal(size=shape).astype(np.float32)


ENDS = np.array([5, 5, 14], np.int32)
HEADS = f(1, 20, 1, 8), f(1, 20, 1, 8) / 3, f(1, 20, 2, 6)
DECAYS = -np.abs(f(1, 20, 2))
CONVOLVED = f(1, 20, 6), f(4, 6), f(6), None, None, f(1, 20, 6)


def backward(**choices: Any) -> Any:
    """The cotangents of attention."""
    q, k, v = f(1, 16, 2, 8), f(1, 16, 1, 8), f(1, 16, 1, 8)
    config = Config(scale=8**-0.5, causal=True, blocks=(("block_q", 8), ("block_k", 8)))
    out, _, residuals = flash_attention_forward(
        q, k, v, Extras(), config=config, return_logsumexp=True, return_residuals=True, block_q=8, block_k=8
    )
    cotangents = jnp.cos(out), None
    needs = Tangents(query=True, key=True, value=True)
    return flash_attention_backward(
        q, k, v, Extras(), out, residuals, cotangents, config=config, needs=needs, **choices
    )


def selected(**choices: Any) -> Any:
    """Latent attention of five tokens to four keys each, of a cache of 3 pages of 2."""
    query, cache = Latents(f(5, 2, 8), None), Latents(f(3, 2, 8), None)
    rows = jnp.asarray([[0, 1, 4, 5], [2, 3, 4, 5], [0, 2, 4, 6], [1, 3, 5, 0], [0, 1, 2, 3]])
    tables = Tables(jnp.arange(6), jnp.full(5, 4), rows, jnp.full(1, 5))
    settings = Settings(8**-0.5, None, None)
    return mla_selected_op(
        query, cache, tables, Scales(None, None), settings=settings, value_width=6, return_logsumexp=True, **choices
    )


def remaining(**choices: Any) -> Any:
    """Tokens of 5 rows, of which one has its token."""
    keys = jnp.arange(10, dtype=jnp.uint32).reshape(5, 2)
    rates = Rates(jnp.full(5, 2.0**20, jnp.float32), top_p=jnp.full(5, 50000, jnp.uint32))
    tokens = jnp.asarray([-1, -1, 7, -1, -1])
    return remaining_tokens(Operands(f(5, 8), f(8, 40)), keys, rates, None, tokens, form=Form(), **choices)


CALLS: Mapping[Any, Any] = {
    causal_conv1d_backward_kernel: partial(
        causal_conv1d_backward_kernel, *CONVOLVED, needs=(True, True, True), activation="silu", block_t=8, block_c=4
    ),
    flash_attention_backward: backward,
    gated_delta_rule_forward: partial(
        gated_delta_rule_forward, *HEADS, f(1, 20, 2), DECAYS, None, None, block_t=8, block_v=4
    ),
    linear_attention_forward: partial(linear_attention_forward, *HEADS, DECAYS, None, None, block_t=8, block_v=4),
    ragged_dot_forward: partial(ragged_dot_forward, f(16, 9), f(3, 9, 6), ENDS, block_m=4, block_n=4, block_k=4),
    scaled_ragged_dot_forward: partial(
        scaled_ragged_dot_forward,
        *(f(16, 9), f(3, 9, 6), ENDS, np.abs(f(16, 1)), None),
        out_dtype="float32",
        block_m=4,
        block_n=4,
        block_k=4,
    ),
    mla_selected_op: selected,
    remaining_tokens: remaining,
    symmetric_matmul_forward: partial(
        symmetric_matmul_forward, f(20, 9), None, scale=1.0, scale_added=0.0, block_m=8, block_k=4
    ),
}


def modules() -> list[Any]:
    """All modules of the library."""
    names = [m.name for m in pkgutil.walk_packages(tilekern.kernels.__path__, "tilekern.kernels.")]
    return [importlib.import_module(name) for name in names]


def test_the_table_has_every_kernel_with_a_choice() -> None:
    objects = [value for module in modules() for value in vars(module).values()]
    declared = [value for value in objects if isinstance(value, (Kernel, CustomOp))]
    assert {kernel.signature.name for kernel in declared if kernel.signature.choices} == {
        kernel.signature.name for kernel in CALLS
    }


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("kernel", "choice"), [(kernel, choice) for kernel in CALLS for choice in kernel.signature.choices], ids=str
)
def test_results_do_not_depend_on_a_choice(kernel: Any, choice: str) -> None:
    global RANDOM
    results = []
    for value in kernel.signature.choices[choice].values:
        RANDOM = np.random.default_rng(1)  # the same arrays each time
        results.append(jax.tree.leaves(CALLS[kernel](**{choice: value}, target="cpu:xla")))
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert np.abs(one).max() > 0.1
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
