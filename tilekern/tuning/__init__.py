"""The tuner: the fastest blocks, choices and launch options of a kernel, found by measurements or by estimates.

tune         tunes a kernel, and what its derivatives run
search       the order of trials within a budget
candidates   the settings that are tried, and their distance
children     processes that compile and run candidates, and may hang or die of them
worker       the program of these processes
result       the table, and the entries for a file
"""

from tilekern.tuning.result import Result
from tilekern.tuning.tune import Request, check_budget, target_of, tune, tune_called

__all__ = ["Request", "Result", "check_budget", "target_of", "tune", "tune_called"]
