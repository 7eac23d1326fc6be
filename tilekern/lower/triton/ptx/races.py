"""Find accesses to shared memory that no barrier orders.

Each warp has a vector clock: the latest event of every other warp, and of every mbarrier's copies, that is known to
have happened before (Flanagan and Freund, "FastTrack", PLDI 2009). Barriers join clocks. For each word of 4 bytes the
last write, and each warp's last read, are known; an access that is not ordered behind them is a race. A warp counts as
one thread: lanes are not compared.

Products and tensor copies use the asynchronous proxy: a write of a thread must be followed by a proxy fence before
they read it (PTX ISA 9.0, section 8.3, "Proxies").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.parse import PtxError

_IN_FLIGHT = 1 << 30
_AGENTS = 32


class Races:
    """The clocks of a launch.

    Args:
      blocks: thread blocks.
      threads: threads of a block.
      shared_bytes: shared memory of a block, a multiple of 4.
      describe: names the instruction of an address.

    Attributes:
      pc: the address of the instruction that runs.
      clocks: int32[blocks, actors, actors]; actors are the warps of a block, then its mbarriers' copies.
      writers, write_clocks: for each word the actor that wrote it last, -1 for none, and that actor's clock then.
      read_clocks: int32[words, warps], the clock of each warp when it last read the word; 0 for never.
      visible: for each word, True if a proxy fence came behind its write.
    """

    def __init__(self, blocks: int, threads: int, shared_bytes: int, describe: Callable[[int], str]) -> None:
        self._describe, self._threads, self._words_of_block = describe, threads, shared_bytes // 4
        self.pc = 0
        self.warps = threads // 32
        actors = self.warps + _AGENTS
        self.clocks = np.zeros((blocks, actors, actors), np.int32)
        self.clocks[:, range(actors), range(actors)] = 1
        words = blocks * self._words_of_block
        self.writers = np.full(words, -1, np.int16)
        self.write_clocks = np.zeros(words, np.int32)
        self.read_clocks = np.zeros((words, self.warps), np.int32)
        self.visible = np.ones(words, bool)
        self.where_written = np.full(words, -1, np.int32)
        self.where_read = np.full((words, self.warps), -1, np.int32)
        self._agents: dict[tuple[int, int], int] = {}
        # By mbarrier: what those know that arrived so far, and what those knew that arrived in phases that ended.
        self._barriers: dict[tuple[int, int], Array] = {}
        self._ended: dict[tuple[int, int], Array] = {}

    # --- accesses ---

    def read(self, places: Array, nbytes: int, ids: Array) -> None:
        """Threads read bytes at offsets into shared memory."""
        words, block, warp = self._words(places, nbytes, ids)
        self._require_written(words, block, warp)
        self.read_clocks[words, warp] = self.clocks[block, warp, warp]
        self.where_read[words, warp] = self.pc

    def use(self, places: Array, nbytes: int, ids: Array) -> None:
        """Threads use an mbarrier, which must have been initialized."""
        self._require_written(*self._words(places, nbytes, ids))

    def write(self, places: Array, nbytes: int, ids: Array) -> None:
        """Threads write bytes."""
        words, block, warp = self._words(places, nbytes, ids)
        self._require_unused(words, block, warp)
        self._set_written(words, warp, self.clocks[block, warp, warp], False)

    def read_beside(self, words: Array, block: int, warp: int) -> None:
        """A product or tensor copy that a warp begins reads words by the asynchronous proxy, until `end_reads`."""
        blocks, warps = np.full(len(words), block), np.full(len(words), warp)
        self._require_written(words, blocks, warps)
        if not self.visible[words].all():
            word = words[np.argmin(self.visible[words])]
            raise PtxError(
                f"no proxy fence stands between {self._at(self.where_written[word])}, "
                f"which wrote {self._name(word)}, and this"
            )
        self.read_clocks[words, warp] = _IN_FLIGHT
        self.where_read[words, warp] = self.pc

    def end_reads(self, words: Array, block: int, warp: int) -> None:
        """A warp waited for the end of what `read_beside` began."""
        self.read_clocks[words, warp] = self.clocks[block, warp, warp]

    def write_beside(self, words: Array, block: int, warp: int, barrier: tuple[int, int]) -> None:
        """A tensor copy that a warp begins writes words, and arrives at an mbarrier."""
        self._require_unused(words, np.full(len(words), block), np.full(len(words), warp))
        agent = self._agent(barrier)
        self.clocks[block, agent, agent] += 1
        self._set_written(words, agent, self.clocks[block, agent, agent], True)
        clock = self._barriers.setdefault(barrier, np.zeros(self.clocks.shape[1], np.int32))
        clock[agent] = self.clocks[block, agent, agent]

    def begin_copy(self, places: Array, nbytes: int, ids: Array) -> None:
        """Threads begin `cp.async` to some bytes."""
        words, block, warp = self._words(places, nbytes, ids)
        self._require_unused(words, block, warp)
        self._set_written(words, warp, _IN_FLIGHT, False)

    def end_copy(self, places: Array, nbytes: int, ids: Array) -> None:
        """The threads waited for these copies."""
        words, block, warp = self._words(places, nbytes, ids)
        self.write_clocks[words] = self.clocks[block, warp, warp]

    # --- order ---

    def meet(self, ids: Array) -> None:
        """Threads of the same barrier meet."""
        for block, warps in self._warps_of(ids):
            self.clocks[block, warps] = self.clocks[block, warps].max(0)
            self.clocks[block, warps, warps] += 1

    def arrive(self, barrier: tuple[int, int], thread: int) -> None:
        """A thread arrives at an mbarrier."""
        block, warp = barrier[0], thread % self._threads // 32
        clock = self._barriers.setdefault(barrier, np.zeros(self.clocks.shape[1], np.int32))
        np.maximum(clock, self.clocks[block, warp], out=clock)
        self.clocks[block, warp, warp] += 1

    def end_phase(self, barrier: tuple[int, int]) -> None:
        """A phase of an mbarrier ends. Warps that wait for it see the accesses in front of its arrivals."""
        self._ended[barrier] = self._barriers[barrier].copy()

    def wait(self, barrier: tuple[int, int], warps: Array) -> None:
        """Warps see that a phase of an mbarrier ended."""
        if barrier in self._ended:
            clocks = self.clocks[barrier[0]]
            clocks[warps] = np.maximum(clocks[warps], self._ended[barrier])

    def fence(self, ids: Array) -> None:
        """Fence: the asynchronous proxy sees all writes that are ordered before it in threads `ids`."""
        for block, warps in self._warps_of(ids):
            clock = self.clocks[block, warps].max(0)
            part = slice(block * self._words_of_block, (block + 1) * self._words_of_block)
            self.visible[part] |= clock[self.writers[part]] >= self.write_clocks[part]

    # --- inside ---

    def _warps_of(self, ids: Array) -> list[tuple[int, Array]]:
        """The blocks of threads, each with the warps of it that the threads are in."""
        blocks = ids // self._threads
        return [(int(b), np.unique(ids[blocks == b] % self._threads // 32)) for b in np.unique(blocks)]

    def words_of(self, places: Array, nbytes: int) -> Array:
        """The words of some bytes, each once."""
        return np.unique(np.concatenate([places // 4, (places + nbytes - 1) // 4]))

    def _words(self, places: Array, nbytes: int, ids: Array) -> tuple[Array, Array, Array]:
        count = max(1, nbytes // 4)
        words = (places[:, None] // 4 + np.arange(count)).reshape(-1)
        block, warp = (np.repeat(x, count) for x in (ids // self._threads, ids % self._threads // 32))
        return words, block, warp

    def _require_written(self, words: Array, block: Array, warp: Array) -> None:
        """Refuse reads that are not ordered behind the last write."""
        writer = self.writers[words]
        wrong = (writer >= 0) & (self.clocks[block, warp, writer] < self.write_clocks[words])
        if wrong.any():
            n = int(np.argmax(wrong))
            raise PtxError(
                f"race: warp {warp[n]} reads {self._name(words[n])} that {self._actor(writer[n])} wrote at "
                f"{self._at(self.where_written[words[n]])}, with no barrier between"
            )

    def _require_unused(self, words: Array, block: Array, warp: Array) -> None:
        """Refuse writes that are not ordered behind all reads and the last write."""
        writer = self.writers[words]
        wrong = (writer >= 0) & (self.clocks[block, warp, writer] < self.write_clocks[words])
        if wrong.any():
            n = int(np.argmax(wrong))
            raise PtxError(
                f"race: warp {warp[n]} writes {self._name(words[n])} that {self._actor(writer[n])} wrote at "
                f"{self._at(self.where_written[words[n]])}, with no barrier between"
            )
        reads = self.read_clocks[words]
        late = reads > self.clocks[block, warp, : self.warps]
        if late.any():
            n, reader = (int(x[0]) for x in np.nonzero(late))
            raise PtxError(
                f"race: warp {warp[n]} writes {self._name(words[n])} that warp {reader} reads at "
                f"{self._at(self.where_read[words[n], reader])}, with no barrier between"
            )

    def _set_written(self, words: Array, actor: Array | int, clock: Array | int, visible: bool) -> None:
        self.writers[words], self.write_clocks[words] = actor, clock
        self.visible[words], self.where_written[words] = visible, self.pc

    def _agent(self, barrier: tuple[int, int]) -> int:
        if barrier not in self._agents:
            number = sum(block == barrier[0] for block, _ in self._agents)
            if number == _AGENTS:
                raise PtxError(f"more than {_AGENTS} mbarriers in one block are not known")
            self._agents[barrier] = self.warps + number
        return self._agents[barrier]

    def _actor(self, actor: int) -> str:
        return f"warp {actor}" if actor < self.warps else "a tensor copy"

    def _name(self, word: int) -> str:
        return f"the word at {word % self._words_of_block * 4} of shared memory"

    def _at(self, pc: Any) -> str:
        return self._describe(int(pc))
