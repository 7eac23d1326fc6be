"""All of JAX's CUDA plugin on a pretended GPU, up to the kernels, which do not run: the calls of `plugin_child`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.gpu.pretended.build import MissingError
from bench.gpu.pretended.install import check_requirements
from tests.lower.triton.recording.driver import Call

ROOT = Path(__file__).parents[4]


@cache
def recorded(capability: int) -> dict[str, list[Call]]:
    """The calls to the driver by step, on a GPU of a compute capability."""
    try:
        check_requirements()
    except MissingError as missing:
        pytest.skip(f"needs {missing}")
    if find_spec("flatbuffers") is None:
        pytest.skip("needs flatbuffers to serialize")
    with TemporaryDirectory(prefix="tilekern-plugin-") as folder:
        record = Path(folder) / "record"
        variables = {"PRETENDED_CAPABILITY": str(capability), "PRETENDED_RECORD": str(record), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.lower.triton.recording.plugin_child", folder]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env={**os.environ, **variables}, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        steps: dict[str, list[Call]] = {}
        calls: list[Call] = []
        for call in map(json.loads, record.read_text().splitlines()):
            if call["call"] == "step":
                calls = steps.setdefault(call["name"], [])
            calls.append(call)
    return steps


def launches(calls: list[Call], name: str = "") -> list[Call]:
    return [call for call in calls if call["call"] == "launch" and call["function"].startswith(name)]


@pytest.mark.smoke
@pytest.mark.slow
def test_the_driver_refuses_nothing() -> None:
    steps = recorded(90)
    assert not [call for calls in steps.values() for call in calls if call.get("status")]
    ran = {name for name, calls in steps.items() if launches(calls)}
    assert ran == {name for name in steps if "sm_80" not in name and "sm_100" not in name}


@pytest.mark.parametrize(
    ("step", "kernels"),
    [
        ("eager", ["softmax_forward"]),
        ("jit", ["matmul"]),
        ("again", ["matmul"]),
        ("attention", ["flash_attention_forward"]),
        ("vmap", ["softmax_forward"]),
        ("scan", ["softmax_forward"] * 3),
        ("unaligned", ["softmax_forward"]),
    ],
)
def test_kernels_are_launched_once_each(step: str, kernels: list[str]) -> None:
    ours = [call["function"] for call in launches(recorded(90)[step]) if "fusion" not in call["function"]]
    assert ours == kernels


def test_the_kernels_of_a_gradient() -> None:
    calls = recorded(90)["gradient"]
    names = [call["function"] for call in launches(calls, "flash_attention")]
    assert names[0] == "flash_attention_forward"
    assert sorted(names[1:]) == ["flash_attention_backward_key", "flash_attention_backward_query"]


def test_code_is_loaded_once() -> None:
    first, again = (
        [call["call"] for call in recorded(90)[step] if call["call"] in ("module", "opt-in")]
        for step in ("jit", "again")
    )
    assert first == ["module", "opt-in"] and not again


def test_a_donated_array_is_written_in_place_and_another_is_copied_before() -> None:
    steps = recorded(90)
    for step in ("donated", "kept"):
        (launch,) = launches(steps[step], "doubled")
        assert launch["values"][0] == launch["values"][1]
        copies = [call for call in steps[step] if call["call"] == "copy" and call["to"] == launch["values"][0]]
        sources = {call["from"] for call in copies}
        # XLA copies the kept array to the buffer; from the host both came by a copy.
        assert bool(sources & {call["to"] for call in steps[step] if call["call"] == "copy"}) == (step == "kept")


def test_outputs_that_start_at_zero_are_filled_before_the_launch() -> None:
    calls = recorded(90)["zeros"]
    (launch,) = launches(calls, "binned")
    fills = [call for call in calls[: calls.index(launch)] if call["call"] == "fill"]
    _, counts, sums, *_ = launch["values"]
    # The sum has a buffer for each of the four programs.
    assert [(fill["address"], fill["bytes"], fill["value"]) for fill in fills] == [(counts, 64, 0), (sums, 256, 0)]


def test_launches_become_nodes_of_a_graph() -> None:
    """The second call and later ones are one launch of a CUDA graph, into which XLA has captured the kernels."""
    calls = recorded(90)["chain"]
    kinds = [call["call"] for call in calls]
    captured = [call["function"] for call in launches(calls) if call["capturing"]]
    assert captured[:6] == ["rms_norm_forward", "softmax_forward"] * 3
    assert kinds.count("graph launch") == 3
    (graph,) = (call for call in calls if call["call"] == "graph")
    assert graph["nodes"] == 7  # six kernels, and the constant that XLA fills


def test_an_exported_program_is_compiled_for_the_gpu_that_runs_it() -> None:
    """It holds PTX of sm_80, which jaxlib compiles for this GPU."""
    calls = recorded(90)["exported"]
    assert [call["architecture"] for call in calls if call["call"] == "module"] == [90]
    assert len(launches(calls, "matmul")) == 1


@pytest.mark.parametrize("how", ["call", "stages"])
def test_code_for_another_gpu_is_our_error_before_the_launch(how: str) -> None:
    for target, runs in (("cuda:sm_80", False), ("cuda:sm_90", True), ("cuda:sm_100", False)):
        calls = recorded(90)[f"{how} for {target}"]
        assert bool(launches(calls, "matmul")) == runs
        errors = [call["text"] for call in calls if call["call"] == "error"]
        assert len(errors) == (not runs)
        assert all(f"expected: a GPU that runs the code of {target}\n  got: a GPU of cuda:sm_90" in e for e in errors)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 87, 100, 103, 120, 121])
def test_other_gpus(capability: int) -> None:
    """Those without a target of their own get PTX, which jaxlib compiles."""
    steps = recorded(capability)
    assert not [call for calls in steps.values() for call in calls if call.get("status")]
    assert {name for name, calls in steps.items() if not launches(calls)} <= {n for n in steps if " for cuda" in n}
