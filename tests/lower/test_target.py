"""The names of targets, which of them a call is lowered to, and what it is launched with there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tests.lower.triton.test_call import opaque
from tilekern import _machine
from tilekern.errors import ArgumentError, TargetError
from tilekern.lower.backend import Target
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.target import DEFAULT, TARGETS, on_platform, resolve

X = numbers(5)


@like_first
def copy(x, out):
    i = tk.parallel(5, 2)
    out[i] = x[i]


def test_a_name_says_platform_and_model() -> None:
    for name, known in TARGETS.items():
        assert known.name == name
        assert name.startswith(f"{known.platform}:")
        assert not known.portable and known.fallback != "always"


@pytest.mark.parametrize(("installed", "backend"), [(True, "llvm"), (False, "xla")])
def test_cpu_is_the_best_backend_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool, backend: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: (name == "llvmlite" and installed) or None)
    best = TARGETS[f"cpu:{backend}"]
    assert resolve("cpu") == replace(best, fallback="always")
    assert on_platform("cpu", None) is best
    assert on_platform("cpu", resolve("cpu")) is not DEFAULT
    assert resolve(best.name) is best


@pytest.mark.parametrize("name", ["cpu", "cpu:xla", "cpu:llvm"])
def test_a_call_on_a_cpu(name: str) -> None:
    if name == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    np.testing.assert_array_equal(copy(X, target=name), X)


def test_what_is_exported_is_portable() -> None:
    """Machine code of this process is of no use to another one."""
    assert on_platform("cpu", None, exporting=True) is DEFAULT
    assert on_platform("cpu", resolve("cpu"), exporting=True).backend == "xla"
    exported = jax.export.export(jax.jit(lambda x: copy(copy(x), target="cpu")))(X)
    assert "custom_call" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X), X)
    with refused(
        TargetError,
        "a call with target='cpu:llvm' cannot be exported",
        expected="another process",
        got="machine code",
        fix="leave target out",
    ):
        jax.export.export(jax.jit(lambda x: copy(x, target="cpu:llvm")))(X)  # <-


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:sm_70", "cpu:", "CPU", "", "tpu:v9"])
def test_a_target_that_does_not_exist(name: str) -> None:
    with refused(
        TargetError,
        "there is no such target",
        expected="'cpu' or one of 'cpu:xla', 'cpu:llvm', 'cuda:sm_80'",
        got=f"target = {name!r}",
        fix="name one of these; 'cpu:xla', the portable backend, runs on every platform of JAX",
    ):
        copy(X, target=name)  # <-


@pytest.mark.parametrize("name", [3, ["cpu"], None.__class__])
def test_a_target_that_is_no_name(name: object) -> None:
    with refused(TargetError, "there is no such target", expected="'cpu'", got="target = ", fix="'cpu:xla'"):
        copy(X, target=name)  # <-


# --- the target of a call -------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a GPU of a compute capability into this machine; None for no GPU."""
    return lambda capability: monkeypatch.setattr(_machine, "compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "name", "portable"),
    [
        (None, "cuda:sm_80", True),  # none here: code for whichever runs it
        (80, "cuda:sm_80", False),
        (86, "cuda:sm_86", False),
        (87, "cuda:sm_80", True),  # no target of its own
        (89, "cuda:sm_89", False),
        (90, "cuda:sm_90", False),
        (100, "cuda:sm_100", False),
        (103, "cuda:sm_103", False),
        (110, "cuda:sm_80", True),
        (120, "cuda:sm_120", False),
        (121, "cuda:sm_80", True),
    ],
)
def test_the_gpu_that_is_here_decides(gpu: Any, capability: int | None, name: str, portable: bool) -> None:
    gpu(capability)
    found = on_platform("cuda", None)
    assert (found.name, found.portable) == (name, portable)
    assert found.emitter == ("auto" if capability == 90 else "")
    assert on_platform("any other", None) is DEFAULT


