"""Print the seconds of a first call in this process, by the wall and of the processor.

python -m bench.llvm.first_call ours|theirs attention|gradient|lowering|import

`attention` and `gradient` trace, lower, compile and run on small arrays. `lowering` traces and lowers the gradient of a
transformer of two layers. `import` imports `tilekern`, or `jax` alone; for all else imports are not measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

WORK = ("attention", "gradient", "lowering", "import")


def main(who: str, work: str) -> None:
    """Print the seconds of the work of a contestant, "ours" or "theirs"."""
    step = _imports(who) if work == "import" else _calls(who, work)
    start, before = time.perf_counter(), os.times()
    step()
    wall, after = time.perf_counter() - start, os.times()
    print(wall, after.user - before.user + after.system - before.system)


def _imports(who: str) -> Callable[[], Any]:
    def step() -> None:
        import jax
        import jax.numpy  # noqa: F401

        if who == "ours":
            import tilekern  # noqa: F401

    return step


def _calls(who: str, work: str) -> Callable[[], Any]:
    import jax
    import llvmlite.binding  # noqa: F401
    import numpy as np

    from bench.llvm.two_layers import FUNCTIONS, example, loss

    jax.config.update("jax_enable_compilation_cache", False)
    use = FUNCTIONS[who]
    if work == "lowering":
        return lambda: jax.jit(jax.value_and_grad(lambda *args: loss(use, *args))).lower(*example())
    x = jax.block_until_ready(jax.device_put(np.random.default_rng(0).standard_normal((1, 512, 2, 64), np.float32)))
    function = jax.grad(lambda *args: use.attend(*args).sum(), (0, 1, 2)) if work == "gradient" else use.attend
    return lambda: jax.block_until_ready(jax.jit(function)(x, x, x))


if __name__ == "__main__":
    main(*sys.argv[1:])
