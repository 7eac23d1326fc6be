"""Random attention problems, and the check of a result against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import arrays, assert_close, in_float64, lengths

DTYPES = ("float32", "bfloat16", "float16", "float64")
BLOCKS = (
    {},
    {"block_q": 16, "block_k": 16, "block_n": 1},
    {"block_q": 7, "block_k": 13, "block_n": 3},
    {"block_q": 64, "block_k": 5, "block_n": 2},
)

# The naive computation; compiled without optimizations, which take longer than they save.
naive = jax.jit(reference, static_argnames=("causal", "dtype"), compiler_options={"xla_backend_optimization_level": 0})


@dataclass(frozen=True)
class Problem:
    """Shapes and keywords of an attention; q_offset is an int, or a NumPy array."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    value_width: int
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key and value."""
        rows = (self.queries, self.heads), (self.keys, self.groups), (self.keys, self.groups)
        widths = self.width, self.width, self.value_width
        return tuple((*self.batch, *n, w) for n, w in zip(rows, widths, strict=True))

    def normal(self) -> list[Any]:
        """Query, key and value in float32, always the same; from NumPy, as `jax.random` compiles for every shape."""
        random = np.random.default_rng(0)
        return [random.standard_normal(shape, np.float32) for shape in self.shapes]

    def arrays(self, dtype: str, specials: tuple[float, ...] = ()) -> st.SearchStrategy[tuple[Any, ...]]:
        """Query, key and value."""
        return st.tuples(*(arrays(jnp.dtype(dtype), shape, specials) for shape in self.shapes))


@st.composite
def problems(draw: Any, causal: bool) -> Problem:
    """All kinds of shapes, offsets and scales."""
    batch = draw(st.sampled_from([(2,), (), (2, 3), (1, 0)]))
    queries, keys = (draw(st.one_of(lengths(16), st.just(300))) for _ in range(2))
    heads, groups = draw(st.sampled_from([(4, 2), (3, 3), (5, 1), (2, 2)]))
    width, value_width = draw(st.sampled_from([(8, 8), (20, 12), (5, 16), (64, 32), (8, 1)]))
    keywords: dict[str, Any] = {"causal": causal}
    if draw(st.booleans()):
        keywords["scale"] = draw(st.sampled_from([1.0, 0.25, -0.5, 0.0]))
    if causal:
        keywords["q_offset"] = draw(offsets(batch, queries, keys))
    return Problem(batch, queries, keys, heads, groups, width, value_width, keywords)


def offsets(batch: tuple[int, ...], queries: int, keys: int) -> st.SearchStrategy[Any]:
    """An int, a scalar array, or one for each element of the batch; some queries may see nothing, or all."""
    one = st.one_of(st.integers(-queries - 2, keys + 2), st.sampled_from([0, keys - queries, -(2**31), 2**31 - 1]))
    several = st.lists(one, min_size=int(np.prod(batch)), max_size=int(np.prod(batch)))
    return st.one_of(
        one,
        one.map(lambda n: np.asarray(n, np.int32)),
        several.map(lambda ns: np.asarray(ns, np.int32).reshape(batch)),
    )


def check(q: Any, k: Any, v: Any, *, blocks: dict[str, int] | None = None, **keywords: Any) -> None:
    """`flash_attention` keeps the rule, and treats rows that attend to nothing as promised."""
    with jax.enable_x64(q.dtype == np.float64):
        judge(flash_attention(q, k, v, return_logsumexp=True, **keywords, **(blocks or {})), q, k, v, **keywords)


def judge(results: Any, q: Any, k: Any, v: Any, **keywords: Any) -> None:
    """Out and logsumexp keep the rule."""
    out, logsumexp = map(np.asarray, results)
    oracle, oracle_logsumexp = in_float64(reference, q, k, v, **keywords)
    low, low_logsumexp = naive(q, k, v, **keywords)
    if q.dtype.itemsize == 2:  # of such inputs, too, the logsumexp is in float32
        low, _ = naive(q, k, v, dtype=q.dtype, **keywords)
    length = q.shape[-1] + k.shape[-3]
    assert_close(out, oracle, low, length=length)
    assert_close(logsumexp, oracle_logsumexp, low_logsumexp, length=length)
    nothing = np.isneginf(oracle_logsumexp)
    assert (out[nothing] == 0).all() and np.isneginf(logsumexp[nothing]).all()
