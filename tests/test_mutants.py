"""The kit of mutants stays applicable: each fault finds its place, and names tests that exist."""

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parent.parent


def test_the_kit_is_large_and_its_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted(text) != text
    assert [t for t in mutant.tests if (ROOT / t).exists()] == list(mutant.tests)
