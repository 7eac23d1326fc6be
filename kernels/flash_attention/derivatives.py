"""The derivatives of flash attention: tangent kernel, backward op, and their transposes.

The tangent kernel is linear in tangents. The backward op, of several kernels, is linear in cotangents. Each is the
other's transpose. Along all other inputs, both are differentiated by their definition in plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation

import tilekern as tk
from tilekern.kernels.derivatives import along
from tilekern.kernels.flash_attention import definition, schedules
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.backward import flash_attention_backward_key, flash_attention_backward_query
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.mods import Place, abstract_places, carried_by, place_of, places
from tilekern.kernels.flash_attention.scores import factor, sink_logits
from tilekern.kernels.flash_attention.segments import ranges
from tilekern.kernels.flash_attention.tangent import flash_attention_tangent
from tilekern.kernels.flash_attention.terms import dims_of_sums, flash_attention_backward_term, put


@flash_attention_forward.defjvp
def _forward_jvp(
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    config: Config,
    return_logsumexp: bool,
    return_residuals: bool,
    **blocks: int,
) -> Any:
    out, logsumexp, residuals = flash_attention_forward(
        *primals, config=config, return_logsumexp=return_logsumexp, return_residuals=True, **blocks
    )
    out = checkpoint_name(out, "flash_attention_out")
    logsumexp, *rows = (
        x if x is None else checkpoint_name(x, "flash_attention_logsumexp") for x in (logsumexp, *residuals)
    )
    residuals = Residuals(*rows)
    moved = _tangents(primals[3], *tangents)
    dout, dlogsumexp = flash_attention_tangent(*primals, out, residuals, moved, config=config)
    # Residuals have no tangents of their own: the definition computes weights from scores alone.
    returned, moved_rows = (residuals, Residuals(None, None)) if return_residuals else (None, None)
    return (out, logsumexp, returned), (dout, dlogsumexp if return_logsumexp else None, moved_rows)


def _tangents(extras: Extras, query: Any, key: Any, value: Any, moved: Extras) -> Tangents:
    carried = ()
    if extras.score_mod is not None:
        carried = tuple(jax.tree.leaves((moved.score_mod.args, moved.score_mod.keywords), is_leaf=_is_none))
    return Tangents(query, key, value, moved.bias, moved.sinks, carried)


def _is_none(x: Any) -> bool:
    return x is None


# --- the backward op --------------------------------------------------------------------------------------------------


def _cotangent_types(
    query: Any, key: Any, value: Any, extras: Extras, *unused: Any, needs: Tangents
) -> tuple[Tangents]:
    primals = Tangents(query, key, value, extras.bias, extras.sinks, tuple(carried_by(extras.score_mod)))

    def types(arrays: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) if n else None for x, n in zip(arrays, needs, strict=True)]

    return (Tangents(*types(primals[:5], needs[:5]), carried=tuple(types(primals.carried, needs.carried))),)


@tk.op(out_type=_cotangent_types, linear=("cotangents",))
def flash_attention_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    out: jax.Array,
    residuals: Residuals,
    cotangents: tuple[Any, Any],
    *,
    config: Config,
    needs: Tangents,
    one_kernel: tk.Choice[bool] = False,
    guarded: tk.Choice[bool] = False,
) -> tuple[Tangents]:
    """The transpose of the tangent kernel: cotangents of out and logsumexp -> cotangents of the inputs in `needs`.

    `needs` has a bool for each array: True if its cotangent is needed; the other cotangents are None. With `one_kernel`
    one kernel computes the cotangents of query, key and value. `guarded` is for backends whose dot products depend on
    the shape of tiles in their last bits: if logits are so large that such a difference from the forward kernel would
    matter, the definition computes the cotangents, because it computes all scores of a query in one product.
    """
    arrays = query, key, value, extras, out, residuals, cotangents
    by_kernels = partial(_by_kernels, *arrays, config=config, needs=needs, one_kernel=one_kernel)
    if not guarded:
        return (by_kernels(),)
    (types,) = _cotangent_types(*arrays, needs=needs)
    exponents = residuals.largest * factor(config, extras)
    by_definition = partial(definition.backward, *arrays, config=config, types=types)
    return (cast(Tangents, jax.lax.cond(_any_large(exponents), by_definition, by_kernels)),)


@jax.custom_batching.custom_vmap
def _any_large(x: jax.Array) -> jax.Array:
    """bool[]: True if an exponent of 2 is so large that half a unit in its last place exceeds 2^-16.

    An error of 2^-16 changes powers of 2 by 1e-5.
    """
    limit = jnp.asarray(2.0 ** (jnp.finfo(x.dtype).nmant - 15), x.dtype)
    return jnp.any(jnp.abs(x) > limit)


@_any_large.def_vmap
def _any_large_of_batch(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    """Under `jax.vmap` one result for the whole batch, so that `lax.cond` runs only one branch."""
    return _any_large(x), False


def _by_kernels(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    out: jax.Array,
    residuals: Residuals,
    cotangents: tuple[Any, Any],
    *,
    config: Config,
    needs: Tangents,
    one_kernel: bool,
) -> Tangents:
    """The cotangents that `needs` names, by the backward kernels."""
    wide = residuals.largest.dtype
    dout, dlogsumexp = cotangents
    dout = jnp.zeros_like(out) if dout is None else dout
    delta = jnp.sum(dout.astype(wide) * out.astype(wide), axis=3)
    if dlogsumexp is not None:
        delta = delta - dlogsumexp
    of_keys = extras
    if extras.segments is not None:
        of_keys = extras._replace(ranges=ranges(*reversed(extras.segments)))
    arrays = residuals, dout, delta
    dquery = dkey = dvalue = dbias = dsinks = None
    together = one_kernel and needs.query and (needs.key or needs.value)
    if needs.key or needs.value:
        dkey, dvalue, dquery = flash_attention_backward_key(
            query, key, value, of_keys, *arrays, config=config, with_query=together
        )
        dkey, dvalue = dkey.astype(key.dtype), dvalue.astype(value.dtype)
    if together:
        dquery = (dquery * wide.type(config.scale)).astype(query.dtype)
    elif needs.query:
        dquery = flash_attention_backward_query(query, key, value, extras, *arrays, config=config)
    if needs.sinks:
        dsinks = _of_sinks(config, extras, residuals, delta)

    first = 0 if extras.bias is None else 1
    of_term = partial(_term, query, key, value, extras, of_keys, arrays, config)
    if needs.bias and extras.bias is not None:
        dbias = of_term(0, place_of(extras.bias.shape), extras.bias, []).reshape(extras.bias.shape)

    def of_read(number: int, place: Place, like: jax.Array, integers: Sequence[jax.Array]) -> jax.Array:
        return of_term(first + number, place, like, integers)

    carried = _of_carried(extras.score_mod, needs.carried, query, of_read)
    return Tangents(dquery, dkey if needs.key else None, dvalue if needs.value else None, dbias, dsinks, carried)


def _of_sinks(config: Config, extras: Extras, residuals: Residuals, delta: jax.Array) -> jax.Array:
    """float[N], the cotangents of the sinks. A sink has a weight but no value: -Σ p δ over the rows of a head."""
    wide = residuals.largest.dtype
    above = sink_logits(config, extras, extras.sinks, wide) - residuals.largest
    weights = jnp.exp2(above * wide.type(factor(config, extras)) - residuals.log_sum)
    return -jnp.sum(weights * delta, axis=(0, 1)).astype(extras.sinks.dtype)


def _of_carried(
    score_mod: Any, needs: Sequence[bool], query: jax.Array, of_term: Callable[..., jax.Array]
) -> tuple[Any, ...]:
    """The cotangent of each array that a `score_mod` carries, a sum over its reads; None if not needed."""
    leaves = carried_by(score_mod)
    sums: list[Any] = [jnp.zeros_like(x) if n else None for x, n in zip(leaves, needs, strict=True)]
    if any(needs):
        for number, (place, integers) in enumerate(_reads(score_mod, query.shape[0], query.shape[2])):
            if sums[place.array] is not None:
                sums[place.array] += of_term(number, place, leaves[place.array], integers)
    return tuple(sums)


flash_attention_backward.schedule("tpu")(schedules.tpu_backward)
flash_attention_backward.schedule("cpu")(schedules.cpu_backward)


def _term(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    of_keys: Extras,
    arrays: tuple[Any, ...],
    config: Config,
    term: int,
    place: Place,
    like: jax.Array,
    integers: Sequence[jax.Array],
) -> jax.Array:
    """The cotangent of the array of a term, of the shape of `like`."""
    dims = dims_of_sums(place)
    own = of_keys if dims[3] and not dims[2] else extras
    sums = flash_attention_backward_term(query, key, value, own, *arrays, config=config, term=term, dims=dims)
    return put(place, sums, like, integers)


def _reads(mod: Any, batch: int, heads: int) -> list[tuple[Place, list[jax.Array]]]:
    """Each place at which a `score_mod` reads an array, with the place's entries made of b and n, int32[B, N] each."""

    def traced(b: jax.Array, n: jax.Array) -> list[list[jax.Array]]:
        return [[jnp.asarray(e) for e in place.entries if not isinstance(e, (str, int))] for place in places(mod, b, n)]

    each_head = jax.vmap(traced, (None, 0), axis_size=heads)
    integers = jax.vmap(each_head, (0, None), axis_size=batch)(jnp.arange(batch), jnp.arange(heads))
    return list(zip(abstract_places(mod), integers, strict=True))


