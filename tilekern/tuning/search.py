"""The search: trials of settings around the fastest so far, in parallel processes, then races among the survivors."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilekern.errors import EstimateError, TargetError, TilekernError
from tilekern.testing.benchmark import SAMPLE, confidence
from tilekern.tuning.candidates import EmitterSpaces, Settings, Space
from tilekern.tuning.children import NO_ANSWER, Children

SURE = 0.95
"""Settings replace the schedule's only if a sign test says with this probability that they are faster."""

_RACED = 4  # candidates of a batch that are timed
_ROUNDS, _MOST_ROUNDS, _WINS = 5, 15, 0.8  # of a race, and the part of them that a new best must win
_RACE = 0.5  # seconds of calls in a race of more than `_ROUNDS`
_FINAL_ROUNDS, _MOST_FINAL_ROUNDS = 15, 101
_PLAYED_OFF, _PLAY_OFF_ROUNDS = 24, 40  # candidates that take turns in the end, and rounds of the last two
_FINAL_PART = 0.6  # of the time that is left, for a play-off, and for the last race
_FINAL_SHARE = 0.25  # of the budget, for a play-off and the race against the schedule's own settings
_SLOWEST = 3.0  # times the estimate of the best so far: slower candidates are not compiled
_HOPELESS = 1.6  # times the time of the best so far, in a first run beside other processes: slower ones do not race
_LEAST_LIMIT, _TIMES_OWN = 20.0, 8.0  # seconds that a trial may take, and how often as long as the schedule's own


@dataclass(eq=False)
class Candidate:
    """Settings, and what became of them.

    Attributes:
      settings: the settings.
      file: the saved kernel with them; None if it cannot be traced.
      estimate: the estimated seconds; None without a model.
      seconds: of a first run beside other processes; None where candidates do not run.
      refused: the reason why they are not taken; "" if they are.
    """

    settings: Settings
    file: Path | None = None
    estimate: float | None = None
    seconds: float | None = None
    refused: str = ""


@dataclass
class Outcome:
    """The end of a search.

    Attributes:
      best: the fastest settings.
      seconds: the time of a call with them.
      own_seconds: the time with the schedule's own; None if the target refuses these.
      confidence: by a sign test against the schedule's own; None for estimates, and where there is nothing to compare.
      tried: how many settings compiled and computed the right results.
      refused: how often each reason came.
    """

    best: Settings
    seconds: float
    own_seconds: float | None
    confidence: float | None
    tried: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def gain(self) -> float:
        """How many times faster the best settings are than the schedule's own; 1 if there is nothing to compare."""
        return self.own_seconds / self.seconds if self.own_seconds and self.seconds else 1.0


