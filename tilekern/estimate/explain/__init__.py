"""Explanations of lowered kernels: what each line became, its part of the work, and what would help.

explanation  the result; `text`, `page`: the result for terminals and browsers
explainer    what a backend tells of its programs, by the module that its record names
lines        the user's lines; `on_gpu`, `on_tpu`, `on_cpu`: what each target makes of them
work         each line's part of the work, by rates
listings     programs as text, with the user's line of each of their lines
tiles        what one program reads and writes
changes      changes of blocks and launch options, each compiled and estimated
"""

from tilekern.estimate.explain.changes import Variants
from tilekern.estimate.explain.explain import explain
from tilekern.estimate.explain.explanation import Change, Explanation, LineReport, Listing, TilePicture

__all__ = ["Change", "Explanation", "LineReport", "Listing", "TilePicture", "Variants", "explain"]
