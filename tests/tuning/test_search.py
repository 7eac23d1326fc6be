"""The search, with processes that are played: whatever candidates do, a wrong or slower one is never chosen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.errors import EstimateError, TargetError
from tilekern.tuning.candidates import EmitterSpaces, Settings, Space
from tilekern.tuning.children import Children
from tilekern.tuning.search import Outcome, Search

type Times = Mapping[int, float | str]


class Played:
    """Processes in which block number n takes `times[n]` seconds, or is refused, or crashes when it is timed."""

    count = 2

    def __init__(self, times: Times) -> None:
        self._times = times

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if message["do"] == "time":
            times = [self._time(file) for file in message["files"]]
            if any(isinstance(t, str) for t in times):
                return {"refused": "crashes: SIGSEGV"}
            return {"samples": [[t] * message["rounds"] for t in times]}
        own = self._time(message["file"])
        if isinstance(own, str) and own != "crashes when timed":
            return {"refused": own}
        return {"estimate": own if isinstance(own, float) else 1.0, "seconds": own if isinstance(own, float) else 1e-6}

    def ask_all(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
        return [self.ask(message, seconds) for message in messages]

    def _time(self, file: str) -> float | str:
        return self._times[int(Path(file).read_text())]


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., Outcome]:
    def run(times: Times, own: int = 4, runs: bool = True, listed: Sequence[int] | None = None) -> Outcome:
        space = Space({"block": sorted(times)}, {"block": own})
        settings: Sequence[Settings] = [{"block": n} for n in listed or ()]
        played = cast(Children, Played(times))
        return Search(
            lambda s: str(s["block"]), settings or space, {"block": own}, played, tmp_path,
            runs=runs, end=time.monotonic() + 5, progress=lambda _: None,
        ).run()  # fmt: skip

    return run


def test_the_fastest_is_found_step_by_step(search: Callable[..., Outcome]) -> None:
    outcome = search({2**n: 1 / (1 + n) for n in range(12)})
    assert outcome.best == {"block": 2048}
    assert (outcome.own_seconds, outcome.seconds) == (1 / 3, 1 / 12)
    assert outcome.confidence is not None
    assert outcome.confidence > 0.99


def test_candidates_that_fail_are_never_chosen(search: Callable[..., Outcome]) -> None:
    faults = {1: "crashes: SIGSEGV", 2: "hangs: no answer in 20 s", 8: "wrong numbers", 16: "crashes when timed"}
    outcome = search({4: 1.0, 32: 9.0, **faults})
    assert outcome.best == {"block": 4}
    assert outcome.confidence is None
    assert {"crashes: SIGSEGV", "hangs: no answer in 20 s", "wrong numbers"} <= outcome.refused.keys()


def test_where_the_schedule_is_refused_the_best_of_the_others_is_chosen(search: Callable[..., Outcome]) -> None:
    outcome = search({4: "refused", 8: 2.0, 2: 1.0})
    assert outcome.best == {"block": 2}
    assert outcome.own_seconds is None


def test_estimates_decide_where_nothing_runs(search: Callable[..., Outcome]) -> None:
    assert search({4: 1.0, 8: 0.5, 2: 2.0}, runs=False).best == {"block": 8}
    assert search({4: 1.0, 8: 0.99}, runs=False).best == {"block": 4}  # a gain below what models can tell


def test_without_an_estimate_of_the_schedule_none_is_chosen(search: Callable[..., Outcome]) -> None:
    times: Times = {4: "EstimateError: the model does not follow it", 8: 1.0}
    with pytest.raises(EstimateError, match=r"own settings have no estimate[\s\S]*the model does not follow it"):
        search(times, runs=False)
    assert search(times).best == {"block": 8}  # where it runs, a clock decides


def test_only_the_candidates_of_the_user_are_tried(search: Callable[..., Outcome]) -> None:
    assert search({4: 1.0, 8: 0.5, 2: 0.1}, listed=[8]).best == {"block": 8}


def test_it_is_an_error_if_nothing_works(search: Callable[..., Outcome]) -> None:
    with pytest.raises(TargetError, match=r"no settings of the kernel work[\s\S]*got: refused \(1\); refused, too"):
        search({4: "refused", 8: "refused, too"})
    with pytest.raises(TargetError, match=r"got: hangs: no answer in 30 s \(1\)[\s\S]*, or a longer budget"):
        search({4: "hangs: no answer in 30 s"})


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10) | st.just("crashes: SIGKILL"), min_size=1))
def test_the_choice_is_never_slower_than_the_schedule(times: Times) -> None:
    own = min(times)
    if isinstance(times[own], str):
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        outcome = Search(
            lambda s: str(s["block"]), Space({"block": sorted(times)}, {"block": own}), {"block": own},
            cast(Children, Played(times)), Path(folder), runs=True, end=time.monotonic() + 5, progress=lambda _: None,
        ).run()  # fmt: skip
    assert times[cast(int, outcome.best["block"])] == outcome.seconds <= cast(float, times[own])


class Noisy(Played):
    """Processes of a machine with other work: each sample takes up to a quarter less or more."""

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        answer = super().ask(message, seconds)
        if "samples" in answer:
            self.noise = getattr(self, "noise", np.random.default_rng(0))
            answer["samples"] = [[t * self.noise.uniform(0.75, 1.25) for t in row] for row in answer["samples"]]
        return answer


def test_a_gain_below_the_noise_of_a_round_is_found(tmp_path: Path) -> None:
    """Many rounds show a gain of 7 % that is less than the noise of each, and no gain where there is none."""
    for times, best in (({4: 1e-3, 8: 0.93e-3, 2: 1.1e-3}, 8), ({4: 1e-3, 8: 1.07e-3, 2: 1.1e-3}, 4)):
        outcome = Search(
            lambda s: str(s["block"]), Space({"block": [2, 4, 8]}, {"block": 4}), {"block": 4},
            cast(Children, Noisy(times)), tmp_path, runs=True, end=time.monotonic() + 5, progress=lambda _: None,
        ).run()  # fmt: skip
        assert outcome.best == {"block": best}


def test_settings_that_a_model_ranks_come_in_turns_with_near_ones() -> None:
    space = Space({"block": [1, 2, 4, 8, 16, 32]}, {"block": 4}, ranked=[{"block": 32}, {"block": 8}])
    assert [s["block"] for s in space.near({"block": 4})] == [32, 8, 8, 2, 16, 1, 32]


# --- emitters ---------------------------------------------------------------------------------------------------------

SPACES = EmitterSpaces(
    {"usual": Space({"block": [2, 4, 8]}, {"block": 4}), "special": Space({"block": [64]}, {"block": 64})}
)


def test_the_settings_of_emitters_come_in_turns() -> None:
    settings = [tuple(s.values()) for s in SPACES.near({"emitter": "usual", "block": 4})]
    assert settings == [("usual", 8), ("special", 64), ("usual", 2)]
    settings = [tuple(s.values()) for s in SPACES.near({"emitter": "special", "block": 64})]
    assert settings == [("usual", 4), ("usual", 8), ("usual", 2)]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({4: 1.0, 2: 2.0, 8: 0.9, 64: 0.5}, ("special", 64)),
        ({4: 1.0, 2: 0.5, 8: 2.0, 64: 0.9}, ("usual", 2)),
        ({4: 1.0, 2: 2.0, 8: 2.0, 64: "refused"}, ("usual", 4)),
        ({4: 1.0, 2: 2.0, 8: 2.0, 64: "crashes: SIGSEGV"}, ("usual", 4)),
        ({4: 1.0, 2: 2.0, 8: 2.0, 64: "crashes when timed"}, ("usual", 4)),
        ({4: 1.0, 2: 2.0, 8: 2.0, 64: "wrong numbers"}, ("usual", 4)),
        ({4: "refused", 2: "refused", 8: "refused", 64: 1.0}, ("special", 64)),
    ],
)
@pytest.mark.parametrize("runs", [True, False])
def test_an_emitter_is_chosen_only_if_its_program_works_and_is_faster(
    times: Times, best: tuple[str, int], runs: bool, tmp_path: Path
) -> None:
    if not runs and "crashes when timed" in times.values():
        return  # nothing is timed
    own: Settings = {"emitter": "usual", "block": 4}
    outcome = Search(
        lambda s: str(s["block"]), SPACES, own, cast(Children, Played(times)), tmp_path,
        runs=runs, end=time.monotonic() + 5, progress=lambda _: None,
    ).run()  # fmt: skip
    assert tuple(outcome.best.values()) == best


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_all_settings_of_all_emitters_come_once(sizes: list[int]) -> None:
    spaces = {str(n): Space({"block": [1 << k for k in range(size)]}, {"block": 1}) for n, size in enumerate(sizes)}
    near = [tuple(s.values()) for s in EmitterSpaces(spaces).near({"emitter": "0", "block": 1})]
    everything = itertools.chain(*([(str(n), 1 << k) for k in range(size)] for n, size in enumerate(sizes)))
    assert sorted([*near, ("0", 1)]) == sorted(everything)
