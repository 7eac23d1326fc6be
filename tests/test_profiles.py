"""Names of kernels and lines of users, as profiles show them: in HLO, in MLIR, and in a recorded profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import like_first
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.compile.ahead_of_time import compile_ahead
from tilekern.lower.target import resolve

X = jnp.ones((2, 640))
_PACKAGE = str(Path(tk.__file__).parent)


@pytest.fixture(autouse=True)
def keep_names_and_lines() -> Iterator[None]:
    """What XLA compiled for another checkout may have other names and lines, which JAX's key leaves out."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@like_first
def shaped(x: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0], 64)
    out[i] = x[i] * jnp.tanh(x[i])


@tk.op(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def twice(x: Any) -> Any:
    return shaped(shaped(x))


def program(x: Any) -> Any:
    with jax.named_scope("encoder"):
        found = jax.vmap(shaped)(x)
        found += jax.grad(lambda v: shaped(v).sum())(x[0])
    with jax.named_scope("decoder"):
        return twice(found[0])


_TARGETS = {"cpu": "tilekern_llvm", "cuda": "triton_kernel_call_ffi", "tpu": "tpu_custom_call"}
_PATHS = [
    r"encoder/vmap\(jit\(shaped\)\)/.*shaped",
    r"encoder/transpose\(jvp\(jit\(shaped\)\)\)/.*shaped_backward",
    r"decoder/jit\(twice\)/.*shaped",
]


def calls(hlo: str) -> Iterator[tuple[str, str]]:
    """The name of each custom call, and its path: `op_name`."""
    for line in hlo.splitlines():
        if any(f'custom_call_target="{target}"' in line for target in _TARGETS.values()):
            name, path = re.findall(r'%(\S+) = .*op_name="([^"]*)"', line)[0]
            yield name.split(".")[0], path


def compiled(platform: str) -> str:
    """The program's HLO, compiled."""
    if platform == "cpu":
        return jax.jit(program).lower(X).compile().as_text()
    pytest.importorskip("libtpu", reason="needs libtpu")
    chip = CHIPS[resolve("tpu:v5e").name]
    return compile_ahead(program, [jax.ShapeDtypeStruct(X.shape, X.dtype)], chip).as_text()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_compiled_calls_have_the_kernels_names_and_the_users_scopes(platform: str) -> None:
    found = list(calls(compiled(platform)))
    assert {name for name, _ in found} == {"shaped", "shaped_backward"}
    for path in _PATHS:
        assert any(re.search(path, p) for _, p in found), path


def test_compiled_calls_have_the_users_lines() -> None:
    hlo = compiled("cpu")
    files = set(re.findall(r'^\d+ "(.*\.py)"$', hlo, re.MULTILINE))
    assert __file__ in files
    assert not [f for f in files if f.startswith(_PACKAGE)]


@pytest.mark.parametrize("platform", _TARGETS)
def test_lowered_calls_have_names_on_every_platform(platform: str) -> None:
    if platform == "cuda":
        pytest.importorskip("triton", reason="needs triton")
    text = jax.jit(program).trace(X).lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    names = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', text, re.MULTILINE))
    places = re.findall(rf"custom_call @{_TARGETS[platform]}.* loc\((#loc\d+)\)$", text, re.MULTILINE)
    assert {names[place].removesuffix("/pallas_call") for place in places} == {"shaped", "shaped_backward"}
    assert {"jit(program)/encoder/vmap(jit(shaped))", "jit(program)/decoder/jit(twice)"} <= set(names.values())


def test_a_profile_has_the_kernels_name(tmp_path: Path) -> None:
    run = jax.jit(lambda x: shaped(x) + 1)
    run(X[0]).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        run(X[0]).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    events = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
    assert any(re.fullmatch(r"shaped(\.\d+)?", name) for name in events)
