"""Results are the same bits on any number of threads, and in whichever order tasks run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.running import run
from tests.lower.llvm.tasks import process
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.softmax import softmax
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")


@tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)))
def column_sums(x: tk.Ref, out: tk.Ref, *, block: tk.Block = 4) -> None:
    i = tk.parallel(x.shape[0], block)
    out.at[...].add(x[i].sum(axis=0))


@tk.kernel(out_type=lambda where, x: tk.Zeros(jax.ShapeDtypeStruct((7,), x.dtype)))
def scattered_sums(where: tk.Ref, x: tk.Ref, out: tk.Ref, *, block: tk.Block = 4) -> None:
    i = tk.parallel(x.shape[0], block)
    out.at[where[i]].add(x[i], ordered=False)


@tk.kernel(out_type=lambda where, x: tk.Zeros(jax.ShapeDtypeStruct((7,), x.dtype)))
def scattered_maxima(where: tk.Ref, x: tk.Ref, out: tk.Ref, *, block: tk.Block = 4) -> None:
    i = tk.parallel(x.shape[0], block)
    out.at[where[i]].max(x[i])


@tk.kernel(out_type=lambda where, x, *, count: tk.Zeros(jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)))
def scattered_rows(where: tk.Ref, x: tk.Ref, out: tk.Ref, *, count: int, block: tk.Block = 16) -> None:
    i = tk.parallel(x.shape[0], block)
    if jnp.issubdtype(x.dtype, jnp.integer):
        out.at[where[i]].add(x[i])
    else:
        out.at[where[i]].add(x[i], ordered=False)


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    """Numbers of many sizes, whose sum depends on the order of the terms."""
    rng = np.random.default_rng(len(shape))
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)


WHERE = np.random.default_rng(0).integers(0, 7, 1001).astype(np.int32)


CALLS: Mapping[str, Callable[[], Any]] = {
    "attention": lambda: flash_attention(*[numbers(2, 300, 4, 32)] * 3, causal=True),
    "attention bf16": lambda: flash_attention(*[jnp.asarray(numbers(2, 300, 4, 32), jnp.bfloat16)] * 3),
    "matmul": lambda: matmul(numbers(301, 200), numbers(200, 303)),
    "matmul bf16": lambda: matmul(*[jnp.asarray(numbers(200, 200), jnp.bfloat16)] * 2),
    "softmax": lambda: softmax(numbers(201, 303)),
    "rms_norm": lambda: rms_norm(numbers(201, 303), numbers(303)),
    "sums": lambda: column_sums(numbers(1001, 13)),
    "atomic sums": lambda: scattered_sums(WHERE, numbers(1001)),
    "atomic sums of rows": lambda: scattered_rows(WHERE, numbers(1001, 40), count=7),
    "atomic sums of slices": lambda: scattered_rows(WHERE, numbers(1001, 128), count=700),
    "atomic sums of integers": lambda: scattered_rows(WHERE, numbers(1001, 13, dtype=np.int32), count=7),
    "atomic maxima": lambda: scattered_maxima(WHERE, numbers(1001, dtype=jnp.bfloat16)),
}


def digests() -> dict[str, str]:
    """Hashes of the results of each call. All runs in this process must agree."""
    found: dict[str, str] = {}
    for name, call in CALLS.items():
        many = {_digest(call()) for _ in range(3)}
        assert len(many) == 1, name
        found[name] = many.pop()
    return found


def _digest(results: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(results))).hexdigest()


def test_any_number_of_threads() -> None:
    code = "from tests.lower.llvm.test_determinism import digests\nprint(digests())"
    found = {process(code, NPROC=n, PJRT_NPROC=n) for n in ("1", "2", "8")}
    assert len(found) == 1 and all(f"'{name}'" in next(iter(found)) for name in CALLS)


def test_any_order_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[LlvmLowering, Any]] = []
    original = LlvmLowering.run

    def note(lowering: LlvmLowering, *inputs: Any) -> Any:
        def keep(*arrays: Any) -> None:
            seen.append((lowering, arrays))

        jax.debug.callback(keep, *inputs)
        return original(lowering, *inputs)

    monkeypatch.setattr(LlvmLowering, "run", note)
    jax.clear_caches()
    for call in CALLS.values():
        jax.block_until_ready(call())
        jax.effects_barrier()
    monkeypatch.undo()
    jax.clear_caches()
    assert len(seen) >= len(CALLS) and any(lowering.program.tasks > 100 for lowering, _ in seen)
    for lowering, arrays in seen:
        inputs = [np.asarray(x) for x in arrays]
        results = [_digest(run(lowering, inputs, seed=seed)) for seed in (None, 1, 2)]
        assert len(set(results)) == 1, lowering.func.name
