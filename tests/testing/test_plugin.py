"""The plugin of pytest, in a run of its own."""

from pathlib import Path

import pytest

from tilekern import testing

pytest_plugins = ["pytester"]

_TEST = """
import jax, pytest, tilekern as tk

@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def double(x, out):
    i = tk.parallel(x.shape[0], 8)
    out[i] = x[i] * 2

@pytest.mark.tilekern(max_examples=4, targets=["cpu:xla"])
def test_right(tilekern_check):
    report = tilekern_check(double, lambda x: 2 * x)
    assert (report.examples, report.targets) == ({examples}, ("interpreter", "cpu:xla"))

def test_wrong(tilekern_check):
    tilekern_check(double, lambda x: 3 * x, targets=["cpu:xla"], max_examples=4)
"""


@pytest.mark.parametrize(("options", "examples"), [([], 4), (["--tilekern-examples=2", "--tilekern-seed=1"], 2)])
def test_the_fixture_checks_with_options_of_the_marker_and_the_command_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str], examples: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(testing.__file__).parents[2]))
    pytester.makeconftest('pytest_plugins = ["tilekern.testing.plugin"]')
    pytester.makepyfile(_TEST.replace("{examples}", str(examples)))
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*double on interpreter: result 0*"])
