"""Kernels of training against their peers, forward and with gradient: recurrences, products, losses, norms, optimizers.

Sizes are taken from real models. Batches are so large that they give work to all of a GPU, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench import adamw, formulas, muon, ragged_dot
from bench.distillation import naive as naive_distillation
from bench.gpu import peers, torch_peers
from bench.gpu.clock import Contestant
from bench.gpu.gradients import step
from bench.gpu.kernels import silu_gate
from bench.gpu.peers import Peer
from bench.gpu.speed import Comparison, normal
from bench.gpu.trained import by_scales, flat
from bench.recurrences import SCAN_LIMIT
from tilekern.kernels.causal_conv1d import causal_conv1d
from tilekern.kernels.causal_conv1d import reference as shifted_sums
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.distillation import distillation
from tilekern.kernels.distillation.cases import CASES as DISTILLATIONS
from tilekern.kernels.gated_delta_rule import gated_delta_rule
from tilekern.kernels.gated_delta_rule import reference as delta_scan
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.group_norm import group_norm
from tilekern.kernels.group_norm import reference as naive_group_norm
from tilekern.kernels.group_norm.cases import CASES as GROUP_NORMS
from tilekern.kernels.group_norm.cases import LARGE
from tilekern.kernels.linear_attention import reference as linear_scan
from tilekern.kernels.linear_attention import ssd
from tilekern.kernels.linear_attention.cases import CASES as LINEAR_ATTENTIONS
from tilekern.kernels.matmul import fused_matmul, symmetric_matmul
from tilekern.kernels.matmul.cases import CASES as PRODUCTS
from tilekern.kernels.ragged_dot import fused_ragged_dot
from tilekern.kernels.ragged_dot import ragged_dot as grouped
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.ragged_dot.cases import SCALED_CASES
from tilekern.kernels.rg_lru import reference as gated_scan
from tilekern.kernels.rg_lru import rg_lru
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.rms_norm import add_reference, add_rms_norm
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.selective_scan import reference as state_scan
from tilekern.kernels.selective_scan import selective_scan
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS
from tilekern.training import AdamWState, newton_schulz
from tilekern.training import adamw_in_place as adamw_of

OF_SCAN = 1 / SCAN_LIMIT
"""The speed that recurrences are to have, relative to scans in `jnp`; relative to the best other formula it is 1."""

Functions = Mapping[str, Callable[..., Any]]
Torch = Callable[[Any], Contestant]
WIDE = (16384, 4096)


def named(cases: Sequence[Any], name: str, **sizes: Any) -> Any:
    """The case of this name, with `sizes` replaced."""
    (match,) = (case for case in cases if case.name == name)
    return replace(match, **sizes)


def with_cotangents(key: jax.Array, *, arrays: Callable[[jax.Array], Any], ours: Any, used: int) -> list[jax.Array]:
    """The arrays, then normal cotangents of the first `used` results of `ours`."""
    for_arrays, *keys = jax.random.split(key, 1 + used)
    inputs = list(arrays(for_arrays))
    types = jax.tree.leaves(jax.eval_shape(ours, *inputs))
    return [*inputs, *(jax.random.normal(k, t.shape, t.dtype) for k, t in zip(keys, types[:used], strict=True))]


def _contestants(sets: Any, *, functions: Functions, torch: Torch | None) -> Iterator[Peer]:
    yield from peers.named(functions, sets)
    if torch is not None:
        yield from torch_peers.peer(sets, torch)


def forward(
    name: str, ours: Any, arrays: Any, functions: Functions, torch: Torch | None = None, **options: Any
) -> Comparison:
    """A kernel against functions in `jnp`, and against PyTorch."""
    contestants = partial(_contestants, functions=functions, torch=torch)
    return Comparison(name, ours, arrays, contestants, **{"aim": 1.0, "aim_of": "xla", **options})


def gradient(
    name: str,
    ours: Any,
    arrays: Any,
    functions: Functions,
    torch: Torch | None = None,
    used: int = 1,
    **options: Any,
) -> Comparison:
    """`forward` of the first `used` results, and of gradients by all float arrays, for given cotangents."""
    inputs = partial(with_cotangents, arrays=arrays, ours=ours, used=used)
    functions = {n: partial(step, f, used=used) for n, f in functions.items()}
    return forward(f"{name} gradient", partial(step, ours, used=used), inputs, functions, torch, **options)


# --- recurrences ------------------------------------------------------------------------------------------------------


def ssd_arrays(key: jax.Array, *, case: Any) -> list[jax.Array]:
    """x, dt, a, b, c and d of Mamba-2; steps of time from 0.001 to 0.1 and a from -16 to -1, as models begin."""
    keys = jax.random.split(key, 5)
    of_tokens = case.batch, case.tokens
    x = jax.random.normal(keys[0], (*of_tokens, case.heads, case.width), jnp.bfloat16)
    b, c = (jax.random.normal(k, (*of_tokens, case.groups, case.depth), jnp.bfloat16) for k in keys[1:3])
    steps = jnp.exp(jax.random.uniform(keys[3], (*of_tokens, case.heads), jnp.float32, jnp.log(0.001), jnp.log(0.1)))
    a = -jax.random.uniform(keys[4], (case.heads,), jnp.float32, 1.0, 16.0)
    return [x, steps, a, b / case.depth**0.5, c, jnp.ones(case.heads)]


def scans() -> list[Comparison]:
    """Recurrences; the scan over tokens is left out of gradients where it would keep gigabytes of states."""
    mamba2 = named(LINEAR_ATTENTIONS, "mamba2_130m", batch=8)
    chunks = {
        f"xla chunks {size}": partial(formulas.ssd, by=partial(formulas.linear_attention, chunk=size))
        for size in (64, 128)
    }
    races: list[Comparison] = []
    arrays = partial(ssd_arrays, case=mamba2)
    scan = {"xla scan": partial(formulas.ssd, by=linear_scan)}
    races.append(forward("ssd mamba2_130m", ssd, arrays, chunks | scan, aim_of="chunks", seconds=20.0))
    races.append(gradient("ssd mamba2_130m", ssd, arrays, chunks, aim_of="chunks"))
    for name in ("qwen3_next", "kimi_linear"):
        arrays = partial(named(DELTA_RULES, name).arrays, dtype=jnp.bfloat16)
        chunks = {"xla chunks": formulas.gated_delta_rule}
        title, scan = f"gated_delta_rule {name}", {"xla scan": delta_scan}
        races.append(forward(title, gated_delta_rule, arrays, chunks | scan, aim_of="chunks", seconds=20.0))
        races.append(gradient(title, gated_delta_rule, arrays, chunks, aim_of="chunks"))
    for case, ours, functions in (
        (
            named(GATED_UNITS, "recurrentgemma_2b", batch=4),
            rg_lru,
            {"xla scan": gated_scan, "xla associative scan": formulas.rg_lru},
        ),
        (
            named(SELECTIVE_SCANS, "mamba_130m", batch=4),
            selective_scan,
            {"xla scan": state_scan, "xla associative scan": formulas.selective_scan},
        ),
    ):
        title, arrays = f"{ours.__name__} {case.name}", partial(case.arrays, dtype=jnp.bfloat16)
        ours, functions = _with(ours, case), {n: _with(f, case) for n, f in functions.items()}
        for kind in (forward, gradient):
            races.append(kind(title, ours, arrays, functions, aim=OF_SCAN, aim_of="scan", seconds=15.0))
    return races


def _with(function: Callable[..., Any], case: Any) -> Callable[..., Any]:
    return partial(function, **case.keywords)


# --- products ---------------------------------------------------------------------------------------------------------


def gated_arrays(key: jax.Array, *, case: Any) -> list[jax.Array]:
    """Rows, the matrices of gate and up, and the sizes of the groups."""
    for_gate, for_up = jax.random.split(key)
    lhs, gate, sizes = case.arrays(for_gate, jnp.bfloat16)
    return [lhs, gate, case.arrays(for_up, jnp.bfloat16)[1], sizes]


def gated_experts(lhs: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
    """The first layer of experts in one kernel."""
    return fused_ragged_dot(lhs, (gate, up), sizes, epilogue=silu_gate)


def experts() -> list[Comparison]:
    """Grouped products of training."""
    case = named(GROUPS, "mixtral_8x7b_up")
    flops, arrays = 2.0 * case.rows * case.inner * case.columns, partial(case.arrays, dtype=jnp.bfloat16)
    torch = partial(torch_peers.grouped, function=torch_peers.grouped_step)
    races = [gradient(f"ragged_dot {case.name}", grouped, arrays, {"xla": jax.lax.ragged_dot}, torch, flops=3 * flops)]
    arrays, functions = partial(gated_arrays, case=case), {"xla": partial(formulas.gated, jax.lax.ragged_dot)}
    torch, title = partial(torch_peers.grouped, function=torch_peers.gated_dot), f"fused_ragged_dot {case.name}"
    races.append(forward(title, gated_experts, arrays, functions, torch, flops=2 * flops))
    races.append(gradient(title, gated_experts, arrays, functions, flops=6 * flops))
    return races


def quantized() -> list[Comparison]:
    """Grouped products by scales, most of 8 bits."""
    races: list[Comparison] = []
    names = ("mixtral_8x7b_up:bfloat16:int8", "qwen3_30b_up:int8:int8", "qwen3_30b_up:float8_e4m3fn:float8_e4m3fn")
    by_name = {case.name: case for case in SCALED_CASES}
    for name in (*names, "deepseek_v3_up:float8_e4m3fn:float8_e4m3fn"):
        scaled = by_name[name]
        case = scaled.case
        functions = {"xla": partial(by_scales, ragged_dot.dequantised)}
        if scaled.lhs_dtype == "int8":
            functions["xla int32"] = partial(by_scales, ragged_dot.of_int32)
        rows = scaled.lhs_dtype == "float8_e4m3fn" and scaled.rhs_block == (None, 1)
        races.append(
            forward(
                f"ragged_dot {name}",
                partial(by_scales, grouped),
                partial(flat, scaled),
                functions,
                torch_peers.scaled_grouped_dot if rows else None,
                flops=2.0 * case.rows * case.inner * case.columns,
            )
        )
    return races


def biased_gelu(product: jax.Array, bias: jax.Array) -> jax.Array:
    """The epilogue of the first layer of an MLP."""
    return jax.nn.gelu(product + bias, approximate=True)


def added(product: jax.Array, residual: jax.Array) -> jax.Array:
    """The epilogue of the last product of a layer."""
    return product + residual


def layers() -> list[Comparison]:
    """Products with epilogues, and products of Muon."""
    up, down = named(PRODUCTS, "whisper_large_up"), named(PRODUCTS, "llama3_8b_down")
    races: list[Comparison] = []
    for case, epilogue, theirs, torch in (
        (up, biased_gelu, formulas.gelu_product, torch_peers.gelu_product),
        (down, added, formulas.added_product, torch_peers.added_product),
    ):
        flops = 2.0 * case.rows * case.inner * case.columns
        added_shape = (case.columns,) if case is up else (case.rows, case.columns)
        arrays = partial(normal, shapes=((case.rows, case.inner), (case.inner, case.columns), added_shape))
        ours, title = partial(fused_matmul, epilogue=epilogue), f"fused_matmul {case.name}"
        make = partial(torch_peers.product, function=torch)
        races.append(forward(title, ours, arrays, {"xla": theirs}, make, flops=flops))
        if case is up:
            races.append(gradient(title, ours, arrays, {"xla": theirs}, flops=3 * flops))
    for rows, columns in ((4096, 14336), (1024, 4096)):  # an MLP of Llama 3 8B, and of GPT-2 medium
        arrays, square = partial(normal, shapes=((rows, columns),)), 2.0 * rows * rows
        torch = partial(torch_peers.product, function=muon.gram_matrix)
        races.append(
            forward(
                f"symmetric_matmul {rows}×{columns}",
                symmetric_matmul,
                arrays,
                {"xla": muon.gram_matrix},
                torch,
                flops=square * columns,
            )
        )
        functions = {"xla": muon.naive_newton_schulz}
        flops = 5 * square * (2 * columns + rows)
        races.append(forward(f"newton_schulz {rows}×{columns}", newton_schulz, arrays, functions, flops=flops))
    return races


# --- losses, norms and convolutions -----------------------------------------------------------------------------------


def losses() -> list[Comparison]:
    """Distillation. Its gradient computes the logits' products once more, and two products of the student."""
    case = named(DISTILLATIONS, "llama3_1b_of_8b")
    arrays, ours = partial(case.arrays, dtype=jnp.bfloat16), partial(distillation, **case.keywords)
    functions = {"xla": partial(naive_distillation, case.divergence)}
    of_student, of_teacher = (2.0 * case.tokens * case.vocabulary * width for width in (case.width, case.of_teacher))
    of_logits, title = of_student + of_teacher, f"distillation {case.name}"
    return [
        forward(title, ours, arrays, functions, flops=of_logits, seconds=15.0),
        replace(
            gradient(title, ours, arrays, functions, flops=2 * of_student + of_logits, seconds=15.0),
            ours=partial(of_student_alone, ours),
            peers=partial(peers.named, {n: partial(of_student_alone, f) for n, f in functions.items()}),
        ),
    ]


