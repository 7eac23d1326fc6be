"""Our kernels beside their peers, and the golden cycles, on made-up estimates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.tpu_static import __main__ as command
from bench.tpu_static import compare as comparison
from bench.tpu_static import golden as golden_cycles
from bench.tpu_static import picture
from bench.tpu_static.cases import CASES, SMALL, Case, program
from bench.tpu_static.cases.attention import Attention, Backward
from bench.tpu_static.cases.measured import Measured
from bench.tpu_static.compare import OURS, PeerCache, total
from bench.tpu_static.golden import Golden
from bench.tpu_static.table import aims, table
from tilekern.estimate.tpu.chips import CHIPS
from tilekern.estimate.tpu.estimate import CompileError, KernelEstimate

V5E = CHIPS["v5e"]
NAMED: dict[str, Case] = {case.name: case for case in CASES}

# --- the comparison ---------------------------------------------------------------------------------------------------


def test_the_cases_are_those_of_the_aims() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert {
        f"attention s{s} d{d} {c}" for s in (1024, 4096, 16384) for d in (64, 128, 256) for c in ("causal", "full")
    } < names
    for case in CASES:
        compile(case.ours("v5e"), case.name, "exec")
        assert case.peers() or (isinstance(case, Measured) and case.alone)
        for name, source in case.peers().items():
            compile(source, name, "exec")


def test_the_bound_is_the_larger_of_two() -> None:
    assert NAMED["matmul 4096"].bound(V5E) == pytest.approx(4096**3 / (4 * 128 * 128) / 1.5e3)  # cycles of the MXUs
    assert NAMED["softmax 4096"].bound(V5E) == pytest.approx(2 * 4096**2 * 4 / 0.82e6)
    full, causal = Attention(4096, 128), Attention(4096, 128, causal=True)
    assert causal.bound(V5E) == pytest.approx(full.bound(V5E) / 2, rel=1e-3)
    backward = Backward(4096, 128)
    assert backward.bound(V5E) == pytest.approx(causal.bound(V5E) * 5 / 2)  # dots
    assert Backward(16, 128).bound(V5E) == pytest.approx(16 * 8 * (8 * 256 + 4) / 0.82e6)


@pytest.mark.parametrize("name", ["ragged_dot small", "ssd small", "group_norm small"])
def test_contestants_take_and_give_the_same_arrays(name: str) -> None:
    (case,) = (case for case in SMALL if case.name == name)
    results: set[Any] = set()
    for contestant in ("tilekern", *case.peers()):
        made = program(name, contestant, "v5e")
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made.args]
        results.add(str(jax.eval_shape(made.fn, *shapes)) if "/" not in contestant else next(iter(results)))
    assert len(results) == 1


def test_gradients_are_results_and_cotangents_arguments() -> None:
    alone, trained = NAMED["rg_lru recurrentgemma_2b"], NAMED["rg_lru recurrentgemma_2b + gradient"]
    made = program(trained.name, "xla", "")
    out, gradients = jax.eval_shape(made.fn, *made.args)
    assert [x.shape for x in made.args] == [*(x.shape for x in gradients), out.shape]
    of_channels = 2560 * 4
    assert trained.nbytes == 2 * alone.nbytes and alone.nbytes == 4 * 2048 * 2560 * 2 + of_channels


def test_operands_of_8_bits_may_be_faster() -> None:
    case = NAMED["ragged_dot qwen3_30b_up int8 × int8"]
    assert case.bound(V5E) == pytest.approx(case.nbytes / 0.82e6)
    assert V5E.rate(case.operands) == 2 * V5E.peak and CHIPS["7x"].rate(case.operands) == CHIPS["7x"].peak


def test_projected_programs_take_the_same_arrays() -> None:
    case = Attention(1024, 64, causal=True, projected=True)
    for source in (case.ours("v5e"), *case.peers().values()):
        names: dict[str, Any] = {}
        exec(source, names)
        assert [(x.shape, x.dtype) for x in names["args"]] == [((1024, 512), jnp.bfloat16)] * 3
        out = jax.eval_shape(names["fn"], *names["args"])
        assert (out.shape, out.dtype) == ((1024, 512), jnp.bfloat16)
    assert all(name.startswith("splash") for name in case.peers())


def test_backward_has_splash_in_two_kernels_and_in_one() -> None:
    settings = Backward(1024, 128).peers()
    assert {name.split()[0] for name in settings} == {"splash", "splash-fused"}
    assert not any("2048" in name for name in settings)
    assert all(("use_fused_bwd_kernel=True" in source) == ("fused" in name) for name, source in settings.items())


def kernel(cycles: int, **changes: Any) -> KernelEstimate:
    return replace(KernelEstimate("k", "v5e", cycles, 0, 64, 32, 2, vmem=100, use={"mxu": 0.5}, pallas=True), **changes)


def test_the_kernels_of_a_program_add_up() -> None:
    record = total([kernel(900), kernel(80, stall=20, use=None, vmem=7)])
    assert (record["cycles"], record["bundles"], record["stall"], record["read"]) == (1000, 980, 20, 128)
    assert record["use"] == {"mxu": pytest.approx(0.45)}
    assert record["vmem"] == 100 and record["us"] == pytest.approx(1000 / 1.5e3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`estimate` answers by the program: ours 940 cycles, of the peers' settings the last is the best."""
    seen: list[str] = []

    def estimate(source: str, chip_name: str) -> list[KernelEstimate]:
        seen.append(source)
        if "2048" in source:
            raise CompileError("no space\nin VMEM")
        return [kernel(940 if "tilekern" in source else 2000 if "512" in source else 1000, chip=chip_name)]

    monkeypatch.setattr(comparison, "estimate", estimate)
    monkeypatch.setattr(comparison, "versions", lambda: {"jax": "1", "libtpu": "2"})
    return seen


