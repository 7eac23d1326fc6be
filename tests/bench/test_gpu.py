"""What of the benchmark for GPUs can be tested without one: nearly all but the numbers."""

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
from bench.gpu import clock, dry, numerics, peers, plan, prepare, programs, report, speed, supervise, tune, work
from bench.gpu.clock import Contestant
from bench.gpu.item import Options
from bench.gpu.journal import Journal
from bench.gpu.numerics import KERNELS, Check
from tilekern.ir.interpret import interpret
from tilekern.lower.target import TARGETS

ROOT = Path(__file__).parents[2]
TARGET = "cuda:sm_90"


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, seed=5, seconds=1000.0)


def check(kernel: str, number: int = 0, dtype: str = "float32", **changes: Any) -> Check:
    return replace(Check(kernel, KERNELS[kernel].cases[number].small(), dtype), **changes)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_items_have_names_of_their_own(options: Options) -> None:
    for tuned in ("", "attention", "matmul"):
        names = [item.name for item in plan.items(replace(options, tune=tuned))]
        assert len(names) == len(set(names)) > 100


def test_numerics_come_first_and_what_has_aims_before_the_rest(options: Options) -> None:
    names = [item.name for item in plan.items(options)]
    kinds = [name.split()[0] for name in names]
    assert kinds.index("ceiling") == kinds.count("numerics")
    assert (
        names.index("attention d128 s4096 full") < names.index("programs 0") < names.index("attention d64 s4096 full")
    )
    assert {
        f"attention d{d} s{s} {c}" for d in (64, 128, 256) for s in (1024, 4096, 16384) for c in ("full", "causal")
    } < {*names}


def test_every_library_kernel_is_checked_in_every_dtype() -> None:
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/kernel.py")}
    assert {(c.kernel, c.dtype) for c in numerics.checks()} == {
        (folder, dtype) for folder in folders for dtype in ("bfloat16", "float16", "float32")
    }


def test_only_chooses_items_by_name(options: Options) -> None:
    names = [item.name for item in plan.items(replace(options, only="d128 s4096 (full|causal)$"))]
    assert names == ["attention d128 s4096 causal", "attention d128 s4096 full"]


def test_a_budget_affords_what_ends_in_time() -> None:
    item = check("softmax", seconds=5.0)
    assert plan.Budget(5.5).affords(item) and not plan.Budget(4.5).affords(item)


# --- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("specials", [False, True])
def test_right_kernels_pass(kernel: str, specials: bool) -> None:
    item = check(kernel, dtype="bfloat16", specials=specials and kernel not in ("cross_entropy", "ragged_dot"))
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


def test_outputs_take_the_place_of_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donated arrays are gone afterwards, and they were NaN."""
    put: list[jax.Array] = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: put.append(real(x)) or put[-1])
    results = numerics.poisoned(lambda x: x + 1, [jnp.zeros((3, 5))])
    assert len(results) == numerics.RUNS and all((out == 1).all() for (out,) in results)
    donated = [x for x in put if x.shape == (3, 5)]
    assert len(donated) == numerics.RUNS and all(x.is_deleted() for x in donated)


# --- random programs -------------------------------------------------------------------------------------------------


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


# --- the clock -------------------------------------------------------------------------------------------------------


def planes(*named: tuple[str, str, list[tuple[str, float, float]]]) -> list[Any]:
    """Planes of a profile, each with one line."""

    def events(found: list[tuple[str, float, float]]) -> list[Any]:
        return [SimpleNamespace(name=n, start_ns=a, duration_ns=b - a) for n, a, b in found]

    return [
        SimpleNamespace(name=plane, lines=[SimpleNamespace(name=line, events=events(found))])
        for plane, line, found in named
    ]


def test_the_device_is_busy_during_the_union_of_its_work() -> None:
    assert clock.busy([]) == 0
    assert clock.busy([(10, 12), (0, 4), (2, 6), (3, 5), (11, 15)]) == 6 + 5


def test_samples_are_the_device_work_within_their_windows() -> None:
    profile = planes(
        ("/host:CPU", "python", [(f"{clock.MARK}0 0", 0.0, 5e6), (f"{clock.MARK}1 0", 7e6, 9e6), ("other", 0.0, 9e6)]),
        ("/device:GPU:0", "Stream #13(Compute)", [("gemm", -1e5, 1e6), ("gemm", 4e6, 5.2e6), ("copy", 7.5e6, 8e6)]),
        ("/device:GPU:0", "XLA Modules", [("jit_f", 0.0, 9e6)]),
    )
    windows, device = clock.windows_of(profile), clock.device_events_of(profile)
    assert windows == {(0, 0): (0.0, 5e6), (1, 0): (7e6, 9e6)}
    assert [e[2] for e in device] == ["gemm", "gemm", "copy"]
    assert [e[2] for e in clock._within(windows[0, 0], device)] == ["gemm", "gemm"]
    assert [e[2] for e in clock._within(windows[1, 0], device)] == ["copy"]
    assert clock._within(None, device) == []


def contestant(name: str, log: list[str]) -> Contestant:
    return Contestant(name, lambda n: log.append(name) or jnp.zeros(()))


def test_contestants_take_turns_and_a_failure_stops_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(n: int) -> Any:
        raise ValueError("no such size")

    log: list[str] = []
    monkeypatch.setattr(clock, "_calls", lambda _: 2)
    bad = Contestant("bad", refuses)
    runners = [contestant("a", log), bad, contestant("b", log)]
    clock.measure(runners, rounds=3)
    assert "".join(log).startswith("ab" + "aabb" * 3)
    assert bad.record() == {"error": "ValueError: no such size"}
    for runner in (runners[0], runners[2]):  # no GPU here: nothing on the device
        assert runner.record()["method"] == "host" and len(runner.samples) == 3


def test_with_device_events_the_profiler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels of 20 and 30 µs in each window, which overlap by 10, are 40 µs of two calls."""

    def device(profile: Any) -> list[tuple[float, float, str]]:
        starts = [start for start, _ in clock.windows_of(profile).values()]
        return [e for s in starts for e in ((s, s + 20e3, "first"), (s + 10e3, s + 40e3, "second"))]

    monkeypatch.setattr(clock, "_calls", lambda _: 2)
    monkeypatch.setattr(clock, "device_events_of", device)
    runner = contestant("a", [])
    clock.measure([runner], rounds=3)
    record = runner.record()
    assert record["method"] == "profiler" and record["kernels"] == ["first", "second"]
    np.testing.assert_allclose(record["samples_us"], [20.0] * 3)
    assert record["median_us"] == pytest.approx(20.0)


