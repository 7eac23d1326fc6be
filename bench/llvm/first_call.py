"""Print the seconds of the first call of attention in this process: trace, lower, compile and run on small arrays.

python -m bench.llvm.first_call ours|theirs
"""

from __future__ import annotations

import sys
import time
from functools import partial

import jax
import llvmlite.binding  # noqa: F401 -- imports are not what is measured
import numpy as np

from tilekern.kernels.flash_attention import flash_attention

CONTESTANTS = {"ours": partial(flash_attention, target="cpu:llvm"), "theirs": jax.nn.dot_product_attention}


def main(who: str) -> None:
    """Print the seconds of the first call of a contestant, "ours" or "theirs", on arrays that are made before."""
    jax.config.update("jax_enable_compilation_cache", False)
    numbers = np.random.default_rng(0).standard_normal((1, 512, 2, 64), np.float32)
    x = jax.block_until_ready(jax.device_put(numbers))
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(CONTESTANTS[who])(x, x, x))
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1])
