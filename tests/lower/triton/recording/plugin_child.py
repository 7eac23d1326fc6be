"""A process that runs functions by all of JAX and its CUDA plugin on a pretended GPU, which records their launches.

Between the driver's lines stands one for each step, `{"call": "step", "name": ...}`, and one for each error of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from bench.gpu.pretended.install import install
from tilekern.errors import TargetError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.softmax import softmax

Step = Callable[[], Any]


@tk.kernel(out_type=lambda x: (), donate=("x",))
def doubled(x):
    i = tk.parallel(x.shape[0], 64)
    x[i] = x[i] * 2


BINS = jax.ShapeDtypeStruct((16,), jnp.int32)


@tk.kernel(out_type=lambda x: (tk.Zeros(BINS), tk.Sum(BINS)))
def binned(x, counts, sums):
    i = tk.parallel(x.shape[0], 64)
    counts.at[x[i]].add(1)
    sums.at[x[i]].add(1)


def steps() -> Iterator[tuple[str, Step]]:
    """Functions by name; each runs at least one kernel of tilekern."""
    x, w = jnp.ones((512, 1024), jnp.bfloat16), jnp.ones(1024, jnp.bfloat16)
    square, vector = jnp.ones((512, 512), jnp.bfloat16), np.ones(1000, np.float32)
    q = jnp.ones((1, 256, 4, 64), jnp.bfloat16)
    attention = jax.jit(lambda q: flash_attention(q, q, q, causal=True))
    yield "eager", lambda: softmax(x)
    yield "jit", lambda: jax.jit(matmul)(square, square)
    yield "again", lambda: jax.jit(matmul)(square, square)
    yield "donated", lambda: jax.jit(lambda x: doubled(x), donate_argnums=0)(jnp.asarray(vector))
    yield "kept", lambda: jax.jit(lambda x: (doubled(x), x + 1))(jnp.asarray(vector))
    yield "zeros", lambda: jax.jit(binned)(jnp.zeros(256, jnp.int32))
    yield "attention", lambda: attention(q)
    yield "gradient", lambda: jax.jit(jax.grad(lambda q: attention(q).astype(jnp.float32).sum()))(q)
    yield "vmap", lambda: jax.jit(jax.vmap(softmax))(x.reshape(4, 128, 1024))
    yield "scan", lambda: jax.jit(lambda a: jax.lax.scan(lambda c, _: (softmax(c), None), a, None, length=3)[0])(x)
    yield "unaligned", lambda: jax.jit(lambda a: softmax(a.reshape(-1)[3 : 3 + 500 * 1000].reshape(500, 1000)))(x)
    chain = jax.jit(lambda a: softmax(rms_norm(softmax(rms_norm(softmax(rms_norm(a, w)), w)), w)))
    yield "chain", lambda: [jax.block_until_ready(chain(x)) for _ in range(4)]
    yield "exported", lambda: exported()(square, square)
    for target in ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100"):
        yield f"call for {target}", lambda target=target: jax.jit(lambda a: matmul(a, a, target=target))(square)
        yield f"stages for {target}", lambda target=target: matmul_stages(target)(square, square)


def matmul_stages(target: str) -> Any:
    """A kernel compiled in its stages."""
    type_ = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    return matmul.trace(type_, type_).lower(target).compile()


def exported() -> Any:
    """A function that was exported, and read again."""
    types = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 2
    module = jax.export.export(jax.jit(matmul), platforms=("cuda",), disabled_checks=tk.export.checks())(*types)
    return jax.jit(jax.export.deserialize(module.serialize()).call)


def main(folder: Path) -> None:
    """Run all steps; errors of JAX end the process."""
    jax.config.update("jax_platforms", "cuda,cpu")
    install(folder)
    with Path(os.environ["PRETENDED_RECORD"]).open("a") as record:
        for name, step in steps():
            _say(record, call="step", name=name)
            try:
                jax.block_until_ready(step())
            except TargetError as error:
                _say(record, call="error", text=str(error))


def _say(record: TextIO, **entry: Any) -> None:
    record.write(json.dumps(entry) + "\n")
    record.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
