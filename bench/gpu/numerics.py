"""The kernels on the device against their float64 references, by the rule of `tilekern.testing`.

Inputs are fresh, outputs lie in memory full of NaN before each run, and three runs must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import gradients
from bench.gpu.gradients import FEATURES, Featured
from bench.gpu.item import Item, Record, lowerings_of
from tilekern.kernels import (
    adamw_step,
    causal_conv1d,
    cross_entropy,
    distillation,
    flash_attention,
    gated_delta_rule,
    group_norm,
    layer_norm,
    linear_attention,
    matmul,
    ragged_dot,
    rg_lru,
    rms_norm,
    rope,
    selective_scan,
    softmax,
    swiglu,
)
from tilekern.kernels.adamw_step.cases import CASES as WEIGHTS
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.cross_entropy.cases import CASES as LOSSES
from tilekern.kernels.distillation.cases import CASES as DISTILLATIONS
from tilekern.kernels.flash_attention.cases import CASES as ATTENTIONS
from tilekern.kernels.flash_attention.cases import Case as Attention
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.group_norm.cases import CASES as GROUP_NORMS
from tilekern.kernels.layer_norm.cases import CASES as LAYER_NORMS
from tilekern.kernels.linear_attention.cases import CASES as LINEAR_ATTENTIONS
from tilekern.kernels.matmul.cases import CASES as PRODUCTS
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.rms_norm.cases import CASES as RMS_NORMS
from tilekern.kernels.rope.cases import CASES as ROTATIONS
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS
from tilekern.kernels.softmax.cases import CASES as SOFTMAXES
from tilekern.kernels.swiglu.cases import CASES as GATES
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target
from tilekern.testing import assert_close, in_float64

RUNS = 3
# Kernels with weights, states or factors of all elements, where a NaN makes all later results NaN; and gradients, where
# a NaN in a cotangent reaches all tiles that are not skipped.
WITHOUT_SPECIALS = (
    "adamw_step",
    "cross_entropy",
    "cross_entropy_gradient",
    "distillation",
    "flash_attention_gradient",
    "gated_delta_rule",
    "linear_attention",
    "ragged_dot",
    "rg_lru",
    "selective_scan",
)
SPECIALS = (np.nan, np.inf, -np.inf, 0.0)


@dataclass(frozen=True)
class Kernel:
    """A library kernel.

    Attributes:
      call: tilekern's function.
      reference: its definition, with the same results.
      cases: sizes of real models; smaller versions of them are checked.
      large: cases that are checked at their own size: many tiles, with ragged edges.
      length: number of terms of the longest sum, for the arrays of a call.
      dtyped: True if the definition takes the dtype to compute in.
      factor: limit of the error, in naive errors; see `tilekern.testing`.
    """

    call: Callable[..., Any]
    reference: Callable[..., Any]
    cases: tuple[Any, ...]
    large: tuple[Any, ...]
    length: Callable[..., int]
    dtyped: bool = True
    factor: float = 2.0


def product(x: jax.Array, w: jax.Array, target: str | None = None) -> jax.Array:
    """`matmul` as a plain function, which `partial` and processes can handle."""
    return matmul.matmul(x, w, target=target)


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The epilogue of an expert's first layer."""
    return jax.nn.silu(gate) * up


def gated_experts(
    function: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, **keywords: Any
) -> jax.Array:
    """The first layer of experts, with the matrices of gate and up from one array."""
    return function(lhs, (rhs, jnp.flip(rhs, 1)), sizes, epilogue=silu_gate, **keywords)


def stepped(function: Callable[..., Any], *arrays: jax.Array, **keywords: Any) -> Any:
    """A step of AdamW, with the keys and the coordinates of its rounding behind the other arrays, if there are any."""
    *matrices, factors = arrays[:5]
    return function(*matrices, factors, arrays[5] if arrays[5:] else None, arrays[6:], **keywords)


def _columns(x: Any, *others: Any) -> int:
    del others
    return x.shape[-1]


def _tokens_and_depth(query: Any, *others: Any) -> int:
    del others
    return query.shape[1] + query.shape[3]


def _longest_of_loss(hidden: Any, weight: Any, labels: Any) -> int:
    return labels.shape[0] + sum(weight.shape)


