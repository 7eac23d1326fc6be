"""The page of the documentation on frameworks: its code runs where they are installed."""

import pytest

from tests.test_docs import test_the_code_of_a_page_runs_and_prints_what_it_shows as run_page

pytest.importorskip("flax", reason="needs flax")
pytest.importorskip("optax", reason="needs optax")


def test_the_code_of_the_page_runs() -> None:
    run_page("frameworks.md")