@pytest.mark.parametrize(
    ("name", "here", "runs"),
    [
        ("cuda:sm_80", {80}, True),
        ("cuda:sm_80", {86}, True),  # code of sm_80 runs on later models of the same major number
        ("cuda:sm_86", {80}, False),
        ("cuda:sm_80", {90}, False),
        ("cuda:sm_90", {80}, False),
        ("cuda:sm_90", {80, 90}, True),
        ("cuda:sm_100", {103}, False),  # Triton's code is for sm_100a
        ("cuda:sm_100", {100}, True),
        ("cuda:sm_120", set(), True),  # no GPU here: a program for any may be lowered
        ("cpu:xla", {90}, True),
    ],
)
def test_code_for_another_gpu_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, here: set[int], runs: bool
) -> None:
    """Also inside of a jitted function; an exported program may run elsewhere."""
    monkeypatch.setattr(_machine, "compute_capabilities", lambda: here)
    if "cuda" in name:
        pytest.importorskip("triton", reason="needs triton")
    traced = jax.jit(lambda x: copy(x, target=name)).trace(X)
    consent = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    assert jax.export.export(jax.jit(lambda x: copy(x, target=name)), platforms=("cuda",), disabled_checks=consent)(X)
    if runs:
        assert traced.lower(lowering_platforms=("cuda",))
        return
    with refused(
        TargetError,
        "copy is compiled for another GPU than that of this machine",
        expected=f"a GPU that runs the code of {name}",
        got=f"a GPU of cuda:sm_{min(here)}",
        fix="leave target out, or name 'cpu:xla'",
    ):
        jax.jit(lambda x: copy(x, target=name)).trace(X).lower(lowering_platforms=("cuda",))  # <-


def test_the_capabilities_of_all_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [type("Device", (), {"compute_capability": capability})() for capability in ("9.0", "8.0", "12.0")]
    monkeypatch.setattr(jax, "devices", lambda platform: {"cuda": devices}[platform])
    assert _machine.compute_capabilities() == {80, 90, 120}
    assert _machine.compute_capability() == 80


def test_compiled_stages_are_for_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    compiled = copy.trace(X).lower("cuda:sm_80").compile()
    monkeypatch.setattr(_machine, "compute_capabilities", lambda: {90})
    with pytest.raises(TargetError, match="copy is compiled for another GPU") as caught:
        compiled(X)
    assert caught.value.got == "a GPU of cuda:sm_90"


@pytest.mark.parametrize(
    ("kind", "name", "portable"),
    [
        (None, "tpu:v5e", True),  # none here: code for whichever of the four runs it
        ("TPU v5 lite", "tpu:v5e", False),
        ("TPU v5e", "tpu:v5e", False),
        ("TPU v5", "tpu:v5p", False),
        ("TPU v5p", "tpu:v5p", False),
        ("TPU v6 lite", "tpu:v6e", False),
        ("TPU v6e", "tpu:v6e", False),
        ("TPU7x", "tpu:7x", False),
        ("TPU v4", "cpu:xla", False),
        ("TPU8t", "cpu:xla", False),
    ],
)
def test_the_tpu_that_is_here_decides(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, name: str, portable: bool
) -> None:
    monkeypatch.setattr(_machine, "tpu_kind", lambda: kind)
    found = on_platform("tpu", None)
    assert (found.name, found.portable) == (name, portable)


def test_chips_have_the_names_that_targets_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for chip in CHIPS.values():
        monkeypatch.setattr(_machine, "tpu_kind", lambda kind=chip.device_kind: kind)
        assert on_platform("tpu", None) is TARGETS[chip.name]


def test_a_gpu_that_is_too_old(gpu: Any) -> None:
    gpu(75)
    with refused(
        TargetError,
        "no code for this GPU",
        expected="compute capability 8.0 or newer",
        got="compute capability 7.5",
        fix='target="cpu:xla"',
    ):
        jax.jit(copy).trace(X).lower(lowering_platforms=("cuda",))  # <-
    asked = jax.jit(lambda x: copy(x, target="cpu:xla")).trace(X).lower(lowering_platforms=("cuda",))
    assert "stablehlo" in asked.as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu", "any other"])
@pytest.mark.parametrize("asked", TARGETS.values(), ids=lambda t: t.name)
def test_what_a_call_asks_for_it_gets_or_an_error(gpu: Any, asked: Target, platform: str) -> None:
    """The portable backend serves every platform; the others are for one."""
    gpu(90)
    if asked is DEFAULT or asked.platform == platform:
        assert on_platform(platform, asked) is asked
        return
    with refused(
        TargetError,
        f"a call with target={asked.name!r} is lowered for another platform",
        expected=f"a program for {asked.platform}",
        got=f"platform = {platform!r}",
        fix="leave target out",
    ):
        on_platform(platform, asked)  # <-