def test_cuda_events_time_those_who_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return 6.0  # milliseconds

    monkeypatch.setattr(clock, "_calls", lambda _: 3)
    runner = Contestant("torch", lambda n: None, wait=lambda _: None, events=Event)
    clock.measure([runner], rounds=4)
    assert (runner.method, runner.samples) == ("events", [pytest.approx(2e-3)] * 4)


# --- comparisons -----------------------------------------------------------------------------------------------------


def comparison(theirs: Any, ours: Any = jax.nn.softmax) -> speed.Comparison:
    return speed.against_xla("softmax", ours, theirs, (8, 16))


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SET_BYTES", 1)
    monkeypatch.setattr(speed, "measure", partial(clock.measure, rounds=2))


@pytest.mark.usefixtures("small_sets")
def test_a_comparison_compares_results_too() -> None:
    record = comparison(jax.nn.softmax).run(5, None)
    assert record["ok"] and record["differences"] == {"xla": 0.0}
    assert record["bytes"] == 2 * 8 * 16 * 2
    assert {"median_us", "quartiles_us", "samples_us"} <= record["contestants"]["tilekern"].keys()
    assert not comparison(jax.nn.log_softmax).run(5, None)["ok"]
    assert not comparison(jax.nn.softmax, ours=lambda x: x * jnp.nan).run(5, None)["ok"]


@pytest.mark.usefixtures("small_sets")
def test_peers_that_a_machine_lacks_are_noted_and_our_failure_is_a_failure() -> None:
    def fails(x: jax.Array) -> Any:
        raise RuntimeError("not here")

    record = comparison(fails).run(5, None)
    assert record["contestants"]["xla"] == {"error": "RuntimeError: not here"}
    assert "median_us" in record["contestants"]["tilekern"] and record.get("ok", True)
    record = comparison(jax.nn.softmax, ours=fails).run(5, None)
    assert not record["ok"] and record["text"] == "RuntimeError: not here"


def test_peers_have_names_before_they_are_made() -> None:
    query = jax.ShapeDtypeStruct((1, 1024, 1, 128), jnp.bfloat16)
    names = [peer.name for peer in peers.attention([[query] * 3], causal=True)]
    assert names == ["jax cudnn", "torch cudnn", "torch flash", "mosaic 64/128/2", "mosaic 64/64/4"]


def test_attention_has_the_same_size_at_every_length_and_width() -> None:
    for length, width in ((1024, 64), (16384, 256)):
        shapes = jax.eval_shape(partial(speed.attention_arrays, length=length, width=width), jax.random.key(0))
        assert [x.size for x in shapes] == [speed.TOKENS * speed.HIDDEN] * 3
        assert shapes[0].shape[1::2] == (length, width)
    assert speed.attention_flops(4096, causal=False) == 2 * 2 * (4 * 16 * 4096 * 4096 * 128)


# --- the child -------------------------------------------------------------------------------------------------------


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
    options = replace(options, only="^numerics softmax .*_small")
    first, *others = [item.name for item in plan.items(options)]
    journal = Journal(options.out / "journal.jsonl")
    journal.begin(first)
    journal.end(first, {"ok": False, "text": "crashed"})
    assert work.work(options) == 0
    records = journal.read()
    assert list(records) == [first, *others]
    assert records[first] == {"ok": False, "text": "crashed"}
    assert all(records[name]["ok"] and records[name]["programs"] for name in others)  # pyright: ignore