def of_student_alone(loss: Callable[..., Any], *arrays: Any) -> Any:
    """The loss, and its gradients by hidden and weight of the student; the teacher learns nothing."""
    hidden, weight, teacher, teacher_weight, cotangent = arrays

    def of_student(hidden: Any, weight: Any) -> Any:
        return loss(hidden, weight, teacher, teacher_weight)

    return step(of_student, hidden, weight, cotangent)


def norms() -> list[Comparison]:
    """Norms and a convolution: memory decides."""
    races: list[Comparison] = []
    heads = (4, 4096, 32, 128)
    for title, ours, theirs, shapes in (
        ("add_rms_norm 16384×4096", add_rms_norm, add_reference, (WIDE, WIDE, WIDE[1:])),
        ("rms_norm_rope 4×4096×32×128", rms_norm_rope, normed_reference, (heads, heads[-1:])),
    ):
        arrays = partial(normal, shapes=shapes)
        used = {"used": 2} if ours is add_rms_norm else {}
        races.append(forward(title, ours, arrays, {"xla": theirs}))
        races.append(gradient(title, ours, arrays, {"xla": theirs}, **used))
    small, large = named(GROUP_NORMS, "stable_diffusion_64"), named(LARGE, "vae_decoder_512")
    for case in (replace(small, batch=8), replace(large, batch=4)):
        arrays, options = partial(case.arrays, dtype=jnp.bfloat16), case.keywords
        title, functions = f"group_norm {case.name}", {"xla": _with(naive_group_norm, case)}
        torch = partial(torch_peers.group_norm, **options)
        races.append(forward(title, _with(group_norm, case), arrays, functions, torch))
        races.append(gradient(title, _with(group_norm, case), arrays, functions))
    case = named(CONVOLUTIONS, "mamba_130m", batch=8)
    arrays, functions = partial(case.arrays, dtype=jnp.bfloat16), {"xla": _with(shifted_sums, case)}
    title, torch = f"causal_conv1d {case.name}", partial(torch_peers.causal_conv1d, **case.keywords)
    races.append(forward(title, _with(causal_conv1d, case), arrays, functions, torch))
    races.append(gradient(title, _with(causal_conv1d, case), arrays, functions))
    return races


