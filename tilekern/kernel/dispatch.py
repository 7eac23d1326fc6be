"""What JAX does with a call: it runs it, lowers it for a platform, differentiates it, and batches it.

A call is lowered to a jitted program, one object for each target, so that many calls share one computation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes, source
from tilekern.errors import GatherWarning, TargetError
from tilekern.kernel.divided import gather_warnings, on_explicit_mesh, partitioned
from tilekern.kernel.primitive import Callee, bind, kernel_call_p, runner
from tilekern.lower.target import Target, check_runs_here, on_platform

_SHARD_MAP = "wrap the call in jax.shard_map: then each device calls the kernel for its own part"


def call(callee: Callee, *operands: Any) -> list[Any]:
    """The results of a call."""
    aligned = _meshes.alike(operands)
    if any(_meshes.is_divided(jax.typeof(x)) for x in aligned):
        if not any(isinstance(x, _jax.Tracer) for x in aligned):
            return list(_eager_program(callee)(*aligned))
        if callee.divisible is not None:
            return list(on_explicit_mesh(callee, aligned))
    return bind(callee, *aligned)


def _eager_program(callee: Callee) -> Callable[..., Sequence[jax.Array]]:
    """The call under jit, for calls outside of it."""
    return callee.once(("eager",), lambda: _jax.jit_checked(partial(call, callee), callee.name))


def _eager(*operands: Any, callee: Callee) -> Sequence[jax.Array]:
    run = runner.get()
    with jax.disable_jit(False):  # else jit would run this function again
        return _eager_program(callee)(*operands) if run is None else run(callee, operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any | None], *, callee: Callee) -> tuple[Any, Any]:
    with _jax.own_functions():
        return callee.jvp(primals, tangents)


def _transpose(cotangents: Sequence[Any | None], operands: Sequence[Any], *, callee: Callee) -> Sequence[Any | None]:
    with _jax.own_functions():
        return callee.transpose(cotangents, operands)


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, callee: Callee) -> tuple[Any, list[int]]:
    """vmap: one call of the batched callee; operands that no call writes to are not copied."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    with _jax.own_functions():
        batched, batch_dims = callee.batched(size, tuple(dims))
        stacked = [_stacked(x, d, w, size) for x, d, w in zip(operands, dims, batch_dims, strict=True)]
        results = call(batched, *stacked)
    return results, [0] * len(results)


def _stacked(x: Any, dim: int | None, batch_dim: int | None, size: int) -> Any:
    if dim is None and batch_dim is not None:
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    return x if dim is None or batch_dim is None or dim == batch_dim else jnp.moveaxis(x, dim, batch_dim)


# --- lowering -------------------------------------------------------------------------------------------------------


def _run(platform: str, site: _meshes.Site, *operands: Any, callee: Callee) -> Sequence[jax.Array]:
    with _jax.own_functions():
        return _program(callee, platform, site)(*operands)


def _program(callee: Callee, platform: str, site: _meshes.Site) -> Callable[..., Sequence[jax.Array]]:
    """The jitted program of a call for a platform.

    Raises:
      TargetError: the target is another GPU than this machine's, or XLA would have to partition the program among
        devices, and cannot.
    """
    target = on_platform(platform, callee.asked, site.exporting)
    if not site.exporting:
        check_runs_here(target, callee.name)
    if site.explicit:
        return callee.program_on_mesh(target)
    if site.gathered and _is_divided_at(callee, site, target):
        return callee.once(("program in parts", target), lambda: partitioned(callee))
    program, partitioning = callee.once(("program", target), lambda: callee.program(target))
    if site.divided and partitioning == "refused":
        raise _not_partitioned(callee, site)
    if site.gathered and site.divided and partitioning == "replicated":
        _warn_gathered(callee, site)
    return program


def _is_divided_at(callee: Callee, site: _meshes.Site, target: Target) -> bool:
    """True if XLA divides a call on automatic axes."""
    if site.exporting or not site.has_devices or target.platform not in ("cpu", "cuda"):
        return False
    # JAX would free the host's functions that print or assert in a part's program, before it runs.
    rule = callee.rule
    return rule is not None and bool(rule.sizes) and not callee.calls_host(target)


def _not_partitioned(callee: Callee, site: _meshes.Site) -> TargetError:
    rule, by_rule = callee.sharding, ""
    if rule is not None and rule.sizes:
        by_rule = (
            f". It may divide dims that have one of the names {', '.join(rule.sizes)} in the rule\n    {rule.notation}"
        )
    return TargetError(
        f"XLA cannot divide the kernel {callee.name} among TPUs",
        expected="a program for one device, or a call in jax.shard_map over all axes of the mesh",
        got=f"a program that XLA divides among {site.divided}",
        fix=_SHARD_MAP + by_rule,
    )


def _warn_gathered(callee: Callee, site: _meshes.Site) -> None:
    shape = (callee.name, site.gathered, *((o.shape, o.dtype) for o in callee.outputs))
    if shape in gather_warnings:
        return
    gather_warnings[shape] = None
    message = (
        f"XLA divides a program among {site.divided}, but not its call of {callee.name}: each device gathers the "
        f"arguments, {site.gathered} bytes at most, and computes the whole result.\n  fix: {_SHARD_MAP}"
    )
    loc = source.current()
    warnings.warn_explicit(message, GatherWarning, loc.file, loc.line)


_served_platforms: set[str] = set()


def serve_platform(platform: str) -> None:
    """Let calls on a platform of JAX have targets of that platform.

    Raises:
      NotImplementedError: JAX has no such platform.
    """
    if platform not in _served_platforms:
        _jax.register_lowering(kernel_call_p, partial(_run, platform), platform)
        _served_platforms.add(platform)


kernel_call_p.def_impl(_eager)
_jax.register_lowering(kernel_call_p, partial(_run, "any other"))
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    serve_platform(_platform)
_jax.register_rules(kernel_call_p, batch=_batch)
_jax.register_derivatives(kernel_call_p, _jvp, _transpose)
