"""The benchmark for GPUs, as far as it runs without one: the plan, the proof, and the processes."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import __main__ as command
from bench.gpu import (
    dry,
    kernels,
    numerics,
    plan,
    prepare,
    programs,
    report,
    speed,
    supervise,
    trained,
    warp_specialised,
    work,
)
from bench.gpu.gradients import FEATURES
from bench.gpu.item import Options, lowerings_of
from bench.gpu.journal import Journal
from bench.gpu.numerics import KERNELS, Check
from tests.bench.test_gpu_speed import KEPT
from tilekern.estimate.gpu import LINES
from tilekern.ir.interpret import interpret
from tilekern.ir.types import kind_of
from tilekern.lower.target import TARGETS

ROOT = Path(__file__).parents[2]
TARGET = "cuda:sm_90"


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, seed=5, seconds=1000.0)


def check(kernel: str, number: int = 0, dtype: str = "float32", **changes: Any) -> Check:
    return replace(Check(kernel, smallest(kernel, number), dtype), **changes)


def smallest(kernel: str, number: int = 0) -> Any:
    """A small case of a kernel, or a large one if it has no others."""
    cases = KERNELS[kernel].cases or KERNELS[kernel].large
    return cases[number].small() if hasattr(cases[number], "small") else cases[number]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_items_have_names_of_their_own(options: Options) -> None:
    for tuned in ("", "attention", "backward", "matmul"):
        names = [item.name for item in plan.items(replace(options, tune=tuned))]
        assert len(names) == len(set(names)) > 100


def test_numerics_come_first_and_what_has_aims_before_the_rest(options: Options) -> None:
    names = [item.name for item in plan.items(options)]
    kinds = [name.split()[0] for name in names]
    first = kinds.index("ceiling")
    assert {*kinds[:first]} == {"numerics"} and first == names.index("ceiling copy")
    assert {name.split()[1] for name in names[:first]} >= {*kernels.KERNELS}
    aimed, first, rest = map(names.index, ("attention d128 s4096 full", "programs 0", "attention d64 s4096 full"))
    assert aimed < first < rest
    sizes = [(d, s, c) for d in (64, 128, 256) for s in (1024, 4096, 16384) for c in ("full", "causal")]
    assert {f"attention d{d} s{s} {c}" for d, s, c in sizes} < {*names}


def test_every_library_kernel_is_checked_in_every_dtype() -> None:
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/kernel.py")}
    assert folders < {*KERNELS}
    for name, kernel in KERNELS.items():
        assert {c.dtype for c in numerics.checks() if c.kernel == name} == {"bfloat16", *kernel.dtypes}, name
    assert {KERNELS[folder].dtypes for folder in folders} == {("bfloat16", "float32", "float16")}


def test_the_gradient_of_every_library_kernel_is_checked() -> None:
    """A step of an optimizer has none, nor has attention to a cache."""
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/kernel.py")}
    folders -= {"adamw_step", "index_scores", "matmul", "mla_attention", "paged_attention", "sample"}
    assert {f"{folder}_gradient" for folder in folders} | {"fused_matmul_gradient"} < {*KERNELS}


def test_warp_specialised_programs_are_checked_behind_the_others(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    found = [item.kernel for item in plan.items(options) if isinstance(item, Check)]
    first = min(map(found.index, trained.KERNELS))
    assert {*found[:first]} == {*kernels.KERNELS, *warp_specialised.KERNELS}
    assert {*found[found.index("flash_attention gluon") : first]} == {*warp_specialised.KERNELS}
    item = next(c for c in numerics.checks() if c.kernel == "fused_matmul gluon")
    assert ["gluon" in lowering.text for lowering in item.lowerings(TARGETS[TARGET], 5)] == [True]
    monkeypatch.setattr(warp_specialised, "compute_capability", lambda: 80)
    assert not any("gluon" in item.name for item in plan.items(options))


def test_the_gradients_of_every_feature_are_checked() -> None:
    cases = [c.case for c in numerics.checks() if c.kernel == "flash_attention_gradient"]
    assert {case.feature for case in cases} == {*FEATURES}
    for feature in FEATURES:  # of all arrays that have one
        item = next(c for c in numerics.checks() if getattr(c.case, "feature", None) == feature)
        inputs = item.inputs(5)
        floats = [x for n, x in enumerate(inputs) if n != 3 and kind_of(x.dtype) == "float"]
        shapes = [x.shape for x in jax.eval_shape(item.call, *inputs)]
        assert shapes[2:] == [x.shape for x in floats]


def test_only_chooses_items_by_name(options: Options) -> None:
    names = [item.name for item in plan.items(replace(options, only="d128 s4096 (full|causal)$"))]
    assert names == ["attention d128 s4096 causal", "attention d128 s4096 full"]


def test_a_budget_affords_what_ends_in_time() -> None:
    item = check("softmax", seconds=5.0)
    assert plan.Budget(5.5).affords(item) and not plan.Budget(4.5).affords(item)


def test_the_kernels_of_a_gradient_are_known_in_advance() -> None:
    item = speed.attention_gradient(1024, 64, causal=True)
    assert item.ours is not None
    found = lowerings_of(item.ours, jax.eval_shape(item.arrays, jax.random.key(0)), TARGETS[TARGET])
    names = [lowering.func.name for lowering in found]
    assert names == ["flash_attention_forward", "flash_attention_backward_key", "flash_attention_backward_query"]


# --- numerics ---------------------------------------------------------------------------------------------------------


FAST = ("softmax", "rms_norm", "matmul")  # those that XLA compiles quickly for a CPU


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_right_gradients_pass(feature: str) -> None:
    cases = (case for case in KERNELS["flash_attention_gradient"].cases if case.feature == feature)
    item = Check("flash_attention_gradient", next(cases).small(), "bfloat16")
    record = item.run(5, item.prepare(5))
    assert record["ok"], record


HERE = [k for k in KERNELS if k not in warp_specialised.KERNELS]  # those that have programs for a CPU


@pytest.mark.parametrize("kernel", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in HERE])
def test_right_kernels_pass(kernel: str) -> None:
    for specials in (False, True)[: 1 + KERNELS[kernel].specials]:
        item = check(kernel, dtype="bfloat16", specials=specials)
        record = item.run(5, item.prepare(5))
        assert record["ok"], record
        assert all(error < 0.01 for error in record["errors"])


def test_inputs_are_fresh_for_every_seed_and_check() -> None:
    inputs = [check("softmax", n).inputs(seed)[0].tobytes() for n in range(2) for seed in range(2)]
    assert len(set(inputs)) == 4
    assert np.isnan(check("softmax", specials=True).inputs(0)[0]).any()


def unwritten(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x).at[0, 0].set(jnp.nan)


class Unsteady:
    """Its second result differs in the last bit."""

    def __init__(self) -> None:
        self.calls = 0

    def again(self, x: np.ndarray) -> np.ndarray:
        self.calls += 1
        return np.nextafter(x, np.float32(1)) if self.calls == 2 else x

    def __call__(self, x: jax.Array) -> jax.Array:
        exact = jax.nn.softmax(x)
        return jax.pure_callback(self.again, jax.ShapeDtypeStruct(exact.shape, exact.dtype), exact)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)).astype(x.dtype), "too far from the oracle"),
        (unwritten, "NaN and ±inf must be where the oracle has them"),
        (Unsteady(), "output 0 differs between runs on the same inputs"),
    ],
    ids=["imprecise", "unwritten", "unsteady"],
)
def test_wrong_kernels_fail(wrong: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "softmax", replace(KERNELS["softmax"], call=wrong))
    item = check("softmax")
    record = item.run(5, item.prepare(5))
    assert not record["ok"] and text in record["text"]


def test_each_wrong_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS["softmax"]
    three = replace(
        kernel,
        call=lambda x: (jax.nn.softmax(x) + 1, jax.nn.softmax(x), 2 * jax.nn.softmax(x)),
        reference=lambda x, dtype=None: (kernel.reference(x, dtype=dtype),) * 3,
    )
    monkeypatch.setitem(KERNELS, "softmax", three)
    item = check("softmax")
    record = item.run(5, item.prepare(5))
    assert not record["ok"] and len(record["errors"]) == 3
    assert [n for n in range(3) if f"output {n}: " in record["text"]] == [0, 2]


def test_one_wrong_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers are compared in each bit, with the computation in the dtype of the inputs."""

    def tokens(x: jax.Array) -> jax.Array:
        return x.argmax(axis=-1).astype(jnp.int32)

    def all_but_one(x: jax.Array) -> jax.Array:
        return tokens(x).at[0].add(1)

    for call, ok in ((tokens, True), (all_but_one, False)):
        monkeypatch.setitem(KERNELS, "softmax", replace(KERNELS["softmax"], call=call, reference=tokens, dtyped=False))
        item = check("softmax")
        record = item.run(5, item.prepare(5))
        assert record["ok"] == ok and ("Mismatched elements: 1 /" in record.get("text", "")) == (not ok)