@pytest.mark.usefixtures("pretend_gpu")
def test_a_child_without_time_does_nothing_and_one_whose_gpu_is_broken_stops(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, only="^numerics softmax .*_small")
    assert work.work(replace(options, seconds=0.5)) == 0
    assert Journal(options.out / "journal.jsonl").read() == {}
    monkeypatch.setattr(work, "_healthy", lambda: False)
    assert work.work(options) == work.BROKEN
    assert len(Journal(options.out / "journal.jsonl").read()) == 1


def test_without_a_gpu_nothing_runs(options: Options) -> None:
    assert work.work(options) == work.NO_GPU


# --- the parent ------------------------------------------------------------------------------------------------------

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


def test_when_time_is_up_the_item_at_work_is_late_and_not_wrong(options: Options, scripted: Any) -> None:
    path = str(options.out / "journal.jsonl")
    scripted(f'open({path!r}, \'a\').write(\'{{"item": "slow", "begun": 0}}\\n\'); import time; time.sleep(60)')
    start = time.monotonic()
    kept = supervise.supervise(replace(options, seconds=supervise.RESERVE + supervise.LEAST + 0.5))
    assert time.monotonic() - start < supervise.LEAST + 10
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


# --- tables ----------------------------------------------------------------------------------------------------------


def compared(ours: float, aim: float | None, aim_of: str, flops: float = 4e12, **others: float) -> dict[str, Any]:
    times = {"tilekern": ours, **{name.replace("_", " "): us for name, us in others.items()}}
    contestants = {name: {"median_us": us, "method": "profiler"} for name, us in times.items()}
    return {"flops": flops, "bytes": 8e9, "aim": aim, "aim_of": aim_of, "contestants": contestants, "differences": {}}


KEPT = {
    "environment": {"gpu": "NVIDIA H200", "seed": 5, "commit": "abc"},
    "items": {
        "numerics softmax": {"ok": True},
        "numerics rope": {"ok": False, "text": "out is too far\nmore"},
        "programs 0": {"ok": True, "agree": 9, "refused": 1, "text": ""},
        "ceiling copy": {
            **compared(0, None, "", xla=2500, torch=2000),
            "contestants": {"torch": {"median_us": 2000.0}},
        },
        "attention": compared(10e3, 0.65, "cudnn", jax_cudnn=8e3, torch_cudnn=7e3, torch_flash=1e3, mosaic_1=9e3),
        "softmax": compared(2200, 0.8, "copy", flops=0.0, xla=2e3),
        "matmul": compared(10e3, 0.85, "", xla=8e3, torch=9e3),
        "dispatch": {"dispatch_us": {"plain": 4.0, "jitted": 5.0}},
        "killed": None,
    },
}


def test_the_tables() -> None:
    text = report.report(KEPT)
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "10000.0 µs" in rows["attention"] and "400 TFLOP/s" in rows["attention"]
    assert "0.80 jax cudnn (8000), 0.70 torch cudnn (7000)" in rows["attention"]
    assert "0.90 mosaic (9000)" in rows["attention"]
    assert "0.70 of cudnn, aim 0.65: met" in rows["attention"]
    assert "3636 GB/s" in rows["softmax"] and "0.91 of copy, aim 0.80: met" in rows["softmax"]
    assert "0.80 of best, aim 0.85: NOT MET" in rows["matmul"]
    assert "copy: 4000 GB/s" in text and "dispatch: plain 4.0 µs, jitted 5.0 µs" in text
    assert "FAIL numerics rope: out is too far\n" in text
    assert text.splitlines()[-1] == (
        "numerics: 1 of 2 right; random programs: 9 agree, 1 refused, 1 batches; 1 items failed"
    )


def test_the_ranking_of_variants() -> None:
    made = {
        name: {**compared(us, None, "", xla=1e3), "tuned": "matmul 4096", "programs": [{"registers": r, "spills": 0}]}
        for name, us, r in (("tune matmul 4096 a", 2e3, 90), ("tune matmul 4096 b", 1250, 128))
    }
    made["tune matmul 4096 c"] = {"tuned": "matmul 4096", "ok": False, "text": "no", "programs": []}
    lines = report.ranking(made).splitlines()
    assert [line.split()[0] for line in lines] == ["matmul", "b", "a", "c"]
    assert lines[1].split() == ["b", "1250.0", "0.80", "128", "0"]


def test_variants_are_calls_of_the_kernel_itself() -> None:
    variant = next(tune.variants("attention"))
    assert variant.name.startswith("tune attention d64 s1024 full q64 k32 warps4 stages2")
    avals = jax.eval_shape(variant.arrays, jax.random.key(0))
    assert jax.eval_shape(variant.ours, *avals).shape == avals[0].shape  # pyright: ignore


# --- the command -----------------------------------------------------------------------------------------------------


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
    assert lines[-2].split() == ["good", "90", "0", "65536", "256", "0.25", "1.2"]
    assert lines[-1] == "1 programs for cuda:sm_90, 1 errors"
