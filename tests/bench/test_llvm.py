"""The benchmark of `cpu:llvm`, as far as it does not depend on the machine's speed."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding
import numpy as np
import pytest

from bench import run, timing
from bench.llvm import attention, first_call, irregular, matmul, overhead, peak, pytorch, rows, two_layers
from bench.llvm.pytorch import Attention
from bench.result import Result, missed, table
from tilekern.errors import DependencyError
from tilekern.estimate.cpu.peak import Peak, loop
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.runtime.machine import describe
from tilekern.testing import assert_close, in_float64

AVX2 = {"avx2": True, "fma": True, "f16c": True}
AVX512 = AVX2 | dict.fromkeys(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), True)
MACHINES = {
    "avx2": ("x86_64-unknown-linux-gnu", "haswell", AVX2),
    "avx512": ("x86_64-unknown-linux-gnu", "sapphirerapids", AVX512 | {"avx512bf16": True}),
    "amx": (
        "x86_64-unknown-linux-gnu",
        "sapphirerapids",
        AVX512 | dict.fromkeys(("avx512bf16", "amx-tile", "amx-bf16"), True),
    ),
    "vnni": ("x86_64-unknown-linux-gnu", "znver4", AVX512 | {"avx512vnni": True}),
    "neon": ("aarch64-unknown-linux-gnu", "neoverse-v2", {"neon": True}),
}
SMALL = Attention(64, 2, 32, "float32", causal=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of each case, without pauses; peaks of a millisecond."""

    def take_turns(clocks: dict[str, timing.Clock], rounds: int = 2) -> dict[str, list[float]]:
        return timing.take_turns(clocks, 2, 0.0)

    for module in (attention, irregular, matmul, rows, peak):
        monkeypatch.setattr(module, "take_turns", take_turns)
    for module in (attention, matmul):
        monkeypatch.setattr(module, "peak", lambda dtype: peak.peak(dtype, 1, 1e-3))


# --- the judgement ----------------------------------------------------------------------------------------------------


def test_rounds_are_compared_one_by_one() -> None:
    assert timing.by_round([1.0, 20.0, 3.0], [2.0, 40.0, 30.0]) == 0.5
    slow_by_turns = iter((1.0, 1.0, 10.0, 10.0))
    fast_by_turns = iter((2.0, 2.0, 20.0, 20.0))
    times = timing.take_turns({"a": lambda: next(slow_by_turns), "b": lambda: next(fast_by_turns)}, 2, 0.0)
    assert times == {"a": [1.0, 10.0], "b": [2.0, 20.0]}


def test_a_share_has_to_be_reached_and_a_ratio_not_exceeded() -> None:
    share = Result("share", "GFLOP/s", 70.0, 0.75, "share", 100.0)
    by_round = Result("by round", "GFLOP/s", 70.0, 0.75, "share", 100.0, by_round=0.8)
    ratio = Result("ratio", "ms", 1.0, 0.6, "ratio", 2.0, by_round=0.61)
    shown = Result("shown", "GFLOP/s", 1.0, None, "value")
    results = [share, by_round, ratio, shown]
    assert [r.passed for r in results] == [False, True, False, True]
    assert missed(results).splitlines() == [
        "NOT MET: share: 0.7, limit ≥ 0.75×",
        "NOT MET: ratio: 0.61, limit 0.6×",
    ]
    assert [line.split()[-1] for line in table(results).splitlines()[1:]] == ["FAIL", "pass", "FAIL", "GFLOP/s"]


def test_benchmarks_are_chosen_by_name_or_by_what_stands_before_the_dot() -> None:
    assert run.chosen([]) == list(run.FILES)
    assert run.chosen(["rows", "llvm.rows"]) == ["llvm.rows", "rows"]
    assert run.chosen(["llvm"])[0] == "llvm.peak" and all(name.startswith("llvm.") for name in run.chosen(["llvm"]))
    with pytest.raises(SystemExit, match=r"there is no benchmark row; there are llvm\.peak, "):
        run.chosen(["rows", "row"])


# --- the peak ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "instruction"),
    [
        ("avx2", "float32", "vfmadd"),
        ("avx512", "float32", "vfmadd"),
        ("avx512", "bfloat16", "vdpbf16ps"),
        ("amx", "bfloat16", "tdpbf16ps"),
        ("vnni", "int8", "vpdpbusd"),
        ("neon", "float32", "fmla"),
    ],
)
def test_the_loop_computes_in_registers_only(name: str, dtype: Any, instruction: str) -> None:
    machine = describe(*MACHINES[name], tiles=True)
    target = toolchain.llvmlite().Target.from_triple(machine.triple)
    module = llvmlite.binding.parse_assembly(loop(machine, dtype))
    assembly = target.create_target_machine(cpu=machine.cpu, features=machine.features).emit_assembly(module)
    found = re.search(r"^\.LBB0_1:.*?\n(.*?)^\s+(jl|b\.lt)\b", assembly, re.DOTALL | re.MULTILINE)
    assert found
    instructions = [line.split() for line in found[1].splitlines()]
    registers = 4 if instruction.startswith("t") else machine.registers * 3 // 4
    assert sum(words[0].startswith(instruction) for words in instructions) == registers
    assert not re.search(r"[(\[]", found[1])  # no address