def _resized(cases: Sequence[Any], *sizes: dict[str, Any]) -> tuple[Any, ...]:
    """Variants of the first case, with the given sizes."""
    return tuple(replace(cases[0], name=f"large{n}", **size) for n, size in enumerate(sizes))


ROWS = ({"rows": 301, "columns": 1037}, {"rows": 67, "columns": 9001})
TOKENS = (
    {"tokens": 333, "heads": 4, "groups": 2, "depth": 128, "width": 128},
    {"tokens": 512, "heads": 2, "groups": 2, "depth": 64, "width": 200},
)
# Head widths of the timed cases, with whole tiles: their masks and copies differ from those of ragged tiles.
WHOLE = tuple(
    Attention(f"d{d}_{'causal' if causal else 'full'}", 4, 4, d, d, 1024, 1024, causal=causal)
    for d in (64, 128, 256)
    for causal in (False, True)
)
LARGE_LOSSES = _resized(
    LOSSES,
    {"tokens": 301, "width": 333, "vocabulary": 1037},
    {"tokens": 256, "width": 512, "vocabulary": 4096},
)
KERNELS = {
    "flash_attention": Kernel(
        partial(flash_attention.flash_attention, return_logsumexp=True),
        flash_attention.reference,
        ATTENTIONS,
        (*_resized(ATTENTIONS, {"queries": 300, "keys": 517}, {"queries": 517, "keys": 300, "causal": False}), *WHOLE),
        lambda q, k, v: q.shape[-1] + k.shape[-3],
    ),
    "flash_attention_gradient": Kernel(
        gradients.ours,
        gradients.definition,
        # Small cases without features; then each feature once, with a few ragged tiles and grouped heads.
        (
            *map(Featured, ATTENTIONS),
            *(Featured(Attention("few", 4, 2, 64, 32, 300, 333, batch=2), f) for f in FEATURES),
        ),
        (
            *map(Featured, _resized(ATTENTIONS, {"queries": 300, "keys": 517})),
            *(Featured(case) for case in WHOLE if case.width < 256 or case.causal),
        ),
        gradients.longest_sum,
        factor=3.0,
    ),
    "matmul": Kernel(
        product,
        matmul.reference,
        PRODUCTS,
        _resized(
            PRODUCTS,
            {"rows": 517, "inner": 1000, "columns": 301},
            {"rows": 301, "inner": 77, "columns": 1024},
            {"rows": 1024, "inner": 512, "columns": 768},
        ),
        _columns,
        dtyped=False,
    ),
    "ragged_dot": Kernel(
        ragged_dot.ragged_dot,
        ragged_dot.reference,
        GROUPS,
        _resized(GROUPS, {"rows": 517, "inner": 333, "columns": 301, "groups": 7}, {"rows": 1024, "inner": 512}),
        _columns,
        dtyped=False,
    ),
    "fused_ragged_dot": Kernel(
        partial(gated_experts, ragged_dot.fused_ragged_dot),
        partial(gated_experts, ragged_dot.fused_reference),
        GROUPS,
        _resized(GROUPS, {"rows": 517, "inner": 333, "columns": 301, "groups": 7}, {"rows": 1024, "inner": 512}),
        _columns,
    ),
    "cross_entropy": Kernel(
        partial(cross_entropy.cross_entropy, return_logsumexp=True),
        cross_entropy.reference,
        LOSSES,
        LARGE_LOSSES,
        _longest_of_loss,
    ),
    "cross_entropy_gradient": Kernel(
        partial(gradients.of_loss, partial(cross_entropy.cross_entropy, return_logsumexp=True)),
        partial(gradients.of_loss, cross_entropy.reference),
        LOSSES,
        LARGE_LOSSES,
        _longest_of_loss,
        factor=3.0,
    ),
    "distillation": Kernel(
        distillation.distillation,
        distillation.reference,
        DISTILLATIONS,
        _resized(DISTILLATIONS, {"tokens": 301, "width": 333, "of_teacher": 77, "vocabulary": 1037}),
        lambda hidden, weight, *teacher: sum(weight.shape),
    ),
    "softmax": Kernel(softmax.softmax, softmax.reference, SOFTMAXES, _resized(SOFTMAXES, *ROWS), _columns),
    "rms_norm": Kernel(rms_norm.rms_norm, rms_norm.reference, RMS_NORMS, _resized(RMS_NORMS, *ROWS), _columns),
    "layer_norm": Kernel(
        layer_norm.layer_norm, layer_norm.reference, LAYER_NORMS, _resized(LAYER_NORMS, *ROWS), _columns
    ),
    "adamw_step": Kernel(
        partial(stepped, adamw_step.adamw_step),
        partial(stepped, adamw_step.reference),
        WEIGHTS,
        _resized(WEIGHTS, {"rows": 301, "columns": 1037}, {"rows": 1024, "columns": 2048, "narrow": True}),
        lambda *arrays: 1,
    ),
    "group_norm": Kernel(
        group_norm.group_norm,
        group_norm.reference,
        GROUP_NORMS,
        _resized(GROUP_NORMS, {"batch": 3, "side": 37, "channels": 130, "num_groups": 13}),
        lambda x, *others: x.size // x.shape[0],
    ),
    "swiglu": Kernel(swiglu.swiglu, swiglu.reference, GATES, _resized(GATES, *ROWS), lambda *arrays: 1),
    "rope": Kernel(
        rope.rope, rope.reference, ROTATIONS, _resized(ROTATIONS, {"length": 301, "heads": 11}), lambda *arrays: 1
    ),
    "linear_attention": Kernel(
        linear_attention.linear_attention,
        linear_attention.reference,
        LINEAR_ATTENTIONS,
        _resized(LINEAR_ATTENTIONS, *TOKENS),
        _tokens_and_depth,
    ),
    "gated_delta_rule": Kernel(
        gated_delta_rule.gated_delta_rule,
        gated_delta_rule.reference,
        DELTA_RULES,
        _resized(DELTA_RULES, *TOKENS),
        _tokens_and_depth,
    ),
    "rg_lru": Kernel(
        rg_lru.rg_lru,
        rg_lru.reference,
        GATED_UNITS,
        _resized(GATED_UNITS, {"tokens": 301, "channels": 1037}, {"tokens": 512, "batch": 2}),
        lambda x, *others: x.shape[1],
    ),
    "selective_scan": Kernel(
        selective_scan.selective_scan,
        selective_scan.reference,
        SELECTIVE_SCANS,
        _resized(SELECTIVE_SCANS, {"tokens": 301, "channels": 1037, "states": 13}, {"tokens": 512, "batch": 2}),
        lambda x, delta, a, *others: x.shape[1] + a.shape[1],
    ),
    "causal_conv1d": Kernel(
        causal_conv1d.causal_conv1d,
        causal_conv1d.reference,
        CONVOLUTIONS,
        _resized(CONVOLUTIONS, {"tokens": 301, "channels": 1037}, {"taps": 2, "tokens": 67, "batch": 3}),
        lambda x, weight, *others: weight.shape[0] + 1,
    ),
}


