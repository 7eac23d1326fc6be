"""The environment variable `TILEKERN_DEBUG`."""

import pytest

from tilekern.debug_options import debug_options
from tilekern.errors import SettingError

CASES = {"": set(), "ir": {"ir"}, "verify,poison": {"verify", "poison"}, " ir, ,verify ": {"ir", "verify"}}


@pytest.mark.parametrize(("text", "options"), CASES.items())
def test_options_are_separated_by_commas(text: str, options: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_DEBUG", text)
    assert debug_options() == options


def test_without_the_variable_there_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEKERN_DEBUG")
    assert debug_options() == frozenset()


def test_an_option_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_DEBUG", "ir,verfy")
    with pytest.raises(SettingError) as error:
        debug_options()
    assert str(error.value).startswith(
        "TILEKERN_DEBUG names an option that does not exist\n  expected: some of ir, verify, poison"
    )
    assert "got: TILEKERN_DEBUG=ir,verfy" in str(error.value)