def test_a_longer_loop_computes_as_fast() -> None:
    machine = peak.host()
    assert machine is not None

    def loops() -> tuple[Peak, Peak]:
        return Peak(machine, "float32", 1, 1e-3), Peak(machine, "float32", 1, 1e-2)

    # The length of a loop is measured, and another process may take the core meanwhile.
    short, long = next(pair for pair in (loops() for _ in range(20)) if 2 < pair[1].flops / pair[0].flops < 50)
    assert short.seconds() > 0 and short.flops % (2 * machine.lanes) == long.flops % (2 * machine.lanes) == 0


def test_every_peak_is_a_result(quick: None) -> None:
    found = list(peak.measure())
    assert [r.name for r in found][:2] == ["peak float32, 1 thread", f"peak float32, {peak.THREADS} threads"]
    assert all(r.passed and r.limit is None and r.value > 0 for r in found)


def test_the_share_is_that_of_each_round() -> None:
    class Loop(Peak):
        def __init__(self) -> None:
            self.flops = 100.0

    # The machine runs at half speed in the second round, and our program with it.
    found = peak.share("s", 40.0, [1.0, 2.0, 1.0], Loop(), [2.0, 4.0, 2.0], 0.75)
    assert found.judged == pytest.approx(0.8) and found.passed
    assert (found.value, found.baseline) == (pytest.approx(40e-9), pytest.approx(50e-9))


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget the figures of the machine, before and after the test."""
    for known in (peak.host, peak.peak):
        known.cache_clear()
    yield
    for known in (peak.host, peak.peak):
        known.cache_clear()


def test_nothing_is_measured_where_the_backend_is_not(
    fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise DependencyError("the target cpu needs llvmlite", expected="llvmlite", got="nothing", fix="install it")

    monkeypatch.setattr(toolchain, "host", missing)
    measures: list[Callable[[], Iterator[Result]]] = [
        run.FILES[name].measure for name in run.FILES if name.startswith("llvm.")
    ]
    assert not [result for measure in measures for result in measure()]
    assert capsys.readouterr().err.count("nothing of cpu:llvm is measured: the target cpu needs llvmlite") == 1


# --- PyTorch ----------------------------------------------------------------------------------------------------------

# What the child uses of PyTorch.
FAKE = {
    "torch/__init__.py": """
        import contextlib
        __version__ = "1.2.3"
        bfloat16 = float32 = None
        class no_grad(contextlib.nullcontext): pass
        class Tensor:
            def __init__(self, *shape): self.shape = shape
            def to(self, dtype): return self
        randn = Tensor
        def set_num_threads(n): assert n > 0
        def manual_seed(n): pass
    """,
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": """
        def scaled_dot_product_attention(q, k, v, is_causal):
            assert q.shape == k.shape == v.shape == (1, 2, 64, 32) and is_causal
    """,
}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder whose `bin/python` is a Python that has a `torch`."""
    for name, text in FAKE.items():
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_pytorch_times_its_own_calls(environment: Path) -> None:
    with pytorch.start(environment) as peer:
        assert peer is not None and peer.name == "PyTorch 1.2.3"
        seconds = peer.clock(SMALL)
        assert 0 < seconds() < 1 and 0 < seconds() < 1
        process = peer._process
    assert process.returncode == 0


def test_without_pytorch_there_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytorch.start(tmp_path) as peer:
        assert peer is None
    assert "`make pytorch`" in capsys.readouterr().err