def test_a_call_for_a_gpu_does_not_run_on_a_cpu() -> None:
    with refused(
        TargetError,
        "a call with target='cuda:sm_90' is lowered for another platform",
        expected="a program for cuda",
        got="platform = 'cpu'",
        fix="lowering_platforms=('cuda',)",
    ):
        copy(X, target="cuda:sm_90")  # <-


def test_the_portable_backend_in_a_module_for_every_platform() -> None:
    """Without a custom call, so nobody has to consent to one."""
    exported = jax.export.export(jax.jit(lambda x: copy(x, target="cpu:xla")), platforms=("cpu", "cuda", "tpu"))(X)
    assert "custom_call" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X), X)


# --- what code is made for it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "architecture", "machine_code"),
    [(None, "sm_80", False), (89, "sm_89", True), (90, "sm_90a", True), (120, "sm_120a", True), (121, "sm_80", False)],
)
def test_the_code_fits_the_gpu_that_is_here(gpu: Any, capability: int, architecture: str, machine_code: bool) -> None:
    """Machine code where the GPU is known; PTX of sm_80, which every later GPU takes, where it is not."""
    pytest.importorskip("triton", reason="needs triton")
    gpu(capability)

    @like_first  # fresh: families remember what they lowered
    def fresh(x, out):
        out[...] = x[...] + 1

    (message,) = opaque(jax.jit(fresh).trace(X).lower(lowering_platforms=("cuda",)).as_text())
    assert f".target {architecture}\n".encode() in message
    assert (b"\x7fELF" in message) == machine_code


# --- launch options -------------------------------------------------------------------------------------------------


@like_first
def scheduled(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] + 1


@scheduled.schedule("cuda")
def _cuda(x: Any, target: str) -> dict[str, int]:
    return {"block": 2, "num_warps": 8 if target == "cuda:sm_90" else 2, "num_stages": 4}


def launched(traced: tk.Traced, target: str) -> tuple[int, int]:
    """Warps and stages of the program."""
    program: Any = traced.lower(target)._lowered
    return program.program.num_warps, program.program.num_stages


def test_launch_options_come_from_the_schedule_and_the_call() -> None:
    assert launched(scheduled.trace(X), "cuda:sm_90") == (8, 4)
    assert launched(scheduled.trace(X), "cuda:sm_80") == (2, 4)
    assert launched(scheduled.trace(X, num_warps=16), "cuda:sm_90") == (16, 4)
    assert launched(scheduled.trace(X, num_stages=1), "cuda:sm_90") == (8, 1)
    assert launched(copy.trace(X), "cuda:sm_90") == (1, 2)  # what a small tile gets by itself


def test_launch_options_are_another_program_but_no_other_trace() -> None:
    traced = scheduled.trace(X, target="cuda:sm_90")
    assert scheduled.trace(X, target="cuda:sm_90", num_warps=2).ir.axes == traced.ir.axes
    assert traced.lower("cuda:sm_90").text == scheduled.trace(X, num_warps=2).lower("cuda:sm_90").text


def test_other_backends_do_not_look_at_launch_options() -> None:
    np.testing.assert_array_equal(scheduled(X, num_warps=2, num_stages=3), X + 1)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: scheduled(x, num_warps=2)))(X[None]), X[None] + 1)


@pytest.mark.parametrize("option", ["num_warps", "num_stages"])
@pytest.mark.parametrize(("value", "got"), [(0, "0"), (-4, "-4"), (2.0, "2.0 (float)"), ("4", "'4' (str)")])
def test_a_launch_option_is_a_positive_integer(option: str, value: Any, got: str) -> None:
    summary = f"{option} must be a static integer of at least 1"
    with refused(ArgumentError, summary, expected="a Python int >= 1", got=f"{option} = {got}"):
        scheduled(X, **{option: value})  # <-


def test_a_schedule_names_blocks_and_launch_options_only() -> None:
    @like_first
    def f(x, out, *, block: tk.Block = 4):
        out[...] = x[...]

    @f.schedule("cuda")
    def _(x: Any) -> dict[str, int]:
        return {"warps": 4}

    with refused(
        ArgumentError,
        "names a block that f does not have",
        expected="one of block, num_warps, num_stages",
        got="warps = 4",
        fix="tk.Block",
    ):
        f.trace(X).lower("cuda:sm_90")  # <-
