"""Compiling for TPUs on a machine without any, and lowering for platforms that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NoReturn

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import tilekern as tk
from tests.lang.checks import refused
from tests.lower.mosaic.pallas_kernels import TILE, double, large, looked_up, needs_libtpu
from tilekern import _jax, _machine, source
from tilekern.errors import CompileError, DependencyError, FallbackWarning, ResourceError, TargetError
from tilekern.lower.mosaic.chip import CHIPS, Chip
from tilekern.lower.mosaic.compile import toolchain
from tilekern.lower.mosaic.compile.ahead_of_time import asm, compile_ahead, vmem_used

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
V5E = CHIPS["tpu:v5e"]
each_chip = pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: c.name)


# --- ahead of time --------------------------------------------------------------------------------------------------


@needs_libtpu
@each_chip
def test_a_kernel_compiles_for_every_chip(chip: Chip) -> None:
    compiled = compile_ahead(double, [X], chip)
    assert vmem_used(compiled) == 2 * 2 * 8 * 256 * 4
    stages = asm(compiled)
    assert 'custom_call_target="tpu_custom_call"' in stages["hlo"]
    assert "func.func @body" in stages["mosaic"]
    assert "vector.load" in stages["mosaic"]


@needs_libtpu
def test_a_program_with_several_kernels_takes_what_the_largest_takes() -> None:
    compiled = compile_ahead(lambda x: (double(x[:, :128]), double(x) + 1), [X], V5E)
    assert vmem_used(compiled) == 2 * 2 * 8 * 256 * 4
    assert asm(compiled)["mosaic"].count("func.func @body") == 2


@needs_libtpu
def test_a_program_without_kernels() -> None:
    compiled = compile_ahead(lambda x: x + 1, [X], V5E)
    assert vmem_used(compiled) == 0
    assert asm(compiled)["mosaic"] == ""


@needs_libtpu
def test_threads_compile_at_the_same_time() -> None:
    chips = [*CHIPS.values()] * 2
    toolchain._devices.clear()
    with ThreadPoolExecutor(4) as pool:
        used = pool.map(lambda chip: vmem_used(compile_ahead(double, [X], chip)), chips)
    assert set(used) == {2 * 2 * 8 * 256 * 4}


@needs_libtpu
def test_two_processes_compile_at_the_same_time() -> None:
    """Libtpu's lock is for chips, and none are here."""
    code = (
        "import sys, jax, tests.lower.mosaic.pallas_kernels as k\n"
        "from tilekern.lower.mosaic import chip\nfrom tilekern.lower.mosaic.compile import ahead_of_time\n"
        "ahead_of_time.compile_ahead(k.double, [jax.ShapeDtypeStruct((8, 128), 'f4')], chip.CHIPS['tpu:v6e'])\n"
        "print('compiled', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {n: v for n, v in os.environ.items() if n not in toolchain._WITHOUT_CHIPS}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as first,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        assert first.stdout.readline() == second.stdout.readline() == "compiled\n"
        first.communicate("")
        second.communicate("")


# --- what the compiler refuses --------------------------------------------------------------------------------------


@needs_libtpu
def test_more_vector_memory_than_asked_for() -> None:
    with refused(
        ResourceError,
        "needs more memory than a core of tpu:v5e has",
        expected="at most 16.00 MiB of vmem, the kernel's vmem_limit_bytes",
        got="64.00 MiB\n",
        fix="take smaller blocks",
    ):
        compile_ahead(large(64 << 20), [TILE], V5E)  # <-


@needs_libtpu
def test_more_vector_memory_than_there_is() -> None:
    with refused(
        ResourceError,
        "needs more memory than a core of tpu:7x has",
        expected="at most 64.00 MiB of vmem",
        got="one buffer of 96.00 MiB\n",
        fix="take smaller blocks",
    ):
        compile_ahead(large(96 << 20, 1 << 30), [TILE], CHIPS["tpu:7x"])  # <-


@needs_libtpu
def test_all_the_vector_memory_that_there_is() -> None:
    with refused(
        ResourceError,
        "needs more memory than a core of tpu:7x has",
        expected="at most 63.94 MiB of vmem",
        got="64.00 MiB, 64.0 KiB too much\n",
        fix="take smaller blocks",
    ):
        compile_ahead(large(64 << 20, 1 << 30), [TILE], CHIPS["tpu:7x"])  # <-


@needs_libtpu
def test_more_scalar_memory_than_there_is() -> None:
    with refused(
        ResourceError,
        "needs more memory than a core of tpu:v6e has",
        expected="at most 1.00 MiB of smem",
        got="1.00 MiB, 136 bytes too much\n",
        fix="take smaller blocks",
    ):
        table = jax.ShapeDtypeStruct((1 << 18,), jnp.int32)
        compile_ahead(looked_up((1 << 18,)), [table, TILE], CHIPS["tpu:v6e"])  # <-


def by(body: Callable[..., Any], dtype: Any = jnp.float32) -> Callable[..., Any]:
    """A function `kernel` of one array, by a body that works on all of it."""

    def kernel(x: jax.Array) -> jax.Array:
        def store(x: Any, out: Any) -> None:
            out[...] = body(x[...])

        return pl.pallas_call(store, out_shape=jax.ShapeDtypeStruct(x.shape, dtype))(x)

    return kernel


@needs_libtpu
@pytest.mark.parametrize(
    ("body", "dtype", "reason"),
    [
        (lambda x: x + x, jnp.float16, "Mosaic failed to compile TPU kernel"),
        (lambda x: jnp.sort(x, 1), jnp.float32, "NotImplementedError: Unimplemented primitive in Pallas TPU lowering"),
    ],
    ids=["by libtpu", "by Pallas"],
)
def test_a_kernel_that_the_compiler_refuses(body: Any, dtype: Any, reason: str) -> None:
    with refused(CompileError, "kernel does not compile for tpu:v5e", got=reason, fix="please report it"):
        compile_ahead(by(body, dtype), [jax.ShapeDtypeStruct((8, 128), dtype)], V5E)  # <-


@needs_libtpu
def test_the_line_is_the_one_at_work() -> None:
    loc = source.Loc(__file__, 7)
    with pytest.raises(CompileError) as caught, source.at(loc):
        compile_ahead(by(lambda x: jnp.sort(x, 1)), [TILE], V5E)
    assert caught.value.loc == loc
    assert len(caught.value.got) < 1000


@needs_libtpu
def test_errors_of_ours_pass_through() -> None:
    def kernel(x: jax.Array) -> NoReturn:
        raise ResourceError("ours")

    with pytest.raises(ResourceError, match="ours"):
        compile_ahead(kernel, [X], V5E)


# --- libtpu ---------------------------------------------------------------------------------------------------------


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain.metadata, "version", missing)
    monkeypatch.setattr(toolchain, "_devices", {})
    with refused(
        DependencyError,
        "to compile for tpu:v5e takes libtpu",
        expected="libtpu >= 0.0.50",
        got="no package of that name",
        fix="pip install 'jax[tpu]'",
    ):
        compile_ahead(double, [X], V5E)  # <-