def test_a_pytorch_that_fails_is_an_error(environment: Path) -> None:
    (environment / "site" / "torch" / "__init__.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="status 3"), pytorch.start(environment):
        pass


def test_the_flops_of_attention() -> None:
    full, causal = (Attention(4096, 8, 64, "float32", c) for c in (False, True))
    assert full.flops == 2 * 2 * 4096 * 4096 * 64 * 8 == 2 * causal.flops


# --- the cases --------------------------------------------------------------------------------------------------------


def of(results: Sequence[Result]) -> list[tuple[str, float | None]]:
    return [(r.name.partition(": ")[2], r.limit) for r in results]


def test_attention_is_compared_to_all_that_there_is(quick: None, environment: Path) -> None:
    with pytorch.start(environment) as peer:
        found = list(attention.compare(SMALL, 0.5, peer))
    name = "attention S=64 D=32 float32 causal"
    assert of(found) == [
        (f"{name}, to jax.nn", 0.5),
        (f"{name}, to PyTorch 1.2.3", 0.5),
        (f"{name}, of the peak", None),
    ]
    full = list(attention.compare(Attention(64, 2, 32, "float32", causal=False), 0.5, None))
    assert [r.limit for r in full] == [0.5, 0.75]


def test_a_matmul_and_rows_are_compared_to_xla(quick: None) -> None:
    assert of(list(matmul.compare(32, "float32"))) == [
        ("matmul 32³ float32, to XLA", 1.1),
        ("matmul 32³ float32, of the peak", None),
    ]
    assert of(list(rows.compare(32))) == [("softmax 32² float32, to XLA", 1.0), ("rms_norm 32² float32, to XLA", 1.0)]


def test_irregular_kernels_are_compared_to_xla(quick: None) -> None:
    found = [
        irregular.greatest((2, 40), 3, "bfloat16"),
        irregular.counted(100, 7, True),
        irregular.summed((30, 5), 4),
        irregular.convolved((1, 6, 5), (3, 4), "float32"),
    ]
    assert of(found) == [
        ("top_k 3 of 2×40 bfloat16, to XLA", 1.0),
        ("histogram 1e+02 in 7 skewed, to XLA", 1.0),
        ("segment_sum 30×5 in 4, to XLA", 1.0),
        ("conv 3×3 1×6×5 3→4 float32, to XLA", 1.0),
    ]


def test_irregular_kernels_compute_what_xla_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(name: str, kernel: Callable[..., Any], peer: Callable[..., Any], *arrays: Any) -> Result:
        found = zip(*(jax.tree.leaves(f(*arrays)) for f in (kernel, partial(in_float64, peer), peer)), strict=True)
        for ours, oracle, theirs in found:
            if np.issubdtype(ours.dtype, np.integer):
                np.testing.assert_array_equal(ours, theirs)
            else:
                assert_close(ours, oracle, theirs, length=300)
        return Result(name, "ms", 1.0, None, "value")

    monkeypatch.setattr(irregular, "_time", compare)
    irregular.greatest((3, 200), 5, "float32")
    irregular.counted(5000, 70, True)
    irregular.summed((300, 5), 4)
    irregular.convolved((2, 6, 5), (3, 4), "float32")


def test_dispatch_is_a_difference(quick: None) -> None:
    found = overhead.dispatch(rounds=1, calls=2)
    assert (found.relation, found.limit) == ("difference", 10.0) and found.value > 0


@pytest.mark.parametrize("work", first_call.WORK)
def test_first_calls_are_made_in_new_processes(work: str) -> None:
    command = [sys.executable, "-m", "bench.llvm.first_call", "ours", work]
    printed = subprocess.run(command, cwd=overhead.ROOT, check=True, capture_output=True, text=True).stdout
    wall, processor = map(float, printed.split())
    assert 0 < wall < 120 and 0 < processor < 120
    assert overhead.FIRST_CALLS.keys() == set(first_call.WORK)


def test_first_calls_without_and_with_code_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants take turns, and the first process of each is not timed: it fills the cache."""
    caches: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        caches.append(env["TILEKERN_CACHE"])
        seconds = len(caches) + (0.5 if command[-2] == "theirs" else 0.0)
        return subprocess.CompletedProcess(command, 0, f"{seconds} 0.0")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(first_call, "WORK", ("attention",))
    nothing, code = overhead.first_calls(processes=1)
    assert (nothing.value, nothing.baseline, nothing.limit) == (5.0, 6.5, None) and nothing.name.endswith(
        "nothing on disk"
    )
    assert (code.value, code.baseline, code.limit) == (7.0, 8.5, 0.25) and code.name.endswith("code on disk")
    folder = caches[2]
    assert caches == ["off", "off", folder, folder] * 2 and os.path.isabs(folder)


def test_the_model_is_that_of_plain_jax() -> None:
    generator = np.random.default_rng(0)

    def array(x: jax.ShapeDtypeStruct) -> Any:
        if x.dtype == np.int32:
            return generator.integers(0, two_layers.LENGTH, x.shape, np.int32)
        return generator.normal(size=x.shape, scale=x.shape[0] ** -0.5).astype(x.dtype)

    leaves, tree = jax.tree.flatten(jax.tree.map(array, two_layers.example()))
    ours, plain = (
        lambda *leaves, use=use: two_layers.loss(use, *jax.tree.unflatten(tree, leaves))
        for use in two_layers.FUNCTIONS.values()
    )
    assert_close(ours(*leaves), in_float64(plain, *leaves), plain(*leaves), length=two_layers.HIDDEN)
