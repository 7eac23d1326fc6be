"""All features at once, values and gradients, by the rule; and each by itself where it has corners of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.tree_util import Partial

from tests.kernels.flash_attention.features import Featured, features, grads, judge_all
from tilekern.kernels.flash_attention import block_map, flash_attention, reference

BLOCKS = {"block_q": 16, "block_k": 32, "backward_block_q": 32, "backward_block_k": 16}
ATTEND = partial(flash_attention, return_logsumexp=True)

# Each example compiles a dozen programs; in interpreters these are slow, too.
EXAMPLES = {"xla": 16, "llvm": 16, "triton": 2, "mosaic": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_values_and_gradients_of_all_features(dtype: str, backend: str) -> None:
    examples = max(1, EXAMPLES[backend] * settings().max_examples // 20 // (1 if dtype == "float32" else 4))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        featured = data.draw(features(dtype, longest=70 if backend in ("xla", "llvm") else 17))
        blocks = data.draw(st.sampled_from([{}, BLOCKS])) if backend in ("xla", "llvm") else {}
        judge_all(grads(ATTEND, featured, **blocks), featured)

    check()
