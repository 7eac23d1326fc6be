"""Kernels on 8 virtual devices: the cost of dividing their calls when they are compiled, and attention in a ring.

XLA fixes the number of devices when it starts, so a process of its own measures, `python -m bench.sharding`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.result import Result
from bench.timing import medians
from tilekern.distributed import ring_attention
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import reference as normalized
from tilekern.kernels.rms_norm import rms_norm

ROOT = Path(__file__).parents[1]
DEVICES, ROUNDS = 8, 5
PARTITION_LIMIT = 1.2


def measure() -> Iterator[Result]:
    """All results of this file."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    command, environment = [sys.executable, "-m", "bench.sharding"], {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    for line in done.stdout.splitlines():
        yield Result(**json.loads(line))


# --- partitioning -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A function of arrays whose sizes are multiples of a unit, and the axes a and b of a mesh that divide them."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    specs: tuple[P, ...]
    out: P


CASES = {
    "matmul": Case(
        matmul, jnp.matmul, lambda n: ((64 * n, 256), (256, 512)), (P("a", None), P(None, "b")), P("a", "b")
    ),
    "rms_norm": Case(rms_norm, normalized, lambda n: ((64 * n, 512), (512,)), (P("a", None), P()), P("a", None)),
    "attention": Case(
        partial(flash_attention, causal=True),
        partial(jax.nn.dot_product_attention, is_causal=True),
        lambda n: ((8, 64 * n, 8, 64),) * 3,
        (P("a", None, "b", None),) * 3,
        P("a", None, "b", None),
    ),
}


def partitioning() -> Iterator[Result]:
    """Milliseconds to trace, lower and compile: divided by the rule, beside a `jax.shard_map` of the call by hand."""
    unit = 4
    for name, case in CASES.items():
        for gradient in (False, True):
            seconds: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for how in ("explicit", "auto", "shard_map"):
                    unit += 4  # of another size, so that no cache has the program
                    for who, function in (("", case.kernel), ("jnp ", case.plain)):
                        samples = seconds.setdefault(who + how, [])
                        samples.append(_compiled(case, function, how, gradient, unit))
            values = {who: statistics.median(samples) * 1e3 for who, samples in seconds.items()}
            task = f"{name}, {'gradient' if gradient else 'forward'}"
            for how in ("explicit", "auto"):
                ratio = statistics.median(a / b for a, b in zip(seconds[how], seconds["shard_map"], strict=True))
                yield Result(
                    f"partition {task}, {how}, over shard_map",
                    "ms",
                    values[how],
                    PARTITION_LIMIT,
                    "ratio",
                    values["shard_map"],
                    ratio,
                )
                yield Result(f"compile {task}, {how}, over jnp", "ms", values[how], None, "ratio", values[f"jnp {how}"])


def _compiled(case: Case, function: Callable[..., Any], how: str, gradient: bool, unit: int) -> float:
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("a", "b"), (kind,) * 2)
    if how == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=case.specs, out_specs=case.out)
    pairs = zip(case.shapes(unit), case.specs, strict=True)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in pairs]

    def loss(*arrays: Any) -> Any:
        return (function(*arrays) ** 2).sum()

    call = jax.jit(jax.grad(loss, tuple(range(len(types)))) if gradient else lambda *arrays: function(*arrays))
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        call.lower(*types).compile()
    return time.perf_counter() - start


# --- a ring -----------------------------------------------------------------------------------------------------------


def ring() -> Iterator[Result]:
    """Attention of a sequence on 8 devices, beside one device: the time, and the memory of a device with its arrays."""
    shape = (1, 4096, 4, 64)
    for gradient in (False, True):
        calls: dict[int, Callable[[], Any]] = {}
        nbytes: dict[int, int] = {}
        for devices in (1, DEVICES):
            compiled = _attention(devices, gradient, jax.ShapeDtypeStruct(shape, jnp.float32))
            arrays = [jax.device_put(jnp.ones(shape), s) for s in compiled.input_shardings[0]]
            calls[devices] = partial(compiled, *arrays)
            memory = compiled.memory_analysis()
            parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
            nbytes[devices] = sum(parts)
        seconds = medians({str(n): call for n, call in calls.items()})
        name = f"attention, {'gradient' if gradient else 'forward'}, in a ring of {DEVICES} over one device"
        yield Result(name, "ms", seconds[str(DEVICES)] * 1e3, None, "ratio", seconds["1"] * 1e3)
        yield Result(f"{name}, memory of a device", "MB", nbytes[DEVICES] / 1e6, None, "ratio", nbytes[1] / 1e6)


def _attention(devices: int, gradient: bool, x: Any) -> Any:
    function: Any = partial(flash_attention, causal=True)
    if devices > 1:
        mesh, part = jax.make_mesh((devices,), ("time",), (AxisType.Auto,)), P(None, "time")
        local = partial(ring_attention, axis_name="time", causal=True, layout="zigzag")
        function = jax.shard_map(local, mesh=mesh, in_specs=part, out_specs=part)
    call = jax.grad(lambda *arrays: (function(*arrays) ** 2).sum(), (0, 1, 2)) if gradient else function
    return jax.jit(lambda *arrays: call(*arrays)).lower(x, x, x).compile()


if __name__ == "__main__":
    for result in (*partitioning(), *ring()):
        print(json.dumps(asdict(result)), flush=True)