def test_outputs_take_the_place_of_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donated arrays are gone afterwards, and they were NaN."""
    put: list[jax.Array] = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: put.append(real(x)) or put[-1])
    results = numerics.poisoned(lambda x: x + 1, [jnp.zeros((3, 5))])
    assert len(results) == numerics.RUNS and all((out == 1).all() for (out,) in results)
    donated = [x for x in put if x.shape == (3, 5)]
    assert len(donated) == numerics.RUNS and all(x.is_deleted() for x in donated)


# --- random programs --------------------------------------------------------------------------------------------------


def test_random_programs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "on_platform", lambda *_: TARGETS[TARGET])

    def lowered(program: Any, target: Any, wrong: int = -1) -> Any:
        run = lambda *arrays: [x + (n == wrong) for n, x in enumerate(interpret(program.func, *arrays, orders=1))]  # noqa: E731
        return SimpleNamespace(compile=lambda: run)

    monkeypatch.setattr(programs, "_lowered", lowered)
    item = programs.Programs(0)
    assert item.run(5, None) == {"ok": True, "agree": programs.BATCH, "refused": 0, "text": ""}
    monkeypatch.setattr(programs, "_lowered", partial(lowered, wrong=0))
    record = item.run(5, None)
    assert not record["ok"] and record["agree"] < programs.BATCH and "seed 5000: AssertionError" in record["text"]
    monkeypatch.setattr(programs, "_lowered", lambda *_: None)
    assert item.run(5, None)["refused"] == programs.BATCH


# --- the child --------------------------------------------------------------------------------------------------------


@contextmanager
def no_pool(options: Options, items: Any, target: str) -> Iterator[dict[str, Future[Any]]]:
    futures: dict[str, Future[Any]] = {item.name: Future() for item in items}
    for item in items:
        futures[item.name].set_result(prepare.Ready(item.prepare(options.seed), [{"spills": 0}], [], 0.0))
    yield futures


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_has_gpu", lambda: True)
    monkeypatch.setattr(work, "on_platform", lambda *_: TARGETS[TARGET])
    monkeypatch.setattr(prepare, "pool", no_pool)


@pytest.mark.usefixtures("pretend_gpu")
def test_the_child_goes_on_where_the_journal_ends(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(options, only="^numerics softmax (square|vit_b16_classes)_small")
    first, *others = [item.name for item in plan.items(options)]
    journal = Journal(options.out / "journal.jsonl")
    journal.begin(first)
    journal.end(first, {"ok": False, "text": "crashed"})
    assert work.work(options) == 0
    records = journal.read()
    assert list(records) == [first, *others]
    assert records[first] == {"ok": False, "text": "crashed"}
    assert all(r and r["ok"] and r["programs"] for name, r in records.items() if name != first)


@pytest.mark.usefixtures("pretend_gpu")
def test_a_child_without_time_does_nothing_and_one_whose_gpu_is_broken_stops(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, only="^numerics softmax (square|vit_b16_classes)_small")
    assert work.work(replace(options, seconds=0.5)) == 0
    assert Journal(options.out / "journal.jsonl").read() == {}
    monkeypatch.setattr(work, "_healthy", lambda: False)
    assert work.work(options) == work.BROKEN
    assert len(Journal(options.out / "journal.jsonl").read()) == 1


def test_without_a_gpu_nothing_runs(options: Options) -> None:
    assert work.work(options) == work.NO_GPU


# --- the parent -------------------------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
path = {path!r}
done = open(path).read() if os.path.exists(path) else ""
def say(**entry):
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\\n")
if "good" not in done:
    say(item="good", begun=0)
    say(item="good", record={{"ok": True}})
    say(item="crashing", begun=0)
    os.abort()
if "hanging" not in done:
    say(item="hanging", begun=0)
    time.sleep(60)
say(item="last", begun=0)
say(item="last", record={{"ok": True}})
"""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(script: str) -> None:
        monkeypatch.setattr(supervise, "_command", lambda *_: [sys.executable, "-S", "-c", script])
        monkeypatch.setattr(supervise, "POLL", 0.02)

    return use


