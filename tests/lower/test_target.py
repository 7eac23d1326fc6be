"""The names of targets."""

from __future__ import annotations

import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import TargetError
from tilekern.lower.target import BACKENDS, DEFAULT, TARGETS, resolve

X = numbers(5)


@like_first
def copy(x, out):
    i = tk.parallel(5, 2)
    out[i] = x[i]


def test_a_name_says_platform_and_model() -> None:
    for name, target in TARGETS.items():
        assert target.name == name
        assert name.startswith(f"{target.platform}:")


def test_cpu_is_the_portable_backend() -> None:
    assert resolve("cpu") is resolve("cpu:xla") is DEFAULT
    np.testing.assert_array_equal(copy(X, target="cpu"), X)
    np.testing.assert_array_equal(copy(X, target="cpu:xla"), X)


@pytest.mark.parametrize("name", ["gpu", "cuda", "cpu:", "CPU", "", "tpu:v9"])
def test_a_target_that_does_not_exist(name: str) -> None:
    with refused(
        TargetError,
        "there is no such target",
        expected="'cpu' or one of 'cpu:xla', 'cpu:llvm', 'cuda:sm_80'",
        got=f"target = {name!r}",
        fix="'cpu:xla'",
    ):
        copy(X, target=name)  # <-


@pytest.mark.parametrize("name", [n for n, t in TARGETS.items() if t.backend not in BACKENDS])
def test_a_target_without_a_backend(name: str) -> None:
    with refused(
        TargetError,
        f"tilekern has no backend for {name} yet",
        expected="'cpu:xla'",
        got=f"target = {name!r}",
        fix="leave target out",
    ):
        copy(X, target=name)  # <-


@pytest.mark.parametrize("name", [3, ["cpu"], None.__class__])
def test_a_target_that_is_no_name(name: object) -> None:
    with refused(TargetError, "there is no such target", expected="'cpu'", got="target = ", fix="'cpu:xla'"):
        copy(X, target=name)  # <-
