"""Numbers of NumPy as static arguments: Python numbers for the library, as in JAX in bodies of users."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import tilekern as tk
import tilekern.kernels
from tests.kernels.programs import equations
from tests.lang.checks import like_first, refused
from tilekern.errors import CarryError
from tilekern.kernel import CustomOp, Kernel
from tilekern.kernel.statics import static_key
from tilekern.kernels.distillation.options import Options
from tilekern.kernels.flash_attention.arguments import Config
from tilekern.training import adamw, adamw_in_place, muon

KINDS: dict[type, tuple[Any, ...]] = {
    float: (np.float64, np.float32, ml_dtypes.bfloat16),
    int: (np.int64, np.int32, np.uint8),
    bool: (np.bool_,),
}
"""Classes of NumPy's numbers, by those of Python's."""


def forms(value: Any) -> Iterator[Any]:
    """A number, or a tuple with numbers, by each of NumPy's classes that holds it."""
    if isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from ((*value[:number], form, *value[number + 1 :]) for form in forms(part))
        return
    yield from (kind(value) for kind in KINDS.get(type(value), ()) if kind(value) == value)


# --- functions of the library ---------------------------------------------------------------------------------------


def f(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def n(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


@dataclass(frozen=True)
class Call:
    """A call of a public function, and the numbers that it takes.

    Attributes:
      args: arrays, by position.
      keywords: other arguments that the call needs.
      numbers: a value of each number, exact in bfloat16; blocks are 16 if they are left out.
      on_mesh: the call is made in a `jax.shard_map` over an axis "a".
      differentiable: the program of its reverse-mode derivative is compared, too.
    """

    args: tuple[Any, ...]
    numbers: Mapping[str, Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    on_mesh: bool = False
    differentiable: bool = True


def optimized(make: Callable[..., Any], step: str) -> Callable[..., Any]:
    """A step of the optimizer that a function makes."""

    def run(*args: Any, **keywords: Any) -> Any:
        weights, gradients = {"w": f(8, 16)}, {"w": f(8, 16)}
        optimizer = make(*args, **keywords)
        state = optimizer.init(weights)
        if step == "step":
            return optimizer.step(weights, state, gradients)
        return optimizer.update(gradients, state, weights)

    return run


DRAWS_OF_HIDDEN = {
    "transpose_weight": True,
    "softcap": 4.0,
    "temperature": 0.5,
    "top_k": 9,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 2.0,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
LOSS = {"ignore_index": 3, "label_smoothing": 0.5, "softcap": 2.0, "z_loss": 0.25, "temperature": 2.0}
NORM = {"eps": 0.5, "offset": 1.0}
ROUTE = {"experts_per_token": 2, "normalize": True, "groups": 2, "top_groups": 1, "scale": 2.0}
FLAGS = {"transpose_lhs": True, "transpose_rhs": True, "split_k": 2}
ATTENTION = {"scale": 0.5, "causal": True, "window": (4, 4), "softcap": 2.0}
RECURRENCE = f(2, 16, 2, 8), f(2, 16, 2, 8), f(2, 16, 2, 8), f(2, 16, 2)
SCAN = f(2, 16, 8), f(2, 16, 8), f(8, 4), f(2, 16, 4), f(2, 16, 4)
HEADS = (f(1, 16, 2, 8),) * 3
KEY = np.zeros(2, np.uint32)
DROPOUT = {"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}
RATES = {"learning_rate": 0.5, "eps": 0.5, "weight_decay": 0.5, "nesterov": True}

CACHED = (f(3, 4, 8), f(5, 4, 4, 8), n(3) + 4, n(3, 2))
PAGED = {"scale": 0.5, "window": 3, "softcap": 2.0, "key_scale": 0.5, "value_scale": 0.25}
CALLS: dict[str, Call] = {
    "causal_conv1d": Call((f(2, 16, 8), f(4, 8)), {}),
    "cross_entropy": Call((f(4, 16), f(16, 32), n(4)), {**LOSS, "return_logsumexp": True}),
    "distillation": Call(
        (f(4, 16), f(16, 32), f(4, 16), f(16, 32)),
        {"teacher_share": 0.25, "temperature": 2.0, "softcap": 2.0, "teacher_softcap": 4.0},
        {"divergence": "jensen_shannon"},
    ),
    "block_map": Call(
        (lambda b, n, i, j: j <= i,), {"queries": 64, "keys": 64, "batch": 2, "heads": 2}, differentiable=False
    ),
    "flash_attention": Call(
        HEADS,
        {**ATTENTION, "q_offset": 1, "dropout_rate": 0.5, "dropout_broadcast": True, "return_logsumexp": True},
        {"dropout_key": KEY},
    ),
    "gated_delta_rule": Call((*RECURRENCE, f(2, 16, 2)), {}),
    "group_norm": Call((f(2, 16, 8),), {"num_groups": 2, "group_size": None, "batch_dims": 1, "eps": 0.5}),
    "layer_norm": Call((f(4, 16),), {"eps": 0.5}),
    "linear_attention": Call(RECURRENCE, {}),
    "ssd": Call((f(2, 16, 2, 8), f(2, 16, 2), f(2), f(2, 16, 1, 8), f(2, 16, 1, 8)), {}),
    "fused_matmul": Call((f(16, 32), f(8, 16)), FLAGS, {"epilogue": jnp.tanh}),
    "matmul": Call((f(16, 32), f(8, 16)), FLAGS),
    "quantized_matmul": Call(
        (f(16, 32), f(8, 32)), {"transpose_rhs": True, "lhs_block": (1, 16), "rhs_block": (1, 8)}, {"lhs_dtype": "int8"}
    ),
    "symmetric_matmul": Call((f(16, 32), f(16, 16)), {"scale": 0.5, "scale_added": 2.0}),
    "fused_ragged_dot": Call((f(16, 8), f(2, 32, 8), n(2)), {"transpose_rhs": True}, {"epilogue": jnp.tanh}),
    "ragged_dot": Call((f(16, 8), f(2, 32, 8), n(2)), {"transpose_rhs": True}),
    "ragged_contracting_dot": Call((f(16, 8), f(16, 32), n(2)), {}),
    "rg_lru": Call((f(2, 16, 8), f(2, 16, 8), f(2, 16, 8), f(8)), {"exponent": 4.0, "scale_first": True}),
    "paged_attention": Call(CACHED, PAGED, differentiable=False),
    "ragged_paged_attention": Call(
        (*CACHED, np.arange(4, dtype=np.int32)),
        {**PAGED, "num_seqs": 2, "return_logsumexp": True},
        differentiable=False,
    ),
    "mla_attention": Call(
        (f(3, 4, 12), f(5, 4, 12), n(3) + 4, n(3, 2), np.arange(4, dtype=np.int32)),
        {
            "scale": 0.5,
            "value_width": 8,
            "latent_scale": 0.5,
            "rope_scale": 0.25,
            "num_seqs": 2,
            "return_logsumexp": True,
        },
        differentiable=False,
    ),
    "index_scores": Call(
        (f(3, 4, 8), f(3, 4), f(5, 4, 8), n(3) + 4, n(3, 2), np.arange(4, dtype=np.int32)),
        {"key_scale": 0.5, "num_seqs": 2},
        differentiable=False,
    ),
    "select_keys": Call(
        (f(3, 4, 8), f(3, 4), f(5, 4, 8), n(3) + 4, n(3, 2), np.arange(4, dtype=np.int32)),
        {"key_scale": 0.5, "num_seqs": 2, "num_keys": 3},
        differentiable=False,
    ),
    "write_index_keys": Call(
        (f(9, 4, 8), f(3, 8), n(3) + 4, n(3, 2)),
        {"num_seqs": 2, "key_scale": 0.5},
        differentiable=False,
    ),
    "write_latents": Call(
        (f(9, 4, 12), f(3, 12), n(3) + 4, n(3, 2)),
        {
            "num_seqs": 2,
            "value_width": 8,
            "latent_scale": 0.5,
            "rope_scale": 2.0,
            "theta": 64.0,
            "interleaved": True,
        },
        differentiable=False,
    ),
    "write_pages": Call(
        (f(9, 4, 4, 8), f(3, 2, 8), f(3, 2, 8), *CACHED[2:]),
        {"num_seqs": 2, "key_scale": 0.5, "value_scale": 2.0, "theta": 64.0, "interleaved": True},
        differentiable=False,
    ),
    "sample": Call(
        (f(4, 16), KEY),
        {
            "temperature": 0.5,
            "top_k": 9,
            "top_p": 0.75,
            "min_p": 0.125,
            "repetition_penalty": 2.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
        {"counts": np.arange(64, dtype=np.int32).reshape(4, 16) % 3},
        differentiable=False,
    ),
    "sample_hidden": Call(
        (f(4, 8), f(16, 8), KEY),
        DRAWS_OF_HIDDEN,
        {"counts": np.arange(64, dtype=np.int32).reshape(4, 16) % 3},
        differentiable=False,
    ),
    "verify_draft_tree": Call(
        (f(4, 3, 16), n(4, 2), np.array([-1, 0], np.int32), KEY),
        {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125},
        differentiable=False,
    ),
    "verify_drafts": Call(
        (f(4, 3, 16), n(4, 2), KEY),
        {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125},
        differentiable=False,
    ),
    "add_rms_norm": Call((f(4, 16), f(4, 16), f(16)), NORM),
    "rms_norm": Call((f(4, 16), f(16)), NORM),
    "rms_norm_quantized": Call((f(4, 16), f(16)), {**NORM, "block": 8}),
    "rms_norm_rope": Call((f(1, 16, 2, 8), f(8)), {"theta": 64.0, **NORM}),
    "rope": Call((f(1, 16, 2, 8),), {"theta": 64.0, "interleaved": True}),
    "selective_scan": Call(SCAN, {"dt_softplus": True}),
    "softmax": Call((f(4, 16),), {"axis": 0}),
    "log_softmax": Call((f(4, 16),), {"axis": 0}),
    "nn.softmax": Call((f(4, 16),), {"axis": (0, 1)}),
    "nn.log_softmax": Call((f(4, 16),), {"axis": 0}),
    "nn.rms_norm": Call((f(4, 16), f(16)), {"epsilon": 0.5}),
    "nn.layer_norm": Call((f(4, 16), f(16), f(16)), {"epsilon": 0.5}),
    "nn.group_norm": Call((f(2, 16, 8),), {"num_groups": 2, "group_size": None, "epsilon": 0.5}),
    "swiglu": Call((f(4, 16), f(4, 16)), {}),
    "dot_product_attention": Call(
        HEADS,
        {"scale": 0.5, "is_causal": True, "local_window_size": (4, 4), "return_residual": True, **DROPOUT},
        {"dropout_rng": KEY},
    ),
    "attention_fn": Call(HEADS, {"is_causal": True, "force_fp32_for_softmax": True, **DROPOUT}, {"dropout_rng": KEY}),
    "adamw_in_place": Call(
        (),
        {"learning_rate": 0.5, "b1": 0.5, "b2": 0.75, "eps": 0.5, "weight_decay": 0.5, "stochastic": True, "seed": 3},
        {"moments": jnp.bfloat16},
        differentiable=False,
    ),
    "adamw": Call((), {**RATES, "b1": 0.5, "b2": 0.75, "eps_root": 0.5}, differentiable=False),
    "muon": Call(
        (),
        {**RATES, "beta": 0.5, "ns_steps": 2, "ns_coeffs": (3.0, -4.0, 2.0), "consistent_rms": 0.25},
        differentiable=False,
    ),
    "newton_schulz": Call((f(8, 16),), {"steps": 1, "coefficients": ((3.0, -4.0, 2.0),), "eps": 0.5}),
    "dpo_loss": Call((f(4),) * 4, {"beta": 0.5, "label_smoothing": 0.25}),
    "grpo_loss": Call((f(2, 8), f(2)), {"beta": 0.5, "clip": (0.25, 0.5)}, {"old": f(2, 8), "reference": f(2, 8)}),
    "token_log_probabilities": Call(
        (f(4, 16), f(16, 32), n(4)), {"ignore_index": 3, "softcap": 2.0, "temperature": 2.0}
    ),
    "all_gather_matmul": Call((f(8, 16), f(16, 8)), {"bidirectional": True}, on_mesh=True),
    "matmul_reduce_scatter": Call((f(8, 16), f(16, 8)), {"bidirectional": True}, on_mesh=True),
    "attention_bytes": Call(
        (), {"length": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "devices": 4, "itemsize": 4}, on_mesh=False
    ),
    "balanced_bias": Call((f(4), n(8, 2)), {"rate": 0.5}),
    "to_zigzag": Call((f(8, 4),), {"devices": 2, "axis": 0}),
    "from_zigzag": Call((f(8, 4),), {"devices": 2, "axis": 0}),
    "limit_capacity": Call((n(8, 2), f(8, 2)), {"num_experts": 4, "capacity": 3}),
    "moe": Call((f(8, 16), f(8, 4), f(4, 16, 8), f(4, 16, 8), f(4, 8, 16)), {**ROUTE, "capacity": 6}),
    "ring_attention": Call(HEADS, ATTENTION, on_mesh=True),
    "route": Call((f(8, 4),), ROUTE),
    "vocab_parallel_cross_entropy": Call((f(4, 16), f(16, 32), n(4)), {**LOSS, "return_logsumexp": True}, on_mesh=True),
    "vocab_parallel_sample_hidden": Call(
        (f(4, 8), f(16, 8), KEY),
        {**DRAWS_OF_HIDDEN, "vocabulary": 15},
        {"counts": np.arange(64, dtype=np.int32).reshape(4, 16) % 3},
        differentiable=False,
        on_mesh=True,
    ),
}

PACKAGES = [m.name for m in pkgutil.iter_modules(tilekern.kernels.__path__, "tilekern.kernels.") if m.ispkg]
PACKAGES += ["tilekern.nn", "tilekern.training", "tilekern.distributed"]
PUBLIC: dict[str, Any] = {}
for _package in map(importlib.import_module, PACKAGES):
    for _name in _package.__all__:
        _found = getattr(_package, _name)
        if not inspect.isclass(_found) and not _name.endswith("reference"):
            # A function of nn may have the name of a function of a kernel.
            PUBLIC[_name if PUBLIC.get(_name, _found) is _found else f"{_package.__name__[9:]}.{_name}"] = _found
MODULES = [m.name for m in pkgutil.walk_packages(tilekern.kernels.__path__, "tilekern.kernels.")]
KERNELS = {
    kernel.signature.name: kernel
    for module in MODULES
    for kernel in vars(importlib.import_module(module)).values()
    if isinstance(kernel, (Kernel, CustomOp))
}


def numbers_of(function: Callable[..., Any]) -> list[str]:
    """The parameters that take numbers, and are no launch options."""
    parameters = inspect.signature(function).parameters.values()
    found = [p.name for p in parameters if re.search(r"\b(int|float|bool)\b", str(p.annotation))]
    return [name for name in found if name not in ("num_warps", "num_stages", "num_ctas")]


def test_the_table_has_every_function_and_number() -> None:
    named = {name: numbers_of(function) for name, function in PUBLIC.items()}
    assert {name for name, numbers in named.items() if numbers} - KERNELS.keys() <= CALLS.keys()
    for name, call in CALLS.items():
        missing = {p for p in named[name] if not re.match(r"block(_\w)?|block_rows|block_columns|blocks", p)}
        assert missing - {"blocks"} == call.numbers.keys() - {"block"}, name


STEPS = {
    "adamw": optimized(adamw, "update"),
    "adamw_in_place": optimized(adamw_in_place, "step"),
    "muon": optimized(muon, "update"),
}


def programs(name: str, call: Call, numbers: Mapping[str, Any]) -> tuple[Any, ...]:
    """The programs of a call and of its derivative: their text, and the families of the kernels that they call.

    A family is known by the arguments that its kernel is traced for: one family is one program.
    """
    function = STEPS.get(name, PUBLIC[name])
    bound = partial(function, **call.keywords, **numbers)
    if name == "attention_bytes":
        return (repr(bound()),)
    if call.on_mesh:
        mesh = jax.make_mesh((1,), ("a",), (AxisType.Auto,), devices=jax.devices()[:1])
        whole = PartitionSpec()
        bound = jax.shard_map(
            partial(bound, axis_name="a"), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
    traced = [bound if call.args and not callable(call.args[0]) else partial(bound, *call.args)]
    arrays = [x for x in call.args if not callable(x)]
    if call.differentiable:
        traced.append(lambda *arrays: _derivative(bound, arrays))
    jaxprs = [jax.make_jaxpr(function)(*arrays) for function in traced]
    families = [str(id(e.params["callee"])) for j in jaxprs for e in equations(j.jaxpr) if "callee" in e.params]
    return *(re.sub(r" at 0x\w+", "", str(jaxpr)) for jaxpr in jaxprs), families


def _derivative(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    results, pull = jax.vjp(
        lambda *arrays: [x for x in jax.tree.leaves(function(*arrays)) if x.dtype == jnp.float32], *arrays
    )
    return pull(results)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_numpy_give_the_program_of_python_numbers(name: str) -> None:
    call = CALLS[name]
    blocks = {p: 16 for p in numbers_of(PUBLIC[name]) if p.startswith("block_") and name != "attention_bytes"}
    numbers = {**call.numbers, **blocks}
    with jax.enable_x64(True):
        expected = programs(name, call, numbers)
        forms_of = {parameter: list(forms(value)) for parameter, value in numbers.items()}
        # All parameters at once: numbers that are taken as Python's leave no trace that another one could hide.
        for turn in range(max(map(len, forms_of.values()), default=0)):
            taken = {p: forms[turn % len(forms)] for p, forms in forms_of.items() if forms}
            assert programs(name, call, numbers | taken) == expected, taken


# --- kernels of the library -----------------------------------------------------------------------------------------


def sample(name: str, hint: Any) -> Any:
    """A value of a static parameter, with a number in it if it can have one."""
    if name == "config":
        return Config(0.5, True, 3, (4, None), 2.0, 0.25, blocks=(("block_q", 16),))
    if name == "options":
        return Options("jensen_shannon", 0.25, 2.0, 2.0, None)
    kinds = {*typing.get_args(hint), hint}
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)[0]
    return next((value for kind, value in {bool: True, int: 3, float: 0.5}.items() if kind in kinds), "silu")


def of_numpy(value: Any) -> Any:
    """A value with NumPy's numbers in the place of Python's."""
    if isinstance(value, tuple):
        return tuple(map(of_numpy, value))
    if isinstance(value, (Config, Options)):
        return replace(value, **{f.name: of_numpy(getattr(value, f.name)) for f in fields(value)})
    return KINDS[type(value)][0](value) if type(value) in KINDS else value


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_library_take_numbers_of_numpy_as_pythons(name: str) -> None:
    kernel = KERNELS[name]
    numbers = {name: sample(name, hint) for name, hint in kernel.signature.hints.items()}
    numbers |= dict.fromkeys(kernel.signature.blocks, 16)
    expected = kernel._check(numbers)
    found = kernel._check({name: of_numpy(value) for name, value in numbers.items()})
    assert [static_key(x) for x in found[:2]] == [static_key(x) for x in expected[:2]]


# --- kernels of users -----------------------------------------------------------------------------------------------


@like_first
def scaled(x, out, *, scale: float):
    i = tk.parallel(x.shape[0], 4)
    out[i] = (x[i] * scale).astype(out.dtype)


def test_numbers_of_numpy_are_strong_in_bodies_of_users() -> None:
    x = f(8)
    with jax.enable_x64(True):
        assert "f64" not in str(scaled.trace(x, scale=2.0)) and "f64" not in str(scaled.trace(x, scale=np.float32(2)))
        assert "f64" in str(scaled.trace(x, scale=np.float64(2)))
    assert "f64" not in str(scaled.trace(x, scale=np.float64(2)))


def test_a_number_of_numpy_that_changes_the_type_of_a_carry_is_an_error_at_the_line() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((1,), x.dtype))
    def total(x, out, *, scale: Any):
        def add(j, acc):
            return acc + (x[j] * scale).sum()

        out[0] = tk.fold(tk.serial(x.shape[0], 4), add, np.float32(0))  # <-

    with jax.enable_x64(True):
        np.testing.assert_array_equal(total(f(8), scale=2.0), [16])
        with refused(CarryError, "the body of a fold changed the type", got="float64[]", fix="cast"):
            total(f(8), scale=np.float64(2))
