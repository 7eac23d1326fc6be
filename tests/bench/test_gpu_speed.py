"""The benchmark for GPUs, as far as it runs without one: the clock, the comparisons, and the tables."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import clock, peers, report, speed, tune
from bench.gpu.clock import Contestant
from tilekern.errors import ResourceError

# --- the clock --------------------------------------------------------------------------------------------------------


def planes(*named: tuple[str, str, list[tuple[str, float, float]]]) -> list[Any]:
    """Planes of a profile, each with one line."""

    def events(found: list[tuple[str, float, float]]) -> list[Any]:
        stats = {"gemm": [("kernel_details", "regs:90")], "copy": [("memcpy_details", "size:1")]}
        return [SimpleNamespace(name=n, start_ns=a, duration_ns=b - a, stats=stats.get(n, [])) for n, a, b in found]

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
        ("/device:GPU:0", "CUPTI overhead", [("Buffer Flush", 0.0, 9e6)]),
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


# --- comparisons ------------------------------------------------------------------------------------------------------


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
    assert "median_us" in record["contestants"]["xla"]


@pytest.mark.usefixtures("small_sets")
def test_a_variant_that_does_not_fit_is_refused_and_no_failure() -> None:
    def too_large(x: jax.Array) -> Any:
        raise ResourceError("too much", expected="less", got="more", fix="make the blocks smaller")

    variant = replace(comparison(jax.nn.softmax, ours=too_large), tags={"tuned": "softmax"})
    record = variant.run(5, None)
    assert record["tuned"] == "softmax" and "too much" in record["refused"] and "ok" not in record


def test_peers_have_names_before_they_are_made() -> None:
    query = jax.ShapeDtypeStruct((1, 1024, 1, 128), jnp.bfloat16)
    names = [peer.name for peer in peers.attention([[query] * 3], causal=True)]
    assert names == ["jax cudnn", "torch cudnn", "torch flash", "mosaic 64/128/2", "mosaic 64/64/4"]


def test_gradients_are_compared_with_those_of_cudnn_and_where_they_fit_of_xla() -> None:
    for length, names in ((1024, ["jax cudnn", "jax xla"]), (16384, ["jax cudnn"])):
        item = speed.attention_gradient(length, 128, causal=False)
        types = jax.eval_shape(item.arrays, jax.random.key(0))
        assert [peer.name for peer in item.peers([types])] == names
        assert item.flops == 3.5 * speed.attention_flops(length, causal=False)
        found = jax.eval_shape(item.ours, *types) if item.ours else ()
        assert [x.shape for x in found] == [x.shape for x in types[:3]]


def test_all_results_of_a_call_are_compared() -> None:
    pair = jnp.zeros(speed.peers.STRIDE), jnp.ones(2 * speed.peers.STRIDE)
    assert peers.by_jax("both", lambda *arrays: arrays, [pair]).fetch(pair).tolist() == [0, 1, 1]


def test_attention_has_the_same_size_at_every_length_and_width() -> None:
    for length, width in ((1024, 64), (16384, 256)):
        shapes = jax.eval_shape(partial(speed.attention_arrays, length=length, width=width), jax.random.key(0))
        assert [x.size for x in shapes] == [speed.TOKENS * speed.HIDDEN] * 3
        assert shapes[0].shape[1::2] == (length, width)
    assert speed.attention_flops(4096, causal=False) == 2 * 2 * (4 * 16 * 4096 * 4096 * 128)


# --- tables -----------------------------------------------------------------------------------------------------------


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
        "ceiling copy": {"bytes": 8e9, "contestants": {"xla": {"median_us": 2500.0}, "torch": {"median_us": 2000.0}}},
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
    made["tune matmul 4096 c"] = {"tuned": "matmul 4096", "refused": "ResourceError: too much", "programs": []}
    lines = report.ranking(made).splitlines()
    assert [line.split()[0] for line in lines] == ["matmul", "b", "a", "c"]
    assert lines[3].split() == ["c", "refused"]
    assert lines[1].split() == ["b", "1250.0", "0.80", "128", "0"]


def test_variants_are_calls_of_the_kernel_itself() -> None:
    for kernel, name in (
        ("attention", "tune attention d64 s1024 full q64 k32 warps4 stages2"),
        ("matmul", "tune matmul 4096 m64 n128 k32 warps4 stages3"),
        ("backward", "tune attention d64 s1024 full gradient query q32 k32 warps4 stages1"),
    ):
        variant = next(tune.variants(kernel))
        assert variant.name == name
        avals = jax.eval_shape(variant.arrays, jax.random.key(0))
        assert variant.ours is not None
        assert jax.eval_shape(variant.ours, *avals).shape == avals[0].shape
