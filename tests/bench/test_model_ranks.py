"""Spearman's coefficient, and the candidates of a case."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bench import model_ranks
from bench.model_ranks import spearman

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time


def test_order_alone_decides() -> None:
    assert spearman([1, 2, 3], [10, 1000, 1001]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_without_ties_it_is_the_formula_of_squared_differences(order: tuple[int, ...]) -> None:
    squares = sum((n - place) ** 2 for n, place in enumerate(order))
    assert spearman(range(4), order) == pytest.approx(1 - 6 * squares / (4 * (16 - 1)))


def test_equal_numbers_have_the_mean_of_their_ranks() -> None:
    first, second = [1.0, 1.0, 2.0, 3.0], [5.0, 6.0, 6.0, 7.0]
    ranks = [0.5, 0.5, 2.0, 3.0], [0.0, 1.5, 1.5, 3.0]
    assert spearman(first, second) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_without_an_order_there_is_no_coefficient() -> None:
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_candidates_begin_with_the_schedule_and_the_model_and_repeat_none() -> None:
    case = model_ranks.case_titled("softmax vit_b16_attention", "tpu:v6e")
    assert case is not None
    drawn = list(model_ranks.drawn(case))
    assert drawn[:2] == [case.of_schedule, case.of_model] or case.of_schedule == case.of_model == drawn[0]
    assert len(drawn) == len(set(drawn)) > 4
