"""Whole XLA programs with our custom calls, compiled ahead of time for an H200 by XLA's own GPU compiler. No GPU.

XLA hands the custom call's bytes to jaxlib, which parses them and, if there is no machine code yet, assembles the PTX.
So everything up to the launch is checked. One child process compiles all programs, because JAX reads the plugin's
settings from the environment when it is imported. This file is also that process's main program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilekern import source
from tilekern.ir.types import BF16, F32, DType
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul
from tilekern.kernels.softmax import softmax
from tilekern.lower.triton.call import CUSTOM_CALL, call
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.program import Argument, Descriptor, Program, Result

ROOT = Path(__file__).parents[3]

# XLA's description of the GPU (stream_executor/device_description.proto), from which its compiler decides.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 141000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"  device_description_str: "H200"
runtime_version { major: 12 minor: 8 }  dnn_version_info { major: 9 minor: 10 }
"""

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
N = 256
X = jax.ShapeDtypeStruct((N,), F32)
M = jax.ShapeDtypeStruct((N, N), BF16)
QUERY = jax.ShapeDtypeStruct((2, 300, 4, 64), BF16)
KEYS = jax.ShapeDtypeStruct((2, 257, 2, 64), BF16)
SLOPES = jax.ShapeDtypeStruct((4,), F32)
WEIGHT = jax.ShapeDtypeStruct((256, 200), BF16)
EMPTY = jax.ShapeDtypeStruct((0, 3), F32)
SAME = Result((N,), F32, F32)
BOX = Descriptor((N, N), (N, 1), (64, 64))


def program(
    name: str, body: str, dtypes: str, results: tuple[Result, ...], descriptor: Descriptor | None = None
) -> Program:
    """A program of 4 programs; its parameters, operands before results, are the letters of `dtypes`."""
    named: dict[str, DType] = {"f": F32, "b": BF16}
    arguments = tuple(Argument(f"a{n}", named[letter], descriptor) for n, letter in enumerate(dtypes))
    lines = "".join(f"    {line}\n" for line in ("i = tl.program_id(0) * 64 + tl.arange(0, 64)", *body.split("; ")))
    text = f"{HEAD}def {name}({', '.join(a.name for a in arguments)}):\n{lines}"
    operands = tuple(range(len(arguments) - len(results)))
    return Program(name, text, arguments, operands, (), results, 4, 4, 1, {}, source.UNKNOWN)


ADD = program("add", "tl.store(a2 + i, tl.load(a0 + i) + tl.load(a1 + i))", "fff", (SAME,))
DOT = program(
    "dot",
    "k = tl.program_id(0) * 64; a2.store([k, k], tl.dot(a0.load([k, 0]), a1.load([0, k])).to(tl.bfloat16))",
    "bbb",
    (Result((N, N), BF16, BF16),),
    BOX,
)
STEP = program("step", "tl.store(a2 + i, tl.load(a0 + i) + tl.load(a1 + i))", "fff", (replace(SAME, alias=0),))
COUNT = program(
    "count",
    "tl.atomic_add(a1, tl.sum(tl.load(a0 + i))); tl.store(a2 + tl.program_id(0), tl.sum(tl.load(a0 + i)))",
    "fff",
    (Result((), F32, BF16, zeroed=True), Result((4,), F32, BF16, partial_sums=True)),
)
FIRST = program("first", "tl.store(a2 + i, tl.load(a0 + i))", "fff", (SAME,))


def binary(made: Program, target: str = "cuda:sm_90") -> Binary:
    return compile_program(made, CHIPS[target])


def run(made: Program, *arrays: Any) -> Any:
    return call(made, binary(made), *arrays)[0]


# --- the programs; those whose names begin with `bad` are refused -----------------------------------------------------


def two_calls_among_plain_operations(x: Any = X, m: Any = M) -> Any:
    total = run(ADD, x * 2 + 1, jnp.sin(x))
    return jnp.sum(total), run(DOT, m + total.astype(BF16)[:, None], m.T) * 3


def library_kernels_in_a_layer(q: Any = QUERY, k: Any = KEYS, w: Any = WEIGHT) -> Any:
    """Kernels as users call them: ragged, with grouped heads, under vmap, for any GPU and for this one."""
    attended = flash_attention(q * 2, k, k, causal=True, target="cuda:sm_90")
    hidden = jax.vmap(lambda x: matmul(x.reshape(-1, 256), w, target="cuda:sm_90"))(attended)
    return softmax(hidden + 1)


def the_gradient_of_attention(q: Any = QUERY, k: Any = KEYS, slopes: Any = SLOPES) -> Any:
    """Gradients by all float arrays: the forward kernel, those by query and key, and that by a term."""

    def loss(q: Any, k: Any, slopes: Any) -> Any:
        mod = jax.tree_util.Partial(lambda slopes, s, b, n, i, j: s - slopes[n] * abs(i - j), slopes)
        return flash_attention(q, k, k, causal=True, score_mod=mod, target="cuda:sm_90").astype(F32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, slopes)


def many_calls_in_a_loop(x: Any = X) -> Any:
    return jax.lax.fori_loop(0, 5, lambda _, y: run(ADD, y, x), x)


def in_place(x: Any = X) -> Any:
    return run(STEP, x * 2, x)


def in_place_with_the_old_value_still_needed(x: Any = X) -> Any:
    old = x * 2
    return run(STEP, old, x), old


def in_place_with_the_old_value_as_another_operand(x: Any = X) -> Any:
    old = x * 2
    return run(STEP, old, old)


