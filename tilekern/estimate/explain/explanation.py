"""The result of `explain`: for each line of the user its code and time, and changes that would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, asdict, dataclass, field
from functools import cached_property
from typing import Any

from tilekern.estimate.explain.page import page, section
from tilekern.estimate.explain.text import text
from tilekern.estimate.result import Estimate


@dataclass(frozen=True)
class LineReport:
    """One line of the user's source.

    Attributes:
      file: its file.
      line: its number, from 1.
      text: the line.
      became: what the target makes of it, a few words each.
      share: its part of the work, 0 to 1; None without an estimate.
    """

    file: str
    line: int
    text: str
    became: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Change:
    """A change that compiles, and takes less time by the estimate.

    Attributes:
      setting: the block or launch option, "block_rows".
      before: its value now.
      after: the other value.
      seconds: the estimated time with it.
      gain: the time now over the time with it, 1.25 for a fifth less.
    """

    setting: str
    before: int
    after: int
    seconds: float
    gain: float


@dataclass(frozen=True)
class Listing:
    """A program as text.

    Attributes:
      text: its lines.
      origins: for each line the number of the user's line, counted in `Explanation.lines`; -1 for none.
    """

    text: str
    origins: tuple[int, ...]


@dataclass(frozen=True)
class TilePicture:
    """The tile of an array that one program in the middle of the grid reads or writes.

    Attributes:
      array: the name of the array.
      shape: its shape.
      first: the first element of the tile along each dim.
      size: the elements along each dim; all of them where a loop walks along the dim, or data choose the place.
      written: True for a store.
    """

    array: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    size: tuple[int, ...]
    written: bool


@dataclass(frozen=True)
class Explanation:
    """What a target made of a kernel. It prints as text; notebooks show a page; `as_dict` is for machines.

    Attributes:
      kernel: its name.
      target: the target.
      estimate: the estimated time; None where there is none.
      unestimated: the reason why there is no estimate; "" if there is one.
      lines: the user's lines, in the order of the source.
      shares_of: what the shares of lines are shares of, in words.
      memory: the memory bill: registers, shared memory, VMEM or scratch, by name, in words.
      changes: the changes that help most, best first, three at most.
      tried: the number of changes that were compiled.
      refused_changes: by change, "block_rows = 128", the first line of the error, for changes that the target refuses.
      settings: blocks and launch options now.
      programs: returns `listings`. LLVM takes up to two seconds for the assembly of a large kernel, which text does not
        show.
      tiles: the tile of each access of the program in the middle of the grid.
      regions: the share of each `tk.region` without the regions inside of it, by its path; "" is the share outside
        of all regions. Empty without an estimate, and for a kernel without regions.
      untried: the changes for which the budget did not suffice, "block_rows = 128".
    """

    kernel: str
    target: str
    estimate: Estimate | None
    unestimated: str
    lines: tuple[LineReport, ...]
    shares_of: str
    memory: Mapping[str, str]
    changes: tuple[Change, ...]
    tried: int
    refused_changes: Mapping[str, str]
    settings: Mapping[str, int]
    programs: InitVar[Callable[[], Mapping[str, Listing]]]
    tiles: tuple[TilePicture, ...]
    regions: Mapping[str, float] = field(default_factory=dict[str, float])
    untried: tuple[str, ...] = ()

    def __post_init__(self, programs: Callable[[], Mapping[str, Listing]]) -> None:
        object.__setattr__(self, "_programs", programs)

    @cached_property
    def listings(self) -> Mapping[str, Listing]:
        """The block IR, the target's program, and where the compiler shows it the assembly, by these names."""
        programs: Callable[[], Mapping[str, Listing]] = self.__dict__["_programs"]
        return programs()

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts, for JSON; the estimate with its bound and share."""
        content = asdict(self) | {"listings": {name: asdict(listing) for name, listing in self.listings.items()}}
        if self.estimate is not None:
            derived = ("bound", "bound_by", "share", "bottleneck")
            content["estimate"] |= {name: getattr(self.estimate, name) for name in derived}
        return content

    def html(self) -> str:
        """A page of its own that loads nothing, see `tilekern.estimate.explain.page.page`."""
        return page([self])

    def _repr_html_(self) -> str:
        return section(self)

    def text(self, colour: bool = False) -> str:
        """The text, with ANSI colours if `colour`."""
        return text(self, colour)

    def __str__(self) -> str:
        return self.text()
