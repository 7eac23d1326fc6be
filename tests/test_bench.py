import jax.numpy as jnp

from bench.result import Result, table
from bench.timing import dispatch_medians, medians


def test_contestants_take_turns_with_an_untimed_call_before_each_timed_one() -> None:
    calls: list[str] = []

    def contestant(name: str):
        return lambda: (calls.append(name), jnp.zeros(()))[1]

    seconds = medians({"a": contestant("a"), "b": contestant("b")}, rounds=2, pause=0.0)
    assert "".join(calls) == "aabb" * 2
    assert seconds.keys() == {"a", "b"} and min(seconds.values()) > 0
    calls.clear()
    dispatch_medians({"a": contestant("a"), "b": contestant("b")}, rounds=2, calls=3)
    assert "".join(calls) == "aaaabbbb" * 2


def test_a_limit_is_for_a_ratio_a_difference_or_a_value() -> None:
    ratio = Result("faster", "ms", 4.0, 0.5, "ratio", 8.0)
    difference = Result("slower", "µs", 15.0, 4.0, "difference", 10.0)
    value = Result("smaller", "MB", 2.0, 8.0, "value", 4000.0)
    assert [r.judged for r in (ratio, difference, value)] == [0.5, 5.0, 2.0]
    assert [r.passed for r in (ratio, difference, value)] == [True, False, True]
    lines = table([ratio, difference, value]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["pass", "FAIL", "pass"]
    assert len({len(line) for line in lines}) == 1
