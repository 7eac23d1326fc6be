"""The ring of `ring_attention`: forward, tangents, cotangents.

A step has the keys of one device. Results of steps merge by their logsumexps. Derivatives need no merge: with result
and logsumexp of the whole sequence, the tangent kernel computes a step's share of the tangents, and the backward
kernels compute a step's share of the cotangents. Both are sums over the steps, and transposes of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation
from jax.custom_derivatives import SymbolicZero

from tilekern import _jax
from tilekern.distributed import linear
from tilekern.ir.types import accumulator
from tilekern.kernels.derivatives import against, along
from tilekern.kernels.flash_attention import checks
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.derivatives import flash_attention_backward
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.scores import LOG2_E, factor
from tilekern.kernels.flash_attention.segments import ranges
from tilekern.kernels.flash_attention.tangent import flash_attention_tangent

Layout = Literal["contiguous", "zigzag"]


type Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Marks(NamedTuple):
    """Arrays without derivatives: segments of queries and keys [B, T], [B, S]; lengths of keys in the whole [B]."""

    of_queries: Any
    of_keys: Any
    lengths: Any


@dataclass(frozen=True)
class Ring:
    """The static arguments of an attention in a ring.

    Attributes:
      attention: as for the kernels; offset and window count positions of the whole sequence.
      axis_name: of the mesh axis.
      devices: of the axis.
      layout: of the parts.
      target: as in each call of a kernel.
    """

    attention: Config
    axis_name: str
    devices: int
    layout: Layout
    target: str | None

    def runs(self, x: Any) -> list[Any]:
        """The runs of a part [B, T, ...] that are contiguous in the whole sequence; for None as many Nones."""
        if self.layout == "contiguous":
            return [x]
        return [None, None] if x is None else jnp.split(x, 2, axis=1)

    def starts(self, device: Any, length: int) -> list[Any]:
        """The first position of each run of a device's part of `length` tokens."""
        if self.layout == "contiguous":
            return [device * length]
        half = length // 2
        return [device * half, (2 * self.devices - 1 - device) * half]

    def send(self, tree: Any) -> Any:
        """The arrays of the previous device in the ring."""
        ring = [(n, (n + 1) % self.devices) for n in range(self.devices)]
        return lax.ppermute(tree, self.axis_name, ring)

    def around(self, moving: Any, held: Any, free: Any, step: Step, hold: bool = True) -> tuple[Any, Any]:
        """(held, free) after a way around the ring: `step` maps (device, the device's arrays, held, free) to new sums.

        A step runs beside the exchange for the next step. With `hold` this exchange waits for the `held` sums of the
        previous step, because otherwise all arrays might be in memory at once. JAX cannot transpose a loop with `hold`.
        """
        device = lax.axis_index(self.axis_name)
        for number in range(self.devices):
            following = self.send(moving) if number + 1 < self.devices else None
            held, free = step((device - number) % self.devices, moving, held, free)
            if hold:
                following, held = lax.optimization_barrier((following, held))
            moving = following
        return held, free


class _Pair(NamedTuple):
    """A run of queries and a run of keys, by their numbers, with the arguments of the kernels."""

    row: int
    key: int
    config: Config
    extras: Extras


