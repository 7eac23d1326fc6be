"""The pages of the documentation on frameworks: their code runs where the frameworks are installed."""

import pytest

from tests.test_docs import test_the_code_of_a_page_runs_and_prints_what_it_shows as run_page


@pytest.mark.parametrize(("page", "frameworks"), [("frameworks.md", ("flax", "optax")), ("torch.md", ("torch",))])
def test_the_code_of_the_page_runs(page: str, frameworks: tuple[str, ...]) -> None:
    for framework in frameworks:
        pytest.importorskip(framework, reason=f"needs {framework}")
    run_page(page)
