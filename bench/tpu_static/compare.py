"""Compare our kernels with their peers on each chip: compile, estimate, cache the figures of peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.tpu_static.cases import Case
from tilekern.estimate.tpu.bundles import DumpError
from tilekern.estimate.tpu.chips import chip as chip_of
from tilekern.estimate.tpu.estimate import CompileError, KernelEstimate, estimate
from tilekern.estimate.tpu.simulate import SimulationError

Record = dict[str, Any]
OURS = "tilekern"
CACHE = Path(__file__).parents[1] / "results" / "tpu-static-peers.json"
_JOBS = 2  # compilers at a time


def versions() -> dict[str, str]:
    """The versions that an estimate depends on."""
    return {name: metadata.version(name) for name in ("jax", "libtpu")}


def total(kernels: Sequence[KernelEstimate]) -> Record:
    """A program's kernels, one after another, as one record: sums, the largest `vmem`, and `use` weighted by cycles."""
    cycles = sum(k.cycles for k in kernels)
    units = {unit for k in kernels for unit in k.use or ()}
    added = ("bundles", "stall", "cycles", "us", "read", "written", "dmas", "fills", "spills")
    record: Record = {key: sum(getattr(k, key) for k in kernels) for key in added}
    record["pallas_us"] = sum(k.us for k in kernels if k.pallas)
    record["vmem"] = max(k.vmem for k in kernels)
    record["use"] = {u: sum((k.use or {}).get(u, 0.0) * k.cycles for k in kernels) / cycles for u in sorted(units)}
    record["kernels"] = [asdict(k) for k in kernels]
    return record


def measure(program: str, chip: str) -> Record:
    """The record of a program, or {"error": the first line of its error}."""
    try:
        return total(estimate(program, chip))
    except (CompileError, DumpError, SimulationError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


class PeerCache:
    """A file with the records of peers by "case chip setting", for one version of JAX and libtpu."""

    def __init__(self, path: Path) -> None:
        self.path = path
        contents: Record = json.loads(path.read_text()) if path.exists() else {}
        self.records: dict[str, Record] = contents.get("records", {}) if contents.get("versions") == versions() else {}

    def save(self) -> None:
        """Write the file, without single kernels and without errors of our own simulation."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = {
            key: {name: value for name, value in record.items() if name != "kernels"}
            for key, record in sorted(self.records.items())
            if record.get("error", "CompileError").startswith("CompileError")
        }
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(_rounded(record))}" for key, record in records.items())
        self.path.write_text(f'{{"versions": {json.dumps(versions())},\n"records": {{\n{lines}\n}}}}\n')


def _rounded(record: Record) -> Record:
    return json.loads(json.dumps(record), parse_float=lambda x: round(float(x), 4))


def compare(
    cases: Sequence[Case], chips: Sequence[str], cache: PeerCache, say: Callable[[str], None]
) -> dict[str, Record]:
    """Records by "case chip": the bound in microseconds, ours, and the fastest setting of each peer."""
    jobs = [_Job(case, chip, *program) for case in cases for chip in chips for program in _programs(case, chip)]
    missing = [job for job in jobs if job.name == OURS or job.key not in cache.records]
    fresh: dict[str, Record] = {}
    with ThreadPoolExecutor(_JOBS) as pool:
        for job, record in zip(missing, pool.map(_Job.run, missing), strict=True):
            say(f"{job.key}: {record.get('error') or format(record['us'], '.1f') + ' µs'}")
            if job.name == OURS:
                fresh[job.key] = record
            else:
                cache.records[job.key] = record
                cache.save()
    return {f"{case.name} {chip}": _row(case, chip, fresh, cache.records) for case in cases for chip in chips}


@dataclass(frozen=True)
class _Job:
    """A contestant in a case on a chip."""

    case: Case
    chip: str
    name: str
    program: str

    @property
    def key(self) -> str:
        return _key(self.case, self.chip, self.name)

    def run(self) -> Record:
        return measure(self.program, self.chip)


def _programs(case: Case, chip: str) -> Iterator[tuple[str, str]]:
    yield OURS, case.ours(chip)
    yield from case.peers().items()


def _key(case: Case, chip: str, name: str) -> str:
    return f"{case.name} {chip} {name}"


def _row(case: Case, chip: str, fresh: Mapping[str, Record], of_peers: Mapping[str, Record]) -> Record:
    """The row of a case on a chip: our record, and of each peer the record of its fastest setting or its last error."""
    best: dict[str, Record] = {}
    for name in case.peers():
        if (key := _key(case, chip, name)) not in of_peers:
            continue
        record = of_peers[key] | {"setting": name}
        peer = name.split()[0]
        if peer not in best or record.get("us", float("inf")) < best[peer].get("us", float("inf")):
            best[peer] = record
    bound = case.bound(chip_of(chip))
    return {"case": case.name, "chip": chip, "bound": bound, OURS: fresh[_key(case, chip, OURS)], "peers": best}
