"""The bench of explanations: which kernels it explains, and what it says when one takes long."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llvmlite", reason="needs llvmlite")

from bench import explanations


def test_the_cases_of_a_function_are_explained(capsys: Any) -> None:
    explanations.main(["softmax square", "softmax vit_b16_classes", "--targets", "cpu:llvm"])
    said = capsys.readouterr().out
    assert "softmax vit_b16_classes, cpu:llvm: " in said and " tried, " in said and "2 explanations" in said


def test_an_explanation_that_takes_long_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "seconds", lambda title, kernel, target: 2.1)
    assert explanations.main(["softmax square", "--targets", "cpu:llvm"]) == 1
    assert explanations.main(["softmax square", "--targets", "cuda:sm_90"]) == 0


def test_values_of_ends_rise_to_the_last_row() -> None:
    ((_, kernel),) = explanations.kernels(["ragged_dot square"], explanations.resolve("cpu:llvm"))
    values = explanations.values_of(kernel.func())
    rows, (groups,) = kernel.types[0].shape[0], values["ends"].shape
    assert list(values["ends"]) == [rows * (n + 1) // groups for n in range(groups)]