def _pairs(ring: Ring, source: Any, marks: Marks, query: Any, key: Any) -> Iterator[_Pair]:
    """Each run of this device's queries with each run of the keys of device `source`."""
    here = ring.starts(lax.axis_index(ring.axis_name), query.shape[1])
    there = ring.starts(source, key.shape[1])
    count, config = len(here), ring.attention
    sizes = checks.Sizes(query.shape[:1], query.shape[1] // count, key.shape[1] // count, query.shape[2])
    of_queries, of_keys = ring.runs(marks.of_queries), ring.runs(marks.of_keys)
    for row, first_query in enumerate(here):
        for column, first in enumerate(there):
            at = first_query - first if config.positional else 0
            offsets, offset, window = checks.positions(at, config.window, config.causal, sizes)
            pair = None if of_queries[row] is None else (of_queries[row], of_keys[column])
            ids = checks.segments(pair, sizes)  # int32; wider ids become ranks among the ids of the pair
            lengths = None if marks.lengths is None else jnp.clip(marks.lengths - first, 0, sizes.keys)
            extras = Extras(
                q_offset=offsets, segments=ids, ranges=None if ids is None else ranges(*ids), kv_lengths=lengths
            )
            yield _Pair(row, column, replace(config, offset=offset, window=window), extras)


def _joined(runs: Sequence[Any]) -> Any:
    return runs[0] if len(runs) == 1 else jnp.concatenate(runs, axis=1)


# --- forward ----------------------------------------------------------------------------------------------------------


class _Partial(NamedTuple):
    """A result over some of the keys: [B, T, N, Hv] and logsumexps [B, T, N], in float32."""

    out: Any
    logsumexp: Any


def _merged(total: _Partial | None, part: _Partial) -> _Partial:
    if total is None:
        return part
    logsumexp = jnp.logaddexp(total.logsumexp, part.logsumexp)
    first, second = (p.out * _weights(p.logsumexp, logsumexp)[..., None] for p in (total, part))
    return _Partial(first + second, logsumexp)


def _weights(part: Any, total: Any) -> Any:
    """exp(part - total); 0 for a row without keys."""
    return jnp.exp(part - jnp.where(total == -jnp.inf, 0, total))


def _whole(
    ring: Ring, query: Any, key: Any, value: Any, sinks: Any, marks: Marks, *, hold: bool = True
) -> tuple[Any, Any]:
    """The result and the logsumexps; differentiable by JAX at any order, with the keys of all steps in memory."""
    queries, wide = ring.runs(query), accumulator(query.dtype)

    def step(source: Any, arrays: Any, rows: list[_Partial | None], _: None) -> Any:
        k, v, of_keys = arrays
        keys, values, merged = ring.runs(k), ring.runs(v), [*rows]
        for at in _pairs(ring, source, marks._replace(of_keys=of_keys), query, k):
            out, logsumexp, _ = flash_attention_forward(
                queries[at.row],
                keys[at.key],
                values[at.key],
                at.extras,
                config=at.config,
                return_logsumexp=True,
                target=ring.target,
            )
            merged[at.row] = _merged(merged[at.row], _Partial(out.astype(wide), logsumexp))
        return merged, None

    rows, _ = ring.around((key, value, marks.of_keys), [None for _ in queries], None, step, hold)
    out, total = (_joined(parts) for parts in zip(*cast(list[_Partial], rows), strict=True))
    if sinks is not None:
        with_sinks = jnp.logaddexp(total, sinks.astype(wide))
        out, total = out * _weights(total, with_sinks)[..., None], with_sinks
    return out.astype(query.dtype), total


def attend(ring: Ring, query: Any, key: Any, value: Any, sinks: Any, marks: Marks) -> tuple[Any, Any]:
    """The result [B, T, N, Hv] and the logsumexps [B, T, N] of this device's queries.

    All arrays vary over the same axes of the mesh.
    """
    return _attend(ring, query, key, value, sinks, marks)


_attend = cast(Any, jax.custom_jvp)(_whole, nondiff_argnums=(0,))


def _attend_jvp(ring: Ring, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    results = _attend(ring, *primals)
    names = "flash_attention_out", "flash_attention_logsumexp"
    out, total = (checkpoint_name(x, name) for x, name in zip(results, names, strict=True))
    moved = [None if t is None or isinstance(t, SymbolicZero) else t for t in tangents[:4]]
    leaves, tree = _jax.flatten((*primals, out, total))
    function = _Derivative(ring, tree, tuple(t is not None for t in moved), (True, True))
    return (out, total), tuple(linear.call(function, *leaves, *(t for t in moved if t is not None)))


_attend.defjvp(_attend_jvp, symbolic_zeros=True)


# --- derivatives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Derivative:
    """The function from tangents of the arguments to tangents of result and logsumexps; with `reverse` its transpose.

    The primals are query, key, value, sinks, marks, result and logsumexps. Result and logsumexps are functions of the
    other primals, whose derivatives include theirs.

    Attributes:
      ring: the static arguments.
      tree: of the primals.
      arguments: for query, key, value and sinks True if a tangent is present; with `reverse` if a cotangent is needed.
      results: for result and logsumexps True if a tangent is needed; with `reverse` if a cotangent is present.
      reverse: True from cotangents of the results to cotangents of the arguments.
    """

    ring: Ring
    tree: Any
    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    reverse: bool = False

    @property
    def num_primals(self) -> int:
        """The number of primals."""
        return self.tree.num_leaves

    @property
    def like(self) -> Sequence[int]:
        """For each result the number of a primal of the same type."""
        needs = self.arguments if self.reverse else self.results
        first = 0 if self.reverse else self.num_primals - 2
        return [first + n for n, need in enumerate(needs) if need]

    def run(self, *operands: Any) -> Sequence[Any]:
        """The results."""
        primals, moved = self._split(operands)
        results = _cotangents(self, primals, moved) if self.reverse else _tangents(self, primals, moved)
        needs = self.arguments if self.reverse else self.results
        return [x for x, need in zip(results, needs, strict=True) if need]

    def along(self, tangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
        """The derivative of the results along tangents of query, key, value and sinks."""
        (*arrays, marks, out, total), moved = self._split(operands)
        placed = self.tree.unflatten(tangents)[:4]
        whole = partial(_whole, self.ring, marks=marks, hold=False)
        if not self.reverse:
            results = along(lambda *arrays: along(whole, arrays, moved), arrays, placed)
            return [x for x, need in zip(results, self.results, strict=True) if need]
        pairs = zip((out, total), moved, strict=True)
        cotangents = tuple(jnp.zeros_like(x) if c is None else c for x, c in pairs)
        results = along(lambda *arrays: against(whole, arrays, cotangents, self.arguments), arrays, placed)
        return [x for x, need in zip(results, self.arguments, strict=True) if need]

    def transposed(self, needs: Sequence[bool], present: Sequence[bool]) -> _Derivative:
        """The function in the other direction; see `linear.Linear`."""
        arguments, results = (present, needs) if self.reverse else (needs, present)
        return replace(
            self,
            arguments=_both(self.arguments, arguments),
            results=_both(self.results, results),
            reverse=not self.reverse,
        )

    def _split(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """The primals; and a tangent or None for each argument, with `reverse` a cotangent or None for each result."""
        linear = iter(operands[self.num_primals :])
        moves = self.results if self.reverse else self.arguments
        return self.tree.unflatten(operands[: self.num_primals]), [next(linear) if m else None for m in moves]


def _both(present: Sequence[bool], flags: Sequence[bool]) -> tuple[bool, ...]:
    """For each operand True if it is present and its flag is True; `flags` has entries for present operands only.

    Example: present (True, False, True), flags (False, True) -> (False, False, True).
    """
    remaining = iter(flags)
    return tuple(is_present and next(remaining) for is_present in present)


def _residuals(ring: Ring, total: Any) -> list[Residuals]:
    """For each run of logsumexps the `Residuals` that the kernels of derivatives take, in units of logits."""
    logits = jnp.where(total == -jnp.inf, 0, total) * (LOG2_E / factor(ring.attention, Extras()))
    return [Residuals(run, jnp.zeros_like(run)) for run in ring.runs(logits)]


def _after(earlier: Any, *arrays: Any) -> Sequence[Any]:
    """The arrays, not available before `earlier`: else XLA would keep what the forward pass received until then."""
    return lax.optimization_barrier((*arrays, earlier))[:-1]


def _tangents(of: _Derivative, primals: tuple[Any, ...], moved: Sequence[Any]) -> tuple[Any, Any]:
    """The tangents of result and logsumexps: around the ring, each step adds its share."""
    ring, (query, key, value, sinks, marks, out, total) = of.ring, primals
    of_query, of_key, of_value, of_sinks = moved
    wide = total.dtype
    rows = [*zip(*map(ring.runs, (query, out, of_query)), _residuals(ring, total), strict=True)]

    def step(source: Any, arrays: Any, sums: Any, _: None) -> Any:
        *pair, of_keys, dk, dv = arrays
        columns = [*zip(*map(ring.runs, (*pair, dk, dv)), strict=True)]
        outs, totals = map(list[Any], sums)
        for at in _pairs(ring, source, marks._replace(of_keys=of_keys), query, pair[0]):
            (q, o, dq, residuals), (k, v, *ds) = rows[at.row], columns[at.key]
            of_out, of_total = flash_attention_tangent(
                q, k, v, at.extras, o, residuals, Tangents(dq, *ds), config=at.config, target=ring.target
            )
            outs[at.row] += of_out.astype(wide)
            totals[at.row] += of_total
        return (outs, totals), None

    sums = tuple([jnp.zeros_like(run, wide) for run in ring.runs(x)] for x in (out, total))
    if any(of.arguments[:3]):
        moving = (*_after(total, key, value), marks.of_keys, of_key, of_value)
        sums, _ = ring.around(moving, sums, None, step)
    dout, dtotal = map(_joined, sums)
    if of_sinks is not None:
        moves = _weights(sinks.astype(wide), total) * of_sinks.astype(wide)
        dout, dtotal = dout - moves[..., None] * out.astype(wide), dtotal + moves
    return dout.astype(out.dtype), dtotal


def _cotangents(of: _Derivative, primals: tuple[Any, ...], moved: Sequence[Any]) -> tuple[Any, ...]:
    """The cotangents of query, key, value and sinks.

    Around the ring, cotangents of keys and values travel with keys and values, in float32, and are home after the last
    step.
    """
    ring, (query, key, value, sinks, marks, out, total) = of.ring, primals
    wide = total.dtype
    dout = jnp.zeros_like(out) if moved[0] is None else moved[0]
    rows = [*zip(*map(ring.runs, (query, out, dout, moved[1])), _residuals(ring, total), strict=True)]
    needs = Tangents(*of.arguments[:3], bias=False, sinks=False)

    def step(source: Any, arrays: Any, queries: Any, returned: Any) -> Any:
        k, v, of_keys = arrays
        columns = [*zip(ring.runs(k), ring.runs(v), strict=True)]
        queries, sums = [*queries], [ring.runs(x) for x in returned]
        for at in _pairs(ring, source, marks._replace(of_keys=of_keys), query, k):
            q, o, do, dtotal, residuals = rows[at.row]
            (shares,) = flash_attention_backward(
                q,
                *columns[at.key],
                at.extras,
                o,
                residuals,
                (do, dtotal),
                config=at.config,
                needs=needs,
                guarded=False,
                target=ring.target,
            )
            queries[at.row] += 0 if shares.query is None else shares.query.astype(wide)
            for runs, share in zip(sums, (shares.key, shares.value), strict=True):
                runs[at.key] = None if share is None else runs[at.key] + share.astype(wide)
        return queries, ring.send([None if runs[0] is None else _joined(runs) for runs in sums])

    travelling: list[Any] = [
        jnp.zeros_like(x, wide) if need else None for x, need in zip((key, value), of.arguments[1:3], strict=True)
    ]
    queries = [jnp.zeros_like(run, wide) for run in ring.runs(query)]
    if any(of.arguments[:3]):
        queries, travelling = ring.around((*_after(dout, key, value), marks.of_keys), queries, travelling, step)
    of_sinks = _of_sinks(sinks, total, out, *moved) if of.arguments[3] else None
    pairs = zip((_joined(queries), *travelling), (query, key, value), strict=True)
    return *(None if c is None else c.astype(x.dtype) for c, x in pairs), of_sinks


def _of_sinks(sinks: Any, total: Any, out: Any, dout: Any, dtotal: Any) -> Any:
    """float[N], the cotangents of sinks. A sink has a weight but no value: -Σ p δ over the rows of a head."""
    wide = total.dtype
    delta = jnp.zeros_like(total) if dout is None else (dout.astype(wide) * out.astype(wide)).sum(axis=3)
    delta = delta if dtotal is None else delta - dtotal
    return -(_weights(sinks.astype(wide), total) * delta).sum(axis=(0, 1)).astype(sinks.dtype)
