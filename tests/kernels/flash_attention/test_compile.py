"""Attention and its gradient at real sizes, compiled ahead of time for GPUs and TPUs, without any."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

from bench.gpu.item import lowerings_of
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.cases import CASES
from tilekern.lower.target import resolve

pytestmark = pytest.mark.one_backend

TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "tpu:v5e", "tpu:v5p", "tpu:v6e", "tpu:7x")
NAMED = {case.name: case for case in CASES}


def alibi(slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + slopes[n] * (j - i)


# What layers of real models add to the sizes of a case: keywords, and arrays by name, given batch, heads, T and S.
FEATURES: dict[str, Any] = {
    "": lambda b, n, t, s: {},
    # https://huggingface.co/google/gemma-2-9b: every other layer
    "gemma_2": lambda b, n, t, s: {"causal": True, "window": (4095, 0), "softcap": 50.0},
    # https://huggingface.co/openai/gpt-oss-20b
    "gpt_oss": lambda b, n, t, s: {"causal": True, "window": (127, 0), "sinks": floats(n)},
    "packed": lambda b, n, t, s: {"causal": True, "segment_ids": (ints(b, t), ints(b, s))},
    "padded": lambda b, n, t, s: {"kv_lengths": ints(b), "dropout_rate": 0.1, "dropout_key": key()},
    "bias": lambda b, n, t, s: {"bias": floats(1, n, t, s)},
    # https://huggingface.co/bigscience/bloom: position by slopes
    "bloom": lambda b, n, t, s: {"causal": True, "score_mod": Partial(alibi, floats(n))},
    "mask": lambda b, n, t, s: {"mask": jax.ShapeDtypeStruct((b, 1, t, s), jnp.bool_)},
}


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def key() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2,), jnp.uint32)


ALL = [(case, "", target) for case in NAMED for target in TARGETS]
ALL += [("gpt2", feature, target) for feature in FEATURES if feature for target in TARGETS]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("term", ["bias", "table"])
@pytest.mark.parametrize(("width", "causal"), [(64, False), (96, True), (128, False), (128, True), (192, False)])
def test_long_programs_with_terms_fit_hopper(width: int, causal: bool, term: str) -> None:
    """Numbers in float32 for each score, beside heads of any width."""
    pytest.importorskip("triton", reason="needs triton")
    x, terms = jax.ShapeDtypeStruct((2, 4096, 16, width), jnp.bfloat16), floats(16, 4096, 4096)

    def call(x: jax.Array, terms: jax.Array) -> jax.Array:
        if term == "bias":
            return flash_attention(x, x, x, bias=terms[None], causal=causal)
        added = Partial(lambda terms, score, _, head, i, j: score + terms[head, i, j], terms)
        return flash_attention(x, x, x, score_mod=added, causal=causal)

    (lowering,) = lowerings_of(call, [x, terms], resolve("cuda:sm_90"))
    assert lowering.compile().resources.spills == 0


@pytest.mark.sweep(60)
@pytest.mark.parametrize(
    ("case", "feature", "target"),
    ALL,
)
@pytest.mark.slow
def test_values_and_gradients_compile(case: str, feature: str, target: str) -> None:
    """And no kernel for a GPU spills more than a few registers."""
    found = NAMED[case]
    compiler = "triton" if target.startswith("cuda") else "libtpu"
    pytest.importorskip(compiler, reason=f"needs {compiler}")
    q, k, v = jax.eval_shape(partial(found.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    keywords = {**found.keywords, **FEATURES[feature](found.batch, found.heads, found.queries, found.keys)}
    arrays = {n: x for n, x in keywords.items() if any(hasattr(y, "shape") for y in jax.tree.leaves(x))}
    statics = {n: x for n, x in keywords.items() if n not in arrays}

    def gradients(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        floating = {n: x for n, x in arrays.items() if jnp.issubdtype(jax.tree.leaves(x)[0].dtype, jnp.floating)}

        def loss(q: Any, k: Any, v: Any, floating: Any) -> jax.Array:
            out = flash_attention(q, k, v, **{**arrays, **floating}, **statics)
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, floating)

    leaves, tree = jax.tree.flatten((q, k, v, arrays))
    lowerings = list(
        lowerings_of(lambda *leaves: gradients(*jax.tree.unflatten(tree, leaves)), leaves, resolve(target))
    )
    found = {lowering.func.name.removeprefix("flash_attention_"): lowering for lowering in lowerings}
    together = len(found["backward_key"].func.outputs) == 3
    assert together == (target.startswith("tpu") and feature not in ("bias", "mask"))
    terms = {"backward_term"} if feature in ("bias", "bloom") else set()
    assert found.keys() == {"forward", "backward_key", *(() if together else ("backward_query",)), *terms}
    for lowering in lowerings:
        resources = lowering.compile().resources
        if target.startswith("cuda"):
            assert resources.spills <= 256, lowering.func.name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
def test_every_kernel_of_the_gradient_has_blocks_on_a_gpu(target: str, dtype: Any) -> None:
    pytest.importorskip("triton", reason="needs triton")
    x, bias = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype), floats(1, 2, 256, 256)

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(flash_attention(x, x, x, bias=bias).astype(jnp.float32))

    lowerings = lowerings_of(jax.grad(loss, (0, 1)), [x, bias], resolve(target))
    names = {lowering.func.name.removeprefix("flash_attention_") for lowering in lowerings}
    assert names == {"forward", "backward_key", "backward_query", "backward_term"}
