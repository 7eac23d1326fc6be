"""`check` and `compare`: right kernels pass, each planted fault is found and told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

import tilekern as tk
from tests.testing import kernels
from tilekern import testing
from tilekern.command_line import arguments
from tilekern.errors import ArgumentError, DependencyError, TargetError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.xla.lowering import XlaLowering
from tilekern.testing import check, compare

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(testing.__file__).parents[2])}
QUICK = ("cpu:xla", "here")


def test_right_kernels_pass_on_every_backend() -> None:
    report = check(kernels.product, kernels.product_reference, max_examples=6)
    assert report.examples == 6
    assert {"interpreter", "cpu:xla", "here"} <= set(report.targets)
    assert {*report.targets, *report.skipped} >= {"cpu:llvm", "cuda:sm_90", "tpu:v5e"}


@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (kernels.scaled_rows, kernels.scaled_rows_reference),
        (kernels.scaled_rows, None),
        (kernels.largest, lambda x: jnp.argmax(x, axis=1).astype(jnp.int32)),
        (kernels.chosen, None),
        (kernels.whole_blocks, lambda x: x + 1),
    ],
    ids=["rows", "rows without a reference", "positions", "static arguments", "whole tiles"],
)
def test_right_kernels_pass(kernel: Any, reference: Any) -> None:
    options = {"way": "mul"} if kernel is kernels.chosen else {}
    report = check(kernel, reference, targets=QUICK, max_examples=8, **options)
    assert report.examples == 8
    assert report.targets == ("interpreter", *QUICK)
    assert all(row["worst_error"] <= 1 for row in report.as_dict()["rows"])


@pytest.mark.parametrize("call", [lambda: check(kernels.product), lambda: testing.given_arguments(kernels.product)])
def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: Any, call: Any) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)  # what Python takes for a failed import
    with pytest.raises(DependencyError, match="random test input needs Hypothesis") as raised:
        call()
    assert raised.value.fix == "pip install hypothesis"


def test_functions_around_kernels_are_checked() -> None:
    def twice(x: jax.Array, s: jax.Array) -> jax.Array:
        once = kernels.scaled_rows(x, s)
        return jax.lax.fori_loop(0, 2, lambda _, y: kernels.scaled_rows(y, s), once)

    report = check(twice, lambda x, s: x * s[:, None] ** 3, targets=["cpu:xla"], max_examples=6)
    assert report.targets == ("interpreter", "cpu:xla")


def test_keywords_without_a_default_are_no_arrays() -> None:
    def scaled(x: jax.Array, s: jax.Array, *, factor: float) -> jax.Array:
        return kernels.scaled_rows(x, s) * factor

    options: Any = {"targets": ["cpu:xla"], "gradients": False, "batches": False, "max_examples": 2}
    assert check(scaled, lambda x, s: x * s[:, None] * 2, factor=2.0, **options).examples == 2


def test_a_flag_without_a_default_is_tried_with_both_values() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def wrong_if_reversed(x: Any, out: Any, *, reverse: bool) -> None:
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] + 1 if reverse else x[i]

    with pytest.raises(testing.CheckError, match="reverse=True"):
        check(wrong_if_reversed, lambda x, *, reverse: x, targets=["cpu:xla"], gradients=False, batches=False)


def test_a_wrong_tail_is_found_by_the_reference_and_made_small() -> None:
    with pytest.raises(testing.CheckError, match="forgets_its_tail on interpreter: result 0") as caught:
        check(kernels.forgets_its_tail, kernels.forgets_its_tail_reference, targets=QUICK)
    assert caught.value.call.types[0].shape[0] <= 8
    assert not caught.value.call.gradient
    assert caught.value.call.in_axes is None


def test_a_hole_is_found_with_the_line() -> None:
    with pytest.raises(testing.CheckError, match=r"(?s)UnwrittenError.*kernels\.py:\d+ in leaves_holes"):
        check(kernels.leaves_holes, targets=QUICK)


def test_a_sum_in_a_narrow_float_is_found() -> None:
    with pytest.raises(testing.CheckError) as raised:
        testing.check(kernels.sums_narrowly, lambda x: x.sum(axis=1), targets=[], gradients=False, batches=False)
    assert raised.value.call.numbers == "positive"


INTEGERS = (jax.ShapeDtypeStruct((13,), jnp.int32),)


def test_integers_that_go_through_floats_are_found() -> None:
    with pytest.raises(testing.CheckError) as raised:
        testing.check(kernels.counts_in_floats, lambda x: x + 1, cases=[INTEGERS], targets=[])
    assert raised.value.call.numbers == "positive"


def test_integers_that_bound_loops_are_small() -> None:
    testing.check(kernels.countdown, lambda x: jnp.maximum(x, 0), cases=[INTEGERS], targets=[], max_examples=20)


def test_a_wrong_derivative_is_found_without_a_reference() -> None:
    with pytest.raises(testing.CheckError, match="differences say") as caught:
        check(kernels.squared, targets=QUICK)
    assert caught.value.call.gradient


@pytest.mark.parametrize(("lowering", "target"), [(XlaLowering, "cpu:xla"), (LlvmLowering, "cpu:llvm")])
def test_a_backend_that_is_wrong_is_found_and_named(monkeypatch: Any, lowering: Any, target: str) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    right = lowering.interpret

    def wrong(self: Any, *inputs: Any) -> Any:
        found = [np.array(x) for x in right(self, *inputs)]
        for x in found:
            x.reshape(-1)[-1:] += np.ones((), x.dtype)
        return found

    monkeypatch.setattr(lowering, "interpret", wrong)
    with pytest.raises(testing.CheckError, match=f"scaled_rows on {target}: result 0"):
        check(kernels.scaled_rows, targets=["cpu:xla", "cpu:llvm"])


def test_the_script_of_a_failure_makes_it_again() -> None:
    with pytest.raises(testing.CheckError) as caught:
        check(kernels.forgets_its_tail, kernels.forgets_its_tail_reference, targets=QUICK)
    assert "hypothesis" not in caught.value.script
    run = subprocess.run(
        [sys.executable, "-c", caught.value.script], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "Disagreement: interpreter: result 0" in run.stderr, run.stderr


def test_a_script_imports_names_alone(tmp_path: Path) -> None:
    """A module of a file that no name has is not imported, and its text is not run."""
    path = tmp_path / "a; open('ran', 'w').py"
    source = "from tests.testing import kernels\ndef wrong(x):\n    return kernels.forgets_its_tail(x)\n"
    path.write_text(source, encoding="utf-8")
    wrong = arguments.function(f"{path}:wrong")
    with pytest.raises(testing.CheckError) as caught:
        check(wrong, kernels.forgets_its_tail_reference, targets=QUICK)
    assert "# Define wrong here, or import it." in caught.value.script
    assert "open" not in caught.value.script


def test_a_reference_of_other_shapes_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="the reference gives other shapes than the kernel"):
        check(kernels.product, lambda x, w: kernels.product_reference(x, w).T[:1], targets=QUICK, max_examples=5)


def test_a_kernel_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="no arguments are found that never takes") as caught:
        check(kernels.never)
    assert "I take nothing" in caught.value.got
    assert "cases=" in caught.value.fix


def test_a_static_argument_without_a_value_is_an_error() -> None:
    def without(x: Any, *, power: int) -> Any:
        return x**power

    with pytest.raises(ArgumentError, match="no arguments are found"):
        check(without)


def test_cases_give_ranks_dtypes_and_sizes() -> None:
    q, k = (jax.ShapeDtypeStruct((1, n, heads, 8), jnp.float32) for n, heads in ((5, 4), (7, 2)))
    report = check(flash_attention, cases=[(q, k, k)], targets=["cpu:xla"], max_examples=2, gradients=False)
    assert report.examples == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": [jnp.ones(3)]}, "a case is no tuple"),
        ({"cases": [(jnp.ones((3, 2)), jnp.ones((4, 4)))]}, "does not take a case"),
        ({"cases": [(jnp.ones((3, 2)), 5)]}, "has an argument that is no array"),
    ],
)
def test_wrong_cases_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(kernels.scaled_rows, **options)


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="only functions can be checked"):
        check(kernels.scaled_rows(jnp.ones((2, 2)), jnp.ones(2)))


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(TargetError, match="there is no such target"):
        check(kernels.scaled_rows, targets=["cpu:gcc"])


def test_a_target_whose_package_is_missing_is_skipped_and_said(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    report = check(kernels.scaled_rows, targets=["cpu:xla", "cuda:sm_90"], max_examples=3)
    assert report.targets == ("interpreter", "cpu:xla")
    assert "skipped cuda:sm_90: needs triton: pip install triton" in str(report)


def test_what_a_target_refuses_is_counted_and_not_passed() -> None:
    with jax.enable_x64(True):
        report = compare(kernels.whole_blocks, np.ones(8), targets=["cpu:xla", "tpu:v5e"])
    assert report.targets == ("interpreter", "cpu:xla")
    assert "tpu:v5e refuses f64 (1): TargetError" in str(report)


def test_compare_takes_batches_and_gradients() -> None:
    x, s = np.ones((3, 5, 4), np.float32), np.arange(5, dtype=np.float32)
    report = compare(kernels.scaled_rows, x, s, in_axes=(0, None), gradient=True, targets=QUICK, block=4)
    assert report.targets == ("interpreter", *QUICK)
    with pytest.raises(AssertionError, match=re.escape("worst element: [0, 0]")):
        compare(kernels.scaled_rows, x[0], s, reference=lambda x, s: x + s[:, None], targets=QUICK)


def test_a_jump_between_neighbouring_floats_is_no_fault() -> None:
    def jumps(x: jax.Array) -> jax.Array:
        return jnp.floor(kernels.whole_blocks(x) * 3.0).astype(jnp.int32)

    thirds = (np.arange(8) / 3).astype(np.float32)
    report = compare(jumps, thirds, reference=lambda x: jnp.floor((x + 1) * 3.0).astype(int), targets=["cpu:xla"])
    assert {row["target"]: row["unsteady"] for row in report.as_dict()["rows"]}["interpreter"] > 0


@settings(max_examples=10, deadline=None)
@testing.given_arguments(kernels.scaled_rows)
def test_the_native_form_gives_calls(call: testing.Call) -> None:
    found = kernels.scaled_rows(*call.arguments, **call.keywords, target="cpu:xla")
    assert found.shape == call.types[0].shape
