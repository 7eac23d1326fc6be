"""The interpreter runs real shapes in the time that a CI has."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tilekern as tk
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.testing import assert_close, in_float64


@pytest.mark.parametrize("blocks", [{}, {"block_q": 32, "block_k": 32}], ids=["schedule", "32x32"])
def test_attention_of_512_queries_and_4_heads_takes_no_two_seconds(blocks: dict[str, int]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 512, 4, 64), np.float32)
    traced = flash_attention_forward.trace(q, k, v, Extras(), config=Config(0.125), return_logsumexp=False, **blocks)
    begin = time.process_time()
    out, *_ = tk.interpret(traced)(q, k, v, Extras())
    assert time.process_time() - begin < 2
    oracle, _ = in_float64(reference, q, k, v)
    low, _ = reference(q, k, v, dtype=q.dtype)
    assert_close(out, oracle, low, length=512)
