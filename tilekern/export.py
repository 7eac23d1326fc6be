"""Consent to the custom calls of exported programs."""

from __future__ import annotations

import jax

from tilekern.errors import checked
from tilekern.lower.target import BACKENDS


@checked
def checks() -> list[jax.export.DisabledSafetyCheck]:
    """The consent that `jax.export` asks for before it exports kernels for NVIDIA GPUs.

    JAX promises to run exported programs for years, but not programs with a custom call that is not JAX's. The only
    such call is `triton_kernel_call_ffi` of JAX's CUDA plugin. Programs for CPUs and TPUs need no consent.

    The exported program needs no tilekern where it runs: it holds portable code for CPUs, PTX for NVIDIA GPUs of
    compute capability 8.0 or newer, and Mosaic's MLIR for TPUs. A call with a `target=` has the code of that target.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> from tilekern.kernels.softmax import softmax
      >>> export = jax.export.export(jax.jit(softmax), platforms=["cpu", "tpu"], disabled_checks=tk.export.checks())
      >>> program = export(jnp.zeros((4, 8))).serialize()
      >>> jax.export.deserialize(program).call(jnp.zeros((4, 8))).sum()
      Array(4., dtype=float32)
    """
    names = dict.fromkeys(backend.custom_call for backend in BACKENDS.values() if backend.custom_call)
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
