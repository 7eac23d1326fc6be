"""A backend of another package: the toy of the documentation, which the whole of tilekern knows by its record alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tests.test_docs import codes
from tilekern import testing
from tilekern.command_line import OK, main
from tilekern.errors import ArgumentError, FallbackWarning, TargetError, TilekernError
from tilekern.ir.types import DTYPES
from tilekern.lower.target import on_platform, resolve
from tilekern.testing import support
from tilekern.testing.fuzz import worker
from tilekern.testing.fuzz.modes import modes
from tilekern.testing.fuzz.wild import Wild
from tilekern.testing.programs import assert_agrees
from tilekern.testing.programs.batches import sample

PAGE = Path(__file__).parent.parent / "docs/backends.md"
X = numbers(5)


@like_first
def doubled(x, out, *, block: tk.Block = 2):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


@like_first
def ordered(x, out):
    out[...] = jnp.sort(x[...])


@pytest.fixture(scope="module")
def record() -> tk.backends.Backend:
    """The record of the page, which the page's code registers; here each test does."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    for code in codes(PAGE.read_text())[:2]:
        exec(compile(code, "backends.py", "exec"), namespace)
    tk.backends.unregister("toy")
    return namespace["TOY"]


@pytest.fixture
def toy(record: tk.backends.Backend) -> Iterator[tk.backends.Backend]:
    tk.backends.register(record)
    yield record
    tk.backends.unregister("toy")


def registered(record: tk.backends.Backend, patch: pytest.MonkeyPatch, **changes: Any) -> tk.backends.Backend:
    """The record with other fields, as long as a test runs."""
    changed = replace(record, **changes)
    patch.setitem(tk.backends.BACKENDS, "toy", changed)
    for target in changed.targets:
        patch.setitem(tk.backends.TARGETS, target.name, target)
    return changed


# --- it takes part in everything ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_jitted_call_runs_on_it_and_has_transformations() -> None:
    def loss(x: Any) -> Any:
        return (jax.vmap(lambda row: doubled(row, target="cpu:toy"))(x) ** 2).sum()

    x = jnp.stack([X, -X, 3 * X])
    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, (4 * x**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 8 * x, rtol=1e-6)
    assert "callback" in jax.jit(loss).lower(x).as_text()
    np.testing.assert_array_equal(doubled(X, target="cpu:toy"), 2 * X)


@pytest.mark.usefixtures("toy")
def test_stages_are_its_own() -> None:
    lowered = doubled.trace(X).lower("cpu:toy")
    assert lowered.target == "cpu:toy" and lowered.text == str(lowered.ir)
    assert lowered.plan == "doubled: one program after the other"
    np.testing.assert_array_equal(lowered.interpret(X), 2 * X)
    np.testing.assert_array_equal(lowered.compile()(X), 2 * X)


@pytest.mark.usefixtures("toy")
def test_checks_run_on_it() -> None:
    report = testing.check(doubled, lambda x: 2 * x, targets=["cpu:toy"], max_examples=5, progress=False)
    assert report.targets == ("interpreter", "cpu:toy")
    assert "cpu:toy" in testing.check(doubled, cases=[(X,)], max_examples=1, block=4, progress=False).targets


@pytest.mark.usefixtures("toy")
def test_a_check_finds_it_wrong(monkeypatch: pytest.MonkeyPatch, toy: tk.backends.Backend) -> None:
    def lower(func: Any, target: Any, launch: Any) -> Any:
        lowering: Any = toy.lower(func, target, launch)
        right = lowering.interpret
        lowering.interpret = lambda *arrays: [x + 1 for x in right(*arrays)]
        return lowering

    registered(toy, monkeypatch, lower=lower)
    with pytest.raises(testing.CheckError, match="doubled on cpu:toy"):
        testing.check(doubled, cases=[(X,)], targets=["cpu:toy"], max_examples=3, progress=False)


@pytest.mark.usefixtures("toy")
def test_commands_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--json"]) == OK
    rows = {row["target"]: row for row in json.loads(capsys.readouterr().out)}
    expected = {"target": "cpu:toy", "runs": True, "compiles": True, "interprets": True, "needs": ""}
    assert rows["cpu:toy"] == expected
    shown = ["show", "tilekern.kernels.softmax:softmax", "--shapes", "f32[4,8]", "--target", "cpu:toy"]
    assert main(shown) == OK
    assert "func @softmax" in capsys.readouterr().out