@pytest.mark.parametrize("version", ["0.0.48.1", "0.0.9", "unknown"])
def test_a_libtpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: version)
    monkeypatch.setattr(toolchain, "_devices", {})
    with refused(
        DependencyError,
        "this version of libtpu is not supported",
        expected="libtpu >= 0.0.50",
        got=f"libtpu {version}",
        fix="pip install 'jax[tpu]'",
    ):
        compile_ahead(double, [X], V5E)  # <-


@pytest.mark.parametrize("version", ["0.0.50", "0.0.50.1", "0.0.51", "0.1.0"])
def test_versions_of_libtpu_that_will_do(version: str) -> None:
    toolchain.check_version(version)


def test_a_libtpu_that_another_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(name: str) -> NoReturn:
        raise RuntimeError("ABORTED: Internal error when accessing libtpu multi-process lockfile.")

    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "0.0.51")
    monkeypatch.setattr(toolchain, "_devices", {})
    monkeypatch.setattr(_jax, "tpu_topology", held)
    with refused(
        DependencyError,
        "libtpu does not compile for tpu:7x here",
        expected="a libtpu that no other process has loaded",
        got="RuntimeError: ABORTED: Internal error when accessing libtpu multi-process lockfile.",
        fix="ALLOW_MULTIPLE_LIBTPU_LOAD=1",
    ):
        compile_ahead(double, [X], CHIPS["tpu:7x"])  # <-


@pytest.mark.parametrize("chips", [False, True])
def test_settings_of_libtpu_are_made_where_no_chips_are(monkeypatch: pytest.MonkeyPatch, chips: bool) -> None:
    for name in toolchain._WITHOUT_CHIPS:
        monkeypatch.setenv(name, "x")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "mine")
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "0.0.51")
    monkeypatch.setattr(toolchain, "_devices", {})
    monkeypatch.setattr(_jax, "tpu_topology", lambda name: name)
    monkeypatch.setattr(_machine, "has_tpu_chips", lambda: chips)
    assert toolchain.device(V5E) == "v5e:2x2"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "mine"
    assert os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD") == (None if chips else "1")


# --- lowering for a platform that is not here -----------------------------------------------------------------------


def _tpu(site: _jax.Site, x: jax.Array) -> list[jax.Array]:
    with _jax.abstract_tpu("TPU v6 lite", 1):
        return [double(x)]


double_p = _jax.primitive("test_double", lambda x: [_jax.ShapedArray(x.shape, x.dtype)], multiple_results=True)
for _platform in (None, "cpu", "cuda"):
    _jax.register_lowering(double_p, lambda site, x: [x * 2], _platform)
_jax.register_lowering(double_p, jax.jit(_tpu, static_argnums=0), "tpu")


def call(x: jax.Array) -> jax.Array:
    """2 * x: a Pallas kernel on a TPU, one operation elsewhere."""
    (found,) = _jax.bind(double_p, x)
    return found