@dataclass(frozen=True)
class Prepared:
    """Inputs, the float64 oracle, and the naive computation, as flat lists of NumPy arrays."""

    inputs: list[Any]
    oracle: list[Any]
    low: list[Any]


@dataclass(frozen=True)
class Check(Item):
    """One kernel on one case.

    Attributes:
      kernel: name in `KERNELS`.
      case: makes the arrays, and has the keywords.
      dtype: dtype of the arrays.
      specials: True if a few elements are NaN or infinite.
    """

    kernel: str
    case: Any
    dtype: str
    specials: bool = False
    seconds: float = 2.0

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] -- items are immutable
        """The unique name in the plan."""
        return f"numerics {self.kernel} {self.case.name} {self.dtype}{' specials' if self.specials else ''}"

    @property
    def call(self) -> Callable[..., Any]:
        """tilekern's function, with the keywords of the case."""
        return partial(KERNELS[self.kernel].call, **self.keywords)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the call and of the reference."""
        return getattr(self.case, "keywords", {})

    def inputs(self, seed: int) -> list[Any]:
        """The arrays, different for every check."""
        own = crc32(self.name.encode()) ^ (seed & 0xFFFFFFFF)
        made = [np.array(x) for x in jax.tree.leaves(self.case.arrays(jax.random.key(own), self.dtype))]
        random = np.random.default_rng(own)
        for x in made if self.specials else []:
            if x.dtype == jnp.dtype(self.dtype):
                x.reshape(-1)[random.integers(0, x.size, len(SPECIALS))] = SPECIALS
        return made

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        avals = jax.eval_shape(partial(self.case.arrays, dtype=jnp.dtype(self.dtype)), jax.random.key(0))
        return lowerings_of(self.call, jax.tree.leaves(avals), target)

    def prepare(self, seed: int) -> Prepared:
        inputs = self.inputs(seed)
        oracle = in_float64(KERNELS[self.kernel].reference, *inputs, **self.keywords)
        return Prepared(inputs, jax.tree.leaves(oracle), self._low(inputs))

    def _low(self, inputs: list[Any]) -> list[Any]:
        """The naive computation in the dtype of the inputs, but for results whose own dtype that would change."""
        kernel = KERNELS[self.kernel]
        low = jax.tree.leaves(kernel.reference(*inputs, **self.keywords))
        if kernel.dtyped:
            narrow = jax.tree.leaves(kernel.reference(*inputs, **self.keywords, dtype=inputs[0].dtype))
            low = [n if n.dtype == wide.dtype else wide for n, wide in zip(narrow, low, strict=True)]
        return [np.asarray(x) for x in low]

    def run(self, seed: int, prepared: Prepared) -> Record:
        first, *others = poisoned(self.call, [jax.device_put(x) for x in prepared.inputs])
        length = KERNELS[self.kernel].length(*prepared.inputs)
        try:
            for again in others:
                _require_same_bits(first, again)
            for out, oracle, low in zip(first, prepared.oracle, prepared.low, strict=True):
                assert_close(out, oracle, low, length=length, factor=KERNELS[self.kernel].factor)
        except AssertionError as error:
            return {"ok": False, "text": str(error)}
        return {"ok": True, "errors": [_error(x, o) for x, o in zip(first, prepared.oracle, strict=True)]}

    def launch(self, seed: int) -> None:
        poisoned(self.call, [jax.device_put(x) for x in self.inputs(seed)])


def poisoned(function: Callable[..., Any], arrays: Sequence[Any]) -> list[list[np.ndarray]]:
    """Run a function `RUNS` times, with outputs and temporaries in memory that held NaN; return the results.

    NaN arrays of the outputs' types are donated, so that XLA reuses them for the outputs. Other NaN arrays are freed
    right before, so that the allocator reuses their memory for temporaries.
    """
    types = jax.tree.leaves(jax.eval_shape(function, *arrays))

    def run(poison: Any, *arrays: Any) -> list[Any]:
        del poison
        return jax.tree.leaves(function(*arrays))

    donated, results = jax.jit(run, donate_argnums=0, keep_unused=True), []
    for _ in range(RUNS):
        poison = [jax.device_put(np.full(t.shape, np.nan, t.dtype)) for t in types]
        freed = [jax.device_put(np.full(size, np.nan, np.float32)) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 22)]
        jax.block_until_ready((freed, poison))
        del freed
        results.append([np.asarray(x) for x in donated(poison, *arrays)])
    return results


def checks() -> list[Check]:
    """All checks; cases of many tiles come first."""
    found: list[Check] = []
    for name, kernel in KERNELS.items():
        found += [Check(name, case, dtype) for case in kernel.large for dtype in ("bfloat16", "float32", "float16")]
        found += [Check(name, case.small(), "bfloat16") for case in kernel.cases]
        if name not in WITHOUT_SPECIALS:
            found.append(Check(name, kernel.large[0], "float32", specials=True))
    return found


def _error(out: Any, oracle: Any) -> float:
    """`‖out - oracle‖ / ‖oracle‖` over the finite elements of the oracle, for the record."""
    finite = np.isfinite(oracle)
    norm = np.linalg.norm(oracle[finite])
    return float(np.linalg.norm(out[finite].astype(np.float64) - oracle[finite]) / norm) if norm else 0.0


def _require_same_bits(first: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> None:
    for n, (x, y) in enumerate(zip(first, again, strict=True)):
        if x.tobytes() != y.tobytes():
            places = np.argwhere((x != y) & ~((x != x) & (y != y)))
            raise AssertionError(
                f"output {n} differs between runs on the same inputs: {len(places)} of {x.size} elements, "
                f"first at {places[:1].tolist()}"
            )