def test_peers_are_kept_and_ours_is_measured_anew(measured: list[str], tmp_path: Path) -> None:
    case, path = Attention(4096, 128, causal=True), tmp_path / "peers.json"
    for times in (1, 2):
        rows = comparison.compare([case], ["v5e"], PeerCache(path), lambda _: None)
        (row,) = rows.values()
        assert row[OURS]["cycles"] == 940
        assert {who: (r["setting"], r["cycles"]) for who, r in row["peers"].items()} == {
            "splash": ("splash 1024/1024/1024", 1000),
            "flash": ("flash 1024/1024/1024", 1000),
        }
        assert len(measured) == len(case.peers()) + times
    kept = json.loads(path.read_text())
    assert kept["records"][f"{case.name} v5e splash 2048/1024/1024"] == {"error": "CompileError: no space"}
    path.write_text(json.dumps(kept | {"versions": {"jax": "1", "libtpu": "3"}}))
    assert not PeerCache(path).records


def test_the_table_shows_all_and_judges(measured: list[str], tmp_path: Path) -> None:
    cases = [*(Attention(4096, 128, causal=True, projected=p) for p in (False, True)), NAMED["matmul 4096"]]
    rows = comparison.compare(cases, ["v5e", "v6e"], PeerCache(tmp_path / "peers.json"), lambda _: None)
    text = table(rows)
    assert "aim: attention s4096 d128 causal v5e: 0.940 × best splash, at most 0.95: met" in text
    assert "aim: attention s4096 d128 causal v5e: 0.940 × best splash, kernels alone, at most 0.95: met" in text
    assert "aim: attention s4096 d128 causal projected v5e: 0.940 × best splash, at most 0.95: met" in text
    assert "aim: matmul 4096 v5e: 0.001 × the MXU's time, at most 1.08: met" in text
    assert "aim: matmul 4096 v6e: 0.004 × the bound, at most 1.3: met (mxu 50 %)" in text
    assert [aim.met for aim in aims(rows)] == [True] * 9
    rows["attention s4096 d128 causal v6e"][OURS] = {"error": "TargetError: no backend"}
    assert [aim.met for aim in aims(rows)] == [True, True, True, False, False, True, True, True, True]
    assert "attention s4096 d128 causal v6e tilekern: TargetError: no backend" in table(rows)


def test_the_command_writes_what_it_shows(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CACHE", tmp_path / "peers.json")
    arguments = ["--out", str(tmp_path), "--only", "s4096 d128 causal", "--chips", "v5e"]
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    assert command.main([*arguments, "--show"]) == 0
    assert capsys.readouterr().out == first and "best splash" in first
    assert command.main(["--out", str(tmp_path), "--only", "nothing"]) == 2


def test_the_picture_has_a_panel_for_each_chip(measured: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    rows = comparison.compare([CASES[0]], ["v5e", "7x"], PeerCache(tmp_path / "peers.json"), lambda _: None)
    picture.draw(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- golden cycles ----------------------------------------------------------------------------------------------------


def test_cycles_may_grow_by_five_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_cycles, "versions", lambda: {"libtpu": "1"})
    path = tmp_path / "golden.json"
    golden = Golden(path)
    assert not golden.unfit() and "has no number yet" in golden.check("a v5e", 1)
    golden.update("a v5e", 1000)
    golden = Golden(path)
    assert not golden.unfit()
    assert not golden.check("a v5e", 1050)
    assert golden.check("a v5e", 1051) == "a v5e takes 1051 cycles, 1.051 × the 1000 of golden.json"


def test_an_update_for_another_libtpu_forgets_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden(tmp_path / "golden.json")
    monkeypatch.setattr(golden_cycles, "versions", lambda: {"libtpu": "1"})
    golden.update("a v5e", 1000)
    golden.update("b v5e", 2000)
    monkeypatch.setattr(golden_cycles, "versions", lambda: {"libtpu": "2"})
    assert golden.unfit() == "the cycles are those of libtpu 1, installed is 2"
    golden.update("b v5e", 3000)
    assert Golden(golden.path).cycles == {"b v5e": 3000}
