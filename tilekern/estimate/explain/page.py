"""An explanation as a page of HTML, which loads nothing: lines, programs side by side, units, roofline, tiles.

Lines of the source and of programs that belong together light up together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from tilekern.estimate import drawings
from tilekern.estimate.explain.text import NO_REGION
from tilekern.estimate.quantities import duration

if TYPE_CHECKING:
    from tilekern.estimate.explain.explanation import Explanation, Listing

_SCRIPT = """
for (const root of document.querySelectorAll(".tilekern")) root.addEventListener("mouseover", event => {
  const of = event.target.closest("[data-line]");
  for (const lit of root.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (of) for (const twin of root.querySelectorAll(`[data-line="${of.dataset.line}"]`)) twin.classList.add("lit");
});
"""


def page(explanations: Sequence[Explanation]) -> str:
    """A page with a section for each explanation."""
    names = ", ".join(dict.fromkeys(explanation.kernel for explanation in explanations))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(names)}</title>"
    return head + "".join(map(section, explanations)) + "</html>\n"


def section(explanation: Explanation) -> str:
    """The explanation as one element, with its style and script, for notebooks."""
    parts = "".join(_parts(explanation))
    return f"<div class=tilekern><style>{drawings.STYLE}</style>{parts}</div><script>{_SCRIPT}</script>"


def _parts(explanation: Explanation) -> Iterator[str]:
    yield f"<h1>{escape(explanation.kernel)} on {escape(explanation.target)}</h1>"
    yield from _estimate(explanation)
    yield "<h2>Lines</h2><table>"
    for number, line in enumerate(explanation.lines):
        where = f"{escape(os.path.basename(line.file))}:{line.line}"
        yield f'<tr data-line="{number}">{"".join(drawings.share(line.share))}<td>{where}</td>'
        became = "<br>".join(map(escape, line.became))
        yield f"<td><code>{escape(line.text)}</code><div class=became>{became}</div></td></tr>"
    yield "</table>"
    if explanation.shares_of:
        yield f"<p>Shares: of the {escape(explanation.shares_of)}.</p>"
    yield from _regions(explanation)
    yield "<h2>Tiles of the program in the middle of the grid</h2>"
    yield f"<div class=flex>{drawings.arrays(explanation.tiles)}</div>"
    yield "<h2>Memory and settings</h2><table>"
    settings = {name: str(value) for name, value in explanation.settings.items()}
    for name, value in {**explanation.memory, **settings}.items():
        yield f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
    yield "</table>"
    yield from _changes(explanation)
    yield "<h2>Programs</h2><div class='flex listings'>"
    yield from (_listing(name, listing) for name, listing in explanation.listings.items())
    yield "</div>"


def _regions(explanation: Explanation) -> Iterator[str]:
    if not explanation.regions:
        return
    yield "<h2>Regions</h2><table>"
    for name, part in explanation.regions.items():
        yield f"<tr>{''.join(drawings.share(part))}<td>{escape(name or NO_REGION)}</td></tr>"
    yield "</table>"


def _estimate(explanation: Explanation) -> Iterator[str]:
    if explanation.estimate is None:
        yield f"<p>No estimate: {escape(explanation.unestimated)}.</p>"
        return
    yield f"<pre>{escape(str(explanation.estimate))}</pre><h2>Units and roofline</h2><div class=flex>"
    yield f"{drawings.bars(explanation.estimate.busy)}{drawings.roofline(explanation.estimate)}</div>"


def _changes(explanation: Explanation) -> Iterator[str]:
    if not (explanation.tried or explanation.refused_changes or explanation.untried):
        return
    yield f"<h2>Changes that help, of {explanation.tried} that compiled</h2><table>"
    for change in explanation.changes:
        yield f"<tr><td>{escape(change.setting)} = {change.after} for {change.before}</td>"
        yield f"<td>{duration(change.seconds)}</td><td>{change.gain:.2f} × as fast</td></tr>"
    yield "</table>" if explanation.changes else "<tr><td>none</td></tr></table>"
    if explanation.untried:
        yield f"<p>Not tried, for lack of time: {escape(', '.join(explanation.untried))}</p>"


def _listing(name: str, listing: Listing) -> str:
    spans = (
        f"<span{'' if origin < 0 else f' data-line={origin}'}>{escape(line) or ' '}</span>"
        for line, origin in zip(listing.text.splitlines(), listing.origins, strict=True)
    )
    return f"<div><b>&nbsp;{escape(name)}</b><pre>{''.join(spans)}</pre></div>"
