"""Flash attention, forward, against `jax.nn.dot_product_attention`, PyTorch's attention and the machine's peak."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import jax

from bench.llvm.peak import host, peak, share
from bench.llvm.pytorch import Attention, PyTorch, start
from bench.result import Result
from bench.timing import Clock, by_round, clock, take_turns
from tilekern.kernels.flash_attention import flash_attention

LENGTH, HEADS = 4096, 8
RATIO_LIMITS = {
    (64, "float32", False): 0.25,
    (64, "float32", True): 0.12,
    (64, "bfloat16", False): 0.25,
    (64, "bfloat16", True): 0.10,
    (128, "float32", False): 0.40,
    (128, "float32", True): 0.20,
    (128, "bfloat16", False): 0.34,
    (128, "bfloat16", True): 0.13,
}
PYTORCH_LIMITS = {"float32": 0.5, "bfloat16": 0.27}
PEAK_LIMITS = {("float32", False): 0.75}


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is None:
        return
    with start() as pytorch:
        for (width, dtype, causal), limit in RATIO_LIMITS.items():
            yield from compare(Attention(LENGTH, HEADS, width, dtype, causal), limit, pytorch)


def compare(case: Attention, limit: float, pytorch: PyTorch | None) -> Iterator[Result]:
    """The results of one case, whose `limit` is for the ratio to `jax.nn`."""
    loop = peak(case.dtype)
    clocks = dict(_clocks(case))
    if loop is not None:
        clocks = {"peak": loop.seconds} | clocks
    if pytorch is not None:
        clocks["pytorch"] = pytorch.clock(case)
    times = take_turns(clocks)
    ours = times["ours"]
    name = f"llvm: attention S={case.length} D={case.width} {case.dtype} {'causal' if case.causal else 'full'}"

    def ratio(label: str, who: str, limit: float) -> Result:
        value, baseline = (statistics.median(times[x]) * 1e3 for x in ("ours", who))
        return Result(f"{name}, {label}", "ms", value, limit, "ratio", baseline, by_round(ours, times[who]))

    yield ratio("to jax.nn", "theirs", limit)
    if pytorch is not None:
        yield ratio(f"to {pytorch.name}", "pytorch", PYTORCH_LIMITS[case.dtype])
    if loop is not None:
        bound = PEAK_LIMITS.get((case.dtype, case.causal))
        yield share(f"{name}, of the peak", case.flops, ours, loop, times["peak"], bound)


def _clocks(case: Attention) -> Iterator[tuple[str, Clock]]:
    shape = (1, case.length, case.heads, case.width)
    q, k, v = (jax.random.normal(key, shape, case.dtype) for key in jax.random.split(jax.random.key(0), 3))
    ours = jax.jit(partial(flash_attention, causal=case.causal, target="cpu:llvm"))
    theirs = jax.jit(partial(jax.nn.dot_product_attention, is_causal=case.causal))
    yield "ours", clock(lambda: ours(q, k, v))
    yield "theirs", clock(lambda: theirs(q, k, v))