# --- transposes, and derivatives of derivatives -----------------------------------------------------------------------


@flash_attention_tangent.deftranspose
def _tangent_transpose(cotangents: tuple[Any, Any], *inputs: Any, config: Config) -> dict[str, Tangents]:
    *primals, tangents = inputs
    needs = Tangents(*(t is not None for t in tangents[:5]), carried=tuple(t is not None for t in tangents.carried))
    (transposed,) = flash_attention_backward(*primals, cotangents, config=config, needs=needs)
    return {"tangents": transposed}


@flash_attention_backward.deftranspose
def _backward_transpose(cotangents: tuple[Tangents], *inputs: Any, config: Config) -> dict[str, tuple[Any, ...]]:
    *primals, linear = inputs
    transposed = flash_attention_tangent(*primals, *cotangents, config=config)
    return {"cotangents": tuple(None if x is None else t for t, x in zip(transposed, linear, strict=True))}


@flash_attention_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, config: Config) -> tuple[Any, Any]:
    *arrays, moved = primals
    function = partial(definition.tangent, tangents=moved, config=config)
    return flash_attention_tangent(*primals, config=config), along(function, arrays, tangents[:-1])


@flash_attention_backward.defjvp
def _backward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, config: Config, needs: Tangents
) -> tuple[Any, Any]:
    *arrays, cotangents = primals
    (types,) = _cotangent_types(*primals, needs=needs)
    function = partial(definition.backward, cotangents=cotangents, config=config, types=types)
    results = flash_attention_backward(*primals, config=config, needs=needs)
    return results, (along(function, arrays, tangents[:-1]),)