def zeroed_and_summed(x: Any = X) -> Any:
    return call(COUNT, binary(COUNT), x)


def an_empty_operand(x: Any = X, e: Any = EMPTY) -> Any:
    return run(FIRST, x, e)


def nothing_to_launch(x: Any = X) -> Any:
    return call(replace(ADD, programs=0), binary(ADD), x, x)


def ptx_of_an_older_gpu(x: Any = X) -> Any:
    return call(ADD, _without_cubin(binary(ADD, "cuda:sm_80")), x, x)


def a_cubin_whose_ptx_is_broken(x: Any = X) -> Any:
    return call(ADD, _broken(binary(ADD), "unread"), x, x)


def bad_ptx(x: Any = X) -> Any:
    return call(ADD, _without_cubin(_broken(binary(ADD), "bogus")), x, x)


def bad_ptx_of_a_newer_gpu(x: Any = X) -> Any:
    return call(ADD, _without_cubin(binary(ADD, "cuda:sm_100")), x, x)


def bad_compression(x: Any = X) -> Any:
    return jax.ffi.ffi_call(CUSTOM_CALL, X)(x, opaque=b"not zlib")


def bad_message(x: Any = X) -> Any:
    return jax.ffi.ffi_call(CUSTOM_CALL, X)(x, opaque=zlib.compress(b"not a message"))


def _broken(made: Binary, word: str) -> Binary:
    """jaxlib takes kernels with the same name and PTX for one kernel, so each PTX needs a comment of its own."""
    return replace(made, asm={**made.asm, "ptx": made.text("ptx").replace("ret;", f"{word};")})


def _without_cubin(made: Binary) -> Binary:
    return replace(made, asm={**made.asm, "cubin": b""})


PROGRAMS: tuple[Callable[..., Any], ...] = (
    two_calls_among_plain_operations,
    library_kernels_in_a_layer,
    the_gradient_of_attention,
    many_calls_in_a_loop,
    in_place,
    in_place_with_the_old_value_still_needed,
    in_place_with_the_old_value_as_another_operand,
    zeroed_and_summed,
    an_empty_operand,
    nothing_to_launch,
    ptx_of_an_older_gpu,
    a_cubin_whose_ptx_is_broken,
    bad_ptx,
    bad_ptx_of_a_newer_gpu,
    bad_compression,
    bad_message,
)


def main() -> None:
    """The child: one line of JSON, for each program its compiled HLO text, or the error."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    ).devices
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), "x"), jax.sharding.PartitionSpec())
    outcomes = {}
    for function in PROGRAMS:
        staged = jax.jit(function, in_shardings=sharding, out_shardings=sharding).trace(*(function.__defaults__ or ()))
        lowered = staged.lower(lowering_platforms=("cuda",))
        try:
            outcomes[function.__name__] = [lowered.compile().as_text(), ""]
        except jax.errors.JaxRuntimeError as error:
            outcomes[function.__name__] = ["", str(error)]
    sys.stdout.write(json.dumps(outcomes) + "\n")


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of every program: (HLO, error)."""
    triton = pytest.importorskip("triton", reason="needs triton")
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax-cuda13-plugin")
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-pjrt")
    # XLA looks for ptxas on the path first; Triton's package has one.
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PATH": f"{ptxas}{os.pathsep}{os.environ['PATH']}",
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.lower.triton.test_ahead_of_time"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.smoke
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_xla_compiles_what_is_right_and_refuses_what_is_not(outcomes: Any, function: Callable[..., Any]) -> None:
    hlo, error = outcomes[function.__name__]
    if function.__name__.startswith("bad"):
        assert error
    else:
        assert hlo, error


@pytest.mark.parametrize(
    "function, calls",
    [
        (two_calls_among_plain_operations, 2),
        (library_kernels_in_a_layer, 3),
        (the_gradient_of_attention, 4),
        (many_calls_in_a_loop, 1),
        (in_place, 1),
        (zeroed_and_summed, 1),
        (an_empty_operand, 1),
        (nothing_to_launch, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_program_keeps_its_calls(outcomes: Any, function: Callable[..., Any], calls: int) -> None:
    assert outcomes[function.__name__][0].count(f'custom_call_target="{CUSTOM_CALL}"') == calls


def test_plain_operations_around_are_fused(outcomes: Any) -> None:
    hlo, _ = outcomes["two_calls_among_plain_operations"]
    assert hlo.count("kind=kLoop") >= 2
    assert re.search(r"%add\S* = .*custom-call", hlo) and re.search(r"%dot\S* = .*custom-call", hlo), "for profiles"


def test_an_old_value_is_copied_only_where_it_is_needed(outcomes: Any) -> None:
    def copies(name: str) -> int:
        hlo, _ = outcomes[name]
        assert "output_to_operand_aliasing={{}: (0, {})}" in hlo
        return hlo.count(" copy(")

    assert copies("in_place") == 0
    assert copies("in_place_with_the_old_value_still_needed") == 1
    assert copies("in_place_with_the_old_value_as_another_operand") == 1


@pytest.mark.parametrize(
    "name, reason",
    [
        ("bad_ptx", "bogus"),
        ("bad_ptx_of_a_newer_gpu", "ptxas"),
        ("bad_compression", "Failed to uncompress"),
        ("bad_message", "Failed to parse"),
    ],
)
def test_jaxlib_says_why_it_refuses(outcomes: Any, name: str, reason: str) -> None:
    assert reason in outcomes[name][1]


if __name__ == "__main__":
    main()