def test_commands_say_what_it_needs(
    toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(toy, monkeypatch, package="no_such_package", install="pip install toy")
    assert main(["targets"]) == OK
    assert re.search(r"^cpu:toy +no +no +no +pip install toy$", capsys.readouterr().out, re.MULTILINE)
    registered(toy, monkeypatch, is_here=lambda target: False, hardware="toy")
    assert main(["targets"]) == OK
    assert re.search(r"^cpu:toy +no +yes +yes +a toy of cpu:toy$", capsys.readouterr().out, re.MULTILINE)


def test_the_fuzzer_has_a_mode_of_it(toy: tk.backends.Backend) -> None:
    assert worker.names_of_modes(["cpu:toy"]) == ["cpu:toy"]
    (mode,) = [mode for mode in modes(Wild) if mode.name == "cpu:toy"]
    programs = [program for seed in range(12) if not sorts(program := sample(seed, **mode.options)[0])]
    for program, outputs in zip(programs, mode.run(programs), strict=True):
        assert_agrees(program, outputs)
    assert len(programs) > 5


def sorts(program: Any) -> bool:
    return any(op.name == "sort" for op in program.func.walk())


@pytest.mark.usefixtures("toy")
def test_the_table_of_ops_has_a_column_of_it() -> None:
    attempt = support.attempts()["toy"]
    attempt(support.sample("exp", DTYPES["f32"]))
    with pytest.raises(TilekernError, match="the toy backend does not sort"):
        attempt(support.sample("sort", DTYPES["f32"]))


def test_schedules_get_its_device(toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tk.backends.Device("cpu:toy", "cpu", cores=3)
    registered(toy, monkeypatch, device=lambda target: device)

    @like_first
    def scheduled(x, out, *, block: tk.Block = 2):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 2

    @scheduled.schedule("cpu:toy")
    def _toy(x: Any, device: tk.Device) -> dict[str, int]:
        return {"block": device.cores}

    assert tk.device("cpu:toy") is device
    assert scheduled.trace(X).lower("cpu:toy").ir.axes[0].block == 3


# --- the target of a call -------------------------------------------------------------------------------------------


def test_calls_that_name_no_target_get_it_where_no_other_backend_serves(
    toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target,) = toy.targets
    registered(toy, monkeypatch, detect=lambda platform, exporting: None if exporting else target)
    assert on_platform("a plugin", None) is target
    assert on_platform("a plugin", None, exporting=True).backend == "xla"
    assert on_platform("tpu", None).backend == "mosaic" and on_platform("cpu", None).backend != "toy"


def test_its_fallback_is_that_of_its_target(toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    (target,) = toy.targets
    with pytest.raises(TargetError, match="the toy backend does not sort"):
        ordered(X, target="cpu:toy")
    for llvm in [name for name in tk.backends.BACKENDS if name == "llvm"]:
        monkeypatch.setitem(
            tk.backends.BACKENDS, llvm, replace(tk.backends.BACKENDS[llvm], detect=lambda platform, exporting: None)
        )

    @like_first  # fresh: families remember the target of a platform
    def fresh(x, out):
        out[...] = jnp.sort(x[...])

    lenient = replace(target, fallback="unnamed")
    registered(toy, monkeypatch, targets=(lenient,), detect=lambda platform, exporting: lenient)
    with pytest.warns(FallbackWarning, match="fresh runs on cpu by the portable backend"):
        np.testing.assert_array_equal(fresh(X), np.sort(X))
    assert resolve("cpu") == replace(lenient, fallback="always")


@pytest.mark.usefixtures("toy")
def test_errors_for_names_come_from_the_record() -> None:
    with refused(TargetError, "there is no such target", expected="'cpu:toy'", got="'cpu:toys'", fix="'cpu:xla'"):
        doubled(X, target="cpu:toys")  # <-


@pytest.mark.usefixtures("toy")
def test_its_targets_have_the_emitters_of_the_record() -> None:
    with refused(
        TargetError,
        "cpu:toy has no emitter 'gluon'",
        expected="no emitter",
        got="emitter = 'gluon'",
        fix="leave the emitter out; 'gluon' is for cuda:sm_90",
    ):
        doubled(X, target="cpu:toy+gluon")  # <-


@pytest.mark.usefixtures("toy")
def test_a_call_for_it_is_lowered_for_its_platform() -> None:
    traced = jax.jit(lambda x: doubled(x, target="cpu:toy")).trace(X)
    with pytest.raises(TargetError, match="lowered for another platform") as caught:
        traced.lower(lowering_platforms=("cuda",))
    assert (caught.value.expected, caught.value.got) == ("a program for cpu", "platform = 'cuda'")


@pytest.mark.usefixtures("toy")
def test_what_is_bound_to_its_process_is_not_exported() -> None:
    summary, reason = "a call with target='cpu:toy' cannot be exported", "a callback to this process"
    with refused(TargetError, summary, expected="another process", got=reason, fix="leave target out"):
        jax.export.export(jax.jit(lambda x: doubled(x, target="cpu:toy")))(X)  # <-


def test_exports_ask_consent_to_its_custom_call(toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(toy, monkeypatch, custom_call="toy_call")
    assert jax.export.DisabledSafetyCheck.custom_call("toy_call") in tk.export.checks()


def test_it_refuses_another_machine(toy: tk.backends.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_runs_here(target: Any, name: str) -> None:
        raise TargetError(f"{name} is for another toy", got=target.name)

    registered(toy, monkeypatch, check_runs_here=check_runs_here)
    with pytest.raises(TargetError, match="doubled is for another toy"):
        jax.jit(lambda x: doubled(x, target="cpu:toy")).trace(X).lower()


# --- the list of backends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "got"), [("toy", "name = 'toy'"), ("xla", "name = 'xla'"), ("new", "['cpu:toy']")])
def test_a_name_that_is_taken_is_refused(toy: tk.backends.Backend, name: str, got: str) -> None:
    summary, fix = f"the backend '{name}' has a name that is taken", "unregister(name)"
    with refused(ArgumentError, summary, expected="that no registered backend has", got=got, fix=fix):
        tk.backends.register(replace(toy, name=name))  # <-


@pytest.mark.parametrize(
    "targets",
    [
        (),
        (tk.backends.Target("cpu:one", "cpu", "another"),),
        (tk.backends.Target("one", "cpu", "mine"),),
        (tk.backends.Target("cpu:one", "cuda", "mine"),),
        (tk.backends.Target("cpu:one+two", "cpu", "mine"),),
    ],
)
def test_targets_that_do_not_fit_are_refused(record: tk.backends.Backend, targets: Any) -> None:
    summary = "the targets of the backend 'mine' do not fit"
    with refused(ArgumentError, summary, expected="'platform:model'", fix="name"):
        tk.backends.register(replace(record, name="mine", targets=targets))  # <-
    assert "mine" not in tk.backends.BACKENDS


def test_a_representative_that_is_no_target_is_refused(record: tk.backends.Backend) -> None:
    with refused(ArgumentError, "do not fit", expected="representative", got="'cpu:other'", fix="name"):
        tk.backends.register(replace(record, representative="cpu:other"))  # <-


def test_a_platform_that_jax_does_not_have_is_refused(record: tk.backends.Backend) -> None:
    targets = (tk.backends.Target("abacus:one", "abacus", "toy"),)
    with refused(ArgumentError, "a platform that JAX does not have", expected="of JAX", got="'abacus'", fix="plugin"):
        tk.backends.register(replace(record, targets=targets))  # <-
    assert "abacus:one" not in tk.backends.TARGETS


def test_a_platform_of_jax_that_tilekern_has_no_backend_for(record: tk.backends.Backend) -> None:
    """Calls that JAX lowers for it have the backend's target."""
    target = tk.backends.Target("oneapi:toy", "oneapi", "toy")
    lowered: list[Any] = []

    def lower(func: Any, target: Any, launch: Any) -> Any:
        lowered.append(target)
        return tk.backends.BACKENDS["xla"].lower(func, target, launch)

    def detect(platform: str, exporting: bool) -> Any:
        return target if platform == "oneapi" else None

    tk.backends.register(replace(record, targets=(target,), detect=detect, lower=lower))
    try:
        for platform in ("oneapi", "tpu"):
            jax.jit(lambda x: doubled(x)).trace(X).lower(lowering_platforms=(platform,))
        assert lowered == [target]
    finally:
        tk.backends.unregister("toy")


@pytest.mark.parametrize("name", ["none", "xla", "mosaic"])
def test_only_what_was_registered_is_removed(name: str) -> None:
    with refused(ArgumentError, f"no backend '{name}' was registered", expected="added before", fix="`register`"):
        tk.backends.unregister(name)  # <-


def test_records_are_light() -> None:
    """`import tilekern` loads no lowering and no compiler."""
    import subprocess
    import sys

    code = "import sys, tilekern; print([n for n in sys.modules if n.startswith('tilekern.lower.')])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "tilekern.lower.mosaic.backend" in modules and "lowering'" in modules
    assert not re.findall(r"tilekern\.lower\.\w+\.(?!backend|targets)\w+", modules.replace(".rewrite.capabilities", ""))


def test_rooms_are_imported_when_they_are_called() -> None:
    """`import tilekern` loads nothing that differentiates, interprets, or reads and writes files of kernels."""
    import subprocess
    import sys

    rooms = ("tilekern.autodiff", "tilekern.ir.interpret", "tilekern.ir.parse", "tilekern.kernel.file_format")
    code = f"import sys, tilekern; sys.exit(' '.join(n for n in sys.modules if n.startswith({rooms})))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not answer.stderr.strip(), answer.stderr