ALL = ("cpu", "cuda", "tpu")
CUSTOM_CALL = "stablehlo.custom_call @tpu_custom_call"
each_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@pytest.mark.parametrize("platforms", [("tpu",), ALL])
def test_lowering_for_platforms(platforms: tuple[str, ...]) -> None:
    text = jax.jit(call).trace(X).lower(lowering_platforms=platforms).as_text()
    assert text.count(CUSTOM_CALL) == 1


@pytest.mark.parametrize("platforms", [("tpu",), ALL])
def test_export_for_platforms(platforms: tuple[str, ...]) -> None:
    exported = jax.export.export(jax.jit(call), platforms=platforms)(X)
    assert exported.mlir_module().count(CUSTOM_CALL) == 1
    if "cpu" in platforms:
        x = np.arange(64.0 * 256, dtype=np.float32).reshape(64, 256)
        np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x), 2 * x)


def test_lowering_for_a_tpu_does_not_change_what_runs_here() -> None:
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0])
    assert CUSTOM_CALL in step.trace(X).lower(lowering_platforms=("tpu",)).as_text()
    np.testing.assert_array_equal(step(jnp.ones(X.shape)), np.full(X.shape, 8, np.float32))


@each_kind
@pytest.mark.parametrize("check", [True, False])
def test_lowering_inside_shard_map(kind: AxisType, check: bool) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    spec = PartitionSpec("d", None)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(call, in_specs=spec, out_specs=spec, check_vma=check)
        assert CUSTOM_CALL in jax.jit(mapped).trace(x).lower(lowering_platforms=("tpu",)).as_text()


# --- several devices ------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x: x)
def scaled(x: tk.Ref, out: tk.Ref, *, block: tk.Block = 8) -> None:
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


ROWS = jax.ShapeDtypeStruct((64, 4096), jnp.float32)


def divided(kind: AxisType) -> jax.ShapeDtypeStruct:
    """An array whose rows are divided among half of four devices, which need not be here."""
    mesh = AbstractMesh((2, 2), ("d", "e"), axis_types=(kind, kind))
    return jax.ShapeDtypeStruct((64, 4096), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d", None)))


def mapped(axes: set[str], check: bool = True) -> Any:
    spec = PartitionSpec("d", None)
    return jax.shard_map(scaled, axis_names=axes, in_specs=spec, out_specs=spec, check_vma=check)


def traced(function: Any, x: Any) -> Any:
    with jax.sharding.use_abstract_mesh(x.sharding.mesh):
        return jax.jit(function).trace(x)


def for_tpu(function: Any, x: Any) -> str:
    return traced(function, x).lower(lowering_platforms=("tpu",)).as_text()


DIVIDED = {
    "summary": "XLA cannot divide the kernel scaled among TPUs",
    "expected": "a call in jax.shard_map over all axes of the mesh",
    "fix": "wrap the call in jax.shard_map",
}


@pytest.mark.smoke
def test_a_kernel_is_not_divided_among_devices() -> None:
    assert CUSTOM_CALL in jax.jit(scaled).trace(ROWS).lower(lowering_platforms=("tpu",)).as_text()  # for one device
    with refused(TargetError, got="a program that XLA divides among 4 devices", **DIVIDED):
        traced(scaled, divided(AxisType.Auto)).lower(lowering_platforms=("tpu",))  # <-


def test_calls_under_vmap_are_not_divided_among_devices() -> None:
    with refused(TargetError, got="a program that XLA divides among 4 devices", **DIVIDED):
        traced(lambda x: jax.vmap(scaled)(x[None])[0], divided(AxisType.Auto)).lower(lowering_platforms=("tpu",))  # <-


@each_kind
def test_a_kernel_is_not_divided_in_a_shard_map_over_some_axes(kind: AxisType) -> None:
    with refused(TargetError, got="a program that XLA divides among the mesh's 'e' of 2", **DIVIDED):
        traced(mapped({"d"}), divided(kind)).lower(lowering_platforms=("tpu",))  # <-


@pytest.mark.smoke
@each_kind
@pytest.mark.parametrize("check", [True, False])
def test_each_device_calls_the_kernel_in_a_shard_map(kind: AxisType, check: bool) -> None:
    assert CUSTOM_CALL in for_tpu(mapped({"d", "e"}, check), divided(kind))


def test_the_portable_backend_is_divided() -> None:
    assert CUSTOM_CALL not in for_tpu(lambda x: scaled(x, target="cpu:xla"), divided(AxisType.Auto))


def test_what_falls_back_to_the_portable_backend_is_divided() -> None:
    with jax.enable_x64(True), pytest.warns(FallbackWarning, match="f64"):
        assert CUSTOM_CALL not in for_tpu(lambda x: scaled(x.astype(jnp.float64)), divided(AxisType.Auto))


def test_pallas_needs_to_know_the_chip() -> None:
    """Without, the tests above would show nothing."""
    with pytest.raises(ValueError, match="Unsupported TPU device kind: cpu"):
        jax.jit(double).trace(X)


def test_no_tpu_is_here() -> None:
    assert _machine.tpu_kind() is None
    assert not _machine.has_tpu_chips()