def test_crashes_and_hangs_cost_one_item_each(options: Options, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(CHILD.format(path=str(options.out / "journal.jsonl")))
    monkeypatch.setattr(supervise, "STALL", 1.0)
    kept = supervise.supervise(options)
    assert {name: record["ok"] for name, record in kept["items"].items()} == {
        "good": True,
        "crashing": False,
        "hanging": False,
        "last": True,
    }
    assert "-6" in kept["items"]["crashing"]["text"] and "no sign of life" in kept["items"]["hanging"]["text"]
    assert json.loads((options.out / "gpu.json").read_text()) == kept
    assert report.status(kept) == 1


def test_when_time_is_up_the_item_at_work_is_late_and_not_wrong(
    options: Options, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "LEAST", 0.5)
    path = str(options.out / "journal.jsonl")
    scripted(f'open({path!r}, \'a\').write(\'{{"item": "slow", "begun": 0}}\\n\'); import time; time.sleep(60)')
    start = time.monotonic()
    kept = supervise.supervise(replace(options, seconds=supervise.RESERVE + 1.5))
    assert time.monotonic() - start < 30
    assert "time is up" in kept["items"]["slow"]["text"] and "ok" not in kept["items"]["slow"]
    assert report.status(kept) == 0


def test_a_child_that_does_nothing_is_not_begun_for_ever(options: Options, scripted: Any) -> None:
    scripted("import sys; sys.exit(1)")
    kept = supervise.supervise(options)
    assert kept["items"] == {} and report.status(kept) == 1


def test_a_torn_line_of_the_journal_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.read() == {}
    journal.begin("a")
    journal.end("a", {"ok": True})
    with journal.path.open("a") as file:
        file.write('{"item": "b", "rec')
    assert journal.read() == {"a": {"ok": True}}


# --- the command ------------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(KEPT))
    assert command.main(["--out", str(tmp_path), "--show"]) == 1
    assert capsys.readouterr().out.strip() == report.report(KEPT)


def test_seeds_are_fresh_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(command, "supervise", lambda options: seen.append(options) or KEPT)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for more in ([], [], ["--seed", "7", "--tune", "matmul", "--only", "4096"]):
        command.main(["--out", str(tmp_path), *more])
    assert seen[0].seed != seen[1].seed and f"seed {seen[0].seed};" in capsys.readouterr().err
    assert seen[2] == Options(tmp_path, 7, command.SECONDS, "4096", "matmul")
    assert command.SECONDS < 480


def test_the_parts_of_a_dry_run(options: Options) -> None:
    pytest.importorskip("triton", reason="needs triton")
    ready = prepare.ready(speed.Dispatch(), TARGET, 5, oracles=False)
    assert ready.prepared is None and not ready.errors
    assert [program["spills"] for program in ready.programs] == [0]
    assert prepare.ready(speed.Clocks(), TARGET, 5).programs == []


def test_a_dry_run_prints_what_programs_take_and_counts_errors(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = {"registers": 90, "spills": 0, "shared_bytes": 1 << 16, "threads": 256, "occupancy": 0.25}
    found = {"program": "f", "lines": dict.fromkeys(LINES, 50.0), "cycles": 200.0, "seconds": 1e-5, "share": 0.25}
    found |= {"bottleneck": "waits, tensor", "unknown": {"FLUX": 2}, "assumed": {"BRA at 0x20": "not taken"}}
    taken["estimate"] = found

    @contextmanager
    def ready(options: Options, items: Any, target: str, oracles: bool) -> Iterator[dict[str, Future[Any]]]:
        futures: dict[str, Future[Any]] = {name: Future() for name in ("good", "bad")}
        futures["good"].set_result(prepare.Ready(None, [taken], [], 1.25))
        futures["bad"].set_result(prepare.Ready(None, [], ["ResourceError: too much"], 1.0))
        yield futures

    monkeypatch.setattr(prepare, "pool", ready)
    assert dry.run(options, TARGET) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL bad: ResourceError: too much"
    assert lines[3].split() == ["good", "90", "0", "65536", "256", "0.25", "1.2"]
    assert lines[-4].split() == ["good", "f", *["25", "%"] * len(LINES), "200", "10.0", "0.25", "waits,", "tensor"]
    assert lines[-3:-1] == ["good: unknown operation FLUX, 2 times", "good: BRA at 0x20, not taken"]
    assert lines[-1] == "1 programs for cuda:sm_90, 1 errors"