# --- optimizers -------------------------------------------------------------------------------------------------------


def weights(key: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """A weight, its state at the first step, and its gradient."""
    weight, gradient = (jax.random.normal(k, shape, dtype) for k in jax.random.split(key))
    return weight, (jnp.int32(0), jnp.zeros(shape), jnp.zeros(shape)), gradient


def step_of_adamw(weight: Any, state: Any, gradient: Any, *, stochastic: bool, target: str | None = None) -> Any:
    """A step of tilekern's AdamW."""
    optimizer = adamw_of(adamw.RATE, weight_decay=adamw.DECAY, stochastic=stochastic, target=target)
    weight, state = optimizer.step(weight, AdamWState(*state), gradient)
    return weight, tuple(state)


def _steps(sets: Any, *, functions: Functions, torch: bool) -> Iterator[Peer]:
    for name, function in functions.items():
        yield Peer(name, partial(peers.in_place, name, function, sets))
    if torch:
        yield from torch_peers.peer(sets, partial(torch_peers.adamw, rate=adamw.RATE, decay=adamw.DECAY))


def optimizers() -> list[Comparison]:
    """Steps in place: rounded stochastically, which is compared with rounding to nearest as well; and in float32."""
    races: list[Comparison] = []
    to_nearest = {"xla": partial(adamw.formula, stochastic=False)}
    at_random = {"xla stochastic": partial(adamw.formula, stochastic=True)}
    for dtype, functions in ((jnp.bfloat16, to_nearest | at_random), (jnp.float32, to_nearest)):
        races.append(
            Comparison(
                f"adamw 4096×14336 {jnp.dtype(dtype).name}",
                partial(step_of_adamw, stochastic=True),
                partial(weights, shape=(4096, 14336), dtype=dtype),
                partial(_steps, functions=functions, torch=dtype == jnp.float32),
                aim=1.0,
                aim_of="xla",
                contestant=peers.in_place,
            )
        )
    return races


def comparisons() -> list[Comparison]:
    """All comparisons of this file, most important first: two of each family, then the next two."""
    families = [losses(), scans(), experts(), optimizers(), norms(), layers(), quantized()]
    races: list[Comparison] = []
    for n in range(max(map(len, families))):
        races += [entry for family in families for entry in family[2 * n : 2 * n + 2]]
    return races
