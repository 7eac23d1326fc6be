"""Which dims of the arrays of every function may be symbols in `jax.export`, and what is said of the others."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernel.symbols import close, exported, symbol
from tests.kernels.dims_of_calls import CALLS, SIZES, floats
from tilekern import kernels, nn
from tilekern.errors import ArgumentError

pytestmark = pytest.mark.one_backend

LARGE = 40
"""A size of more than two chunks of 16, with a rest."""

# The letters of the dims that may be symbols, with a function for each.
FREE = {
    "softmax": "BT",
    "log_softmax": "BT",
    "rms_norm": "BT",
    "add_rms_norm": "BT",
    "rms_norm_quantized": "BT",
    "layer_norm": "BT",
    "group_norm": "B",
    "swiglu": "BTC",
    "rope": "BTN",
    "rope of common positions": "BTN",
    "rms_norm_rope": "BTN",
    "matmul": "BMV",
    "matmul of batches": "BMV",
    "fused_matmul": "BMV",
    "quantized_matmul": "BM",
    "symmetric_matmul": "B",
    "ragged_dot": "MV",
    "ragged_dot of bytes": "M",
    "ragged_contracting_dot": "MDV",
    "fused_ragged_dot": "MV",
    "cross_entropy": "BT",
    "distillation": "T",
    "flash_attention": "B",
    "causal_conv1d": "BC",
    "linear_attention": "BC",
    "ssd": "BH",
    "gated_delta_rule": "BC",
    "rg_lru": "BC",
    "selective_scan": "BC",
    "sample": "B",
    "sample_hidden": "B",
    "verify_drafts": "B",
    "verify_draft_tree": "B",
    "paged_attention": "B",
    "ragged_paged_attention": "T",
    "mla_attention": "BN",
    "index_scores": "B",
    "select_keys": "B",
    "write_pages": "HIPT",
    "write_latents": "IPT",
    "write_index_keys": "HIPT",
    "copy_pages": "HIR",
    "adamw_step": "MC",
    "QuantizedArray.quantize": "BMC",
    "nn.dot_product_attention": "B",
    "nn.attention_fn": "BN",
    "nn.softmax": "BT",
    "nn.log_softmax": "BT",
    "nn.rms_norm": "BT",
    "nn.layer_norm": "BT",
    "nn.group_norm": "B",
    "nn.scaled_matmul": "BM",
    "nn.ragged_dot": "MV",
    "nn.moe": "T",
}


def letters(name: str) -> list[str]:
    return sorted({dim for shape in CALLS[name].shapes for dim in shape if dim.isalpha()})


def arrays_of(name: str, sizes: dict[str, int]) -> list[np.ndarray]:
    call = CALLS[name]
    shapes = (tuple(sizes[dim] if dim in sizes else int(dim) for dim in shape) for shape in call.shapes)
    return [call.makers.get(n, floats)(shape, sizes) for n, shape in enumerate(shapes)]


def types_of(name: str, letter: str) -> list[Any]:
    """The types of the arrays, with a symbol for the dims of a letter."""
    pairs = zip(CALLS[name].shapes, arrays_of(name, SIZES), strict=True)
    return [symbol(*({letter: letter.lower()}.get(d, SIZES.get(d, d)) for d in s), dtype=x.dtype) for s, x in pairs]


def test_every_function_of_the_library_is_in_the_table() -> None:
    functions = {name.partition(" ")[0] for name in CALLS}
    same = {name for name in nn.__all__ if getattr(nn, name) is getattr(kernels, name, None)}
    expected = {n for n in kernels.__all__ if n != "QuantizedArray"} | {f"nn.{n}" for n in {*nn.__all__} - same}
    assert functions == expected | {"QuantizedArray.quantize"}
    assert FREE.keys() == CALLS.keys()


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "letter"), [(name, letter) for name, free in FREE.items() for letter in free])
def test_a_symbol_serves_two_sizes(name: str, letter: str) -> None:
    function = CALLS[name].function
    run = exported(function, *types_of(name, letter))
    for size in (SIZES[letter], LARGE):
        arrays = arrays_of(name, {**SIZES, letter: size})
        results = (jax.tree.leaves(f(*map(jnp.asarray, arrays))) for f in (run, function))
        for result, expected in zip(*results, strict=True):
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
            if jnp.issubdtype(expected.dtype, jnp.floating):
                close(result, expected, arrays)
            else:
                np.testing.assert_array_equal(result, expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "letter"), [(n, x) for n in CALLS for x in letters(n) if x not in FREE[n]])
def test_any_other_symbol_is_refused_by_its_name(name: str, letter: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        jax.eval_shape(CALLS[name].function, *types_of(name, letter))
    assert re.search(rf"\b{letter.lower()}\b", f"{raised.value.expected} {raised.value.got}")
    assert raised.value.fix