class Search:
    """A search for the fastest settings of a kernel.

    Args:
      text: returns the saved kernel with some settings, for a process that runs it.
      space: the settings to try, in the order of their distance; or the candidates of a user.
      own: the schedule's own settings.
      children: the processes.
      runs: True if candidates run on this machine, else estimates decide.
      end: the time by `time.monotonic` at which the search should end.
      progress: is shown the best so far.
    """

    def __init__(
        self,
        text: Callable[[Settings], str],
        space: Space | EmitterSpaces | Sequence[Settings],
        own: Settings,
        children: Children,
        folder: Path,
        *,
        runs: bool,
        end: float,
        progress: Callable[[str], None],
    ) -> None:
        self._text, self._space, self._children, self._folder = text, space, children, folder
        self._runs, self._end, self._progress = runs, end, progress
        self._search_end = end - (_FINAL_SHARE * (end - time.monotonic()) if runs else 0.0)
        self._limit = max(_LEAST_LIMIT, end - time.monotonic())
        self._texts: set[str] = set()
        self._tried = 0
        self._refused: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._own = Candidate(own)
        self._working: list[Candidate] = []
        self._best: Candidate | None = None
        self._now: float | None = None

    def run(self) -> Outcome:
        """Search until the budget is used up, or there is nothing left to try.

        Raises:
          TargetError: no settings work.
          EstimateError: nothing runs here, and the schedule's own settings have no estimate.
        """
        start = time.monotonic()
        self._try([self._own], first=True)
        self._limit = max(_LEAST_LIMIT, _TIMES_OWN * (time.monotonic() - start))
        if not self._own.refused:
            self._best = self._own
        for batch in self._batches():
            self._try(batch, first=self._best is None)
            self._choose([candidate for candidate in batch if not candidate.refused])
            if time.monotonic() > self._search_end:
                break
        if self._runs:
            self._play_off()
        return self._confirmed()

    # --- what is tried ---

    def _batches(self) -> Iterator[list[Candidate]]:
        """Batches of candidates, without end of time: at least one is tried."""
        size = max(2 * self._children.count, 4)
        if not isinstance(self._space, Space | EmitterSpaces):
            remaining = iter(self._space)
            while batch := list(itertools.islice(remaining, size)):
                yield list(map(Candidate, batch))
            return
        start, seen = self._own.settings, set[str]()
        remaining = self._space.near(start)
        while True:
            if self._best is not None and self._best.settings is not start:
                start = self._best.settings
                remaining = self._space.near(start)
            unseen = (settings for settings in remaining if _name(settings) not in seen)
            # Until something works, one after the other: the first that does decides what right results are.
            batch = list(itertools.islice(unseen, size if self._best else 1))
            if not batch:
                return
            seen.update(map(_name, batch))
            yield list(map(Candidate, batch))

    def _try(self, candidates: Sequence[Candidate], first: bool) -> None:
        """Compile and check candidates in processes; with `first`, one after the other until one works."""
        for candidate in candidates:
            self._write(candidate)
        written = [candidate for candidate in candidates if candidate.file is not None]
        best = None if self._best is None else self._best.estimate
        most = None if best is None else _SLOWEST * best
        messages = [{"do": "try", "file": str(c.file), "first": first, "most": most} for c in written]
        if first:
            answers = [self._children.ask(message, self._limit) for message in messages[:1]]
            answers += self._children.ask_all([{**m, "first": False} for m in messages[1:]], self._limit)
        else:
            answers = self._children.ask_all(messages, self._limit)
        for candidate, answer in zip(written, answers, strict=True):
            candidate.estimate, candidate.seconds = answer.get("estimate"), answer.get("seconds")
            candidate.refused = answer.get("refused", "")
        for candidate in candidates:
            self._tried += not candidate.refused
            self._working += [] if candidate.refused else [candidate]
            self._refused.update([candidate.refused] if candidate.refused else [])

    def _write(self, candidate: Candidate) -> None:
        try:
            text = self._text(candidate.settings)
        except TilekernError as error:
            candidate.refused = f"{type(error).__name__}: {error.summary}"
            return
        if text in self._texts:
            candidate.refused = "the same program as other settings"
            return
        self._texts.add(text)
        candidate.file = self._folder / f"candidate-{next(self._numbers)}"
        candidate.file.write_text(text, encoding="ascii")

    # --- what is faster ---

    def _choose(self, candidates: Sequence[Candidate]) -> None:
        """Make the fastest candidate the best one, if it is faster."""
        if self._best is None and candidates:
            self._best, *candidates = candidates
        if self._best is None or not candidates:
            return
        if not self._runs:
            self._best = min([self._best, *candidates], key=_estimate)
            self._now = _estimate(self._best)
        else:
            self._race(self._best, candidates)
        self._show()

    def _race(self, best: Candidate, candidates: Sequence[Candidate]) -> None:
        fastest = min(c.seconds or 0.0 for c in (best, *candidates))
        hopeful = [c for c in candidates if (c.seconds or 0.0) <= _HOPELESS * fastest]
        hopeful = sorted(hopeful, key=lambda c: c.seconds or 0.0)[:_RACED]
        turn = sum(max(c.seconds or 0.0, SAMPLE) for c in (best, *hopeful))
        rounds = min(max(_ROUNDS, int(_RACE / turn)), _MOST_ROUNDS)
        samples = self._samples([best, *hopeful], rounds)
        if samples is None:
            # One of them hangs or crashes now: alone, each may lose only its own race.
            for candidate in hopeful:
                pair = self._samples([best, candidate], rounds)
                if pair is None:
                    candidate.refused = "hangs or crashes when it is timed"
                    self._refused[candidate.refused] += 1
                elif _is_faster(pair[1], pair[0]):
                    best = self._best = candidate
            return
        times = dict(zip(hopeful, samples[1:], strict=True))
        self._now = statistics.median(samples[0])
        winners = [c for c in hopeful if _is_faster(times[c], samples[0])]
        if winners:
            self._best = min(winners, key=lambda c: statistics.median(times[c]))
            self._now = statistics.median(times[self._best])

    def _play_off(self) -> None:
        """Let the candidates with the fastest first runs take turns: the faster half stays, for twice as many rounds.

        A race of few rounds, on a machine with other work, overlooks gains of a few percent.
        """
        working = sorted((c for c in self._working if not c.refused), key=lambda c: c.seconds or 0.0)[:_PLAYED_OFF]
        left = [*working, *([self._best] if self._best is not None and self._best not in working else [])]
        stages = (len(left) - 1).bit_length()
        rounds = max(_PLAY_OFF_ROUNDS >> max(stages - 1, 0), _ROUNDS)
        turns = stages * rounds * sum(max(c.seconds or 0.0, SAMPLE) for c in left)
        if len(left) < 2 or turns > _FINAL_PART * (self._end - time.monotonic()):
            return
        while len(left) > 1:
            samples = self._samples(left, rounds)
            if samples is None:  # one of them hangs or crashes: the winner of the races stays
                return
            medians = {candidate: statistics.median(s) for candidate, s in zip(left, samples, strict=True)}
            left = sorted(left, key=lambda c: medians[c])[: (len(left) + 1) // 2 if len(left) > 2 else 1]
            rounds *= 2
        self._best = left[0]

    def _samples(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]] | None:
        if len(candidates) < 2 and rounds < _FINAL_ROUNDS:
            return None if not candidates else [[candidates[0].seconds or 0.0]]
        files = [str(c.file) for c in candidates]
        answer = self._children.ask({"do": "time", "files": files, "rounds": rounds}, len(files) * self._limit)
        return answer.get("samples")

    def _confirmed(self) -> Outcome:
        """The best settings, if a last race says that they are faster than the schedule's own."""
        best, own = self._best, self._own
        if best is None:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in self._refused.most_common(3))
            slow = any(reason.startswith(NO_ANSWER) for reason in self._refused)
            remedies = "another target, or a longer budget" if slow else "or another target"
            raise TargetError(
                "no settings of the kernel work on this target",
                expected="at least one of the candidates compiles and runs",
                got=reasons,
                fix=f"give other candidates, {remedies}",
            )
        rest: dict[str, Any] = {"tried": self._tried, "refused": dict(self._refused.most_common())}
        if not self._runs:
            return self._by_estimates(best, rest)
        compared = [own, best] if best is not own and not own.refused else [best]
        turn = sum(max(c.seconds or 0.0, SAMPLE) for c in compared)
        fitting = int(_FINAL_PART * max(self._end - time.monotonic(), 0.0) / turn)
        samples = self._samples(compared, min(max(_FINAL_ROUNDS, fitting), _MOST_FINAL_ROUNDS)) or []
        if len(samples) < len(compared):  # the best one crashes or hangs in the end
            compared, samples = [own], self._samples([own], _FINAL_ROUNDS) or [[own.seconds or 0.0]]
        medians = [statistics.median(s) for s in samples]
        if len(compared) == 1:
            return Outcome(compared[0].settings, medians[0], medians[0] if compared[0] is own else None, None, **rest)
        sure = confidence(samples[1], samples[0])
        if sure < SURE or medians[1] > medians[0]:
            return Outcome(own.settings, medians[0], medians[0], None, **rest)
        return Outcome(best.settings, medians[1], medians[0], sure, **rest)

    def _by_estimates(self, best: Candidate, rest: Mapping[str, Any]) -> Outcome:
        from tilekern.estimate.explain.changes import SMALLEST_GAIN  # which imports all backends

        own = self._own
        if own.refused.startswith(EstimateError.__name__):
            raise EstimateError(
                "the schedule's own settings have no estimate that others could be compared with",
                expected="a model that follows the program of the schedule",
                got=own.refused,
                fix='name an emitter, target="cuda:sm_90+triton" say, or give the values that decide how long it takes',
            )
        if not own.refused and _estimate(own) < SMALLEST_GAIN * _estimate(best):
            best = own
        return Outcome(best.settings, _estimate(best), None if own.refused else _estimate(own), None, **rest)

    def _show(self) -> None:
        from tilekern.estimate.quantities import duration

        best = "" if self._now is None else f"best {duration(self._now)}, "
        self._progress(f"{best}{self._tried} tried")


def _estimate(candidate: Candidate) -> float:
    return candidate.estimate if candidate.estimate is not None else float("inf")


def _is_faster(samples: Sequence[float], against: Sequence[float]) -> bool:
    wins = sum(x < y for x, y in zip(samples, against, strict=True))
    return wins >= _WINS * len(samples) and statistics.median(samples) < statistics.median(against)


def _name(settings: Settings) -> str:
    return repr(sorted(settings.items()))
