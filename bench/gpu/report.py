"""The tables: gpu.json in a few lines; and the exit status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.gpu.item import Record
from bench.gpu.speed import OURS

Items = Mapping[str, Record | None]


def report(results: Record) -> str:
    """All tables of the content of gpu.json, the shortest summary last."""
    items: Items = results["items"]
    environment = results["environment"]
    parts = [
        f"{environment['gpu'] or 'no GPU'}; seed {environment['seed']}; commit {environment['commit'] or 'unknown'}"
    ]
    tuned = [n for n, r in items.items() if r and "tuned" in r]
    parts += [ranking(items)] if tuned else [speeds(items), _machine(items)]
    parts.append(correctness(items))
    return "\n\n".join(part for part in parts if part)


def status(results: Record) -> int:
    """The exit status: 0 if an item ran and nothing of tilekern failed."""
    records = [r for r in results["items"].values() if r is not None]
    return 0 if records and all(r.get("ok", True) for r in records) else 1


def correctness(items: Items) -> str:
    """The number of items that were right, and the first line of each failure."""
    failed = [(name, r) for name, r in items.items() if r and not r.get("ok", True)]
    lines = [f"FAIL {name}: {_first_line(r.get('text', '') or _disagreement(r))}" for name, r in failed]
    lines += [
        f"late {name}: {_first_line(r['text'])}" for name, r in items.items() if r and "ok" not in r and "text" in r
    ]
    checks = [r for name, r in items.items() if r and name.startswith("numerics ")]
    batches = [r for name, r in items.items() if r and name.startswith("programs ")]
    agree, refused = (sum(r.get(key, 0) for r in batches) for key in ("agree", "refused"))
    lines.append(
        f"numerics: {sum(r.get('ok', False) for r in checks)} of {len(checks)} right; "
        f"random programs: {agree} agree, {refused} refused, {len(batches)} batches; {len(failed)} items failed"
    )
    return "\n".join(lines)


def speeds(items: Items) -> str:
    """A line for each comparison: our time and rate, and our speed relative to each peer."""
    bandwidth = _bandwidth(items)
    rows = [("case", OURS, "rate", "share of the peers' speed, and their µs", "aim")]
    for name, record in items.items():
        if record and OURS in record.get("contestants", {}):
            rows.append(_row(name, record, bandwidth))
    return aligned(rows) if len(rows) > 1 else ""


def ranking(items: Items) -> str:
    """The variants of each tuned kernel, the fastest first."""
    groups: dict[str, list[tuple[float, str, Record]]] = {}
    for name, record in items.items():
        if record and "tuned" in record:
            variant = name.removeprefix(f"tune {record['tuned']} ")
            groups.setdefault(record["tuned"], []).append((_share(record), variant, record))
    parts: list[str] = []
    for tuned, variants in groups.items():
        rows = [(tuned, "µs", "of peer", "registers", "spills", "shared")]
        for share, variant, record in sorted(variants, key=lambda v: -v[0]):
            program = (record.get("programs") or [{}])[0]
            resources = (str(program.get(key, "")) for key in ("registers", "spills", "shared_bytes"))
            time = "refused" if "refused" in record else f"{median_us(record, OURS):.1f}"
            rows.append((variant, time, f"{share:.2f}" if share >= 0 else "", *resources))
        parts.append(aligned(rows))
    return "\n\n".join(parts)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def best_of(contestants: Mapping[str, Record]) -> dict[str, float]:
    """The median of each peer in microseconds; of several settings of one peer ("mosaic 64/128/2") the best."""
    best: dict[str, float] = {}
    for name, record in contestants.items():
        if name != OURS and "median_us" in record:
            peer = "mosaic" if name.startswith("mosaic") else name
            best[peer] = min(best.get(peer, math.inf), record["median_us"])
    return best


def median_us(record: Record, name: str) -> float:
    """A contestant's median in microseconds; NaN if it has none."""
    return record.get("contestants", {}).get(name, {}).get("median_us", math.nan)


def judged(record: Record, bandwidth: float) -> float:
    """Our speed relative to the aim's: the speed of the best peer of a kind, or the bandwidth of a copy."""
    ours = median_us(record, OURS)
    if record["aim_of"] == "copy":
        return record["bytes"] / (ours * 1e-6) / bandwidth
    peers = [us for name, us in best_of(record["contestants"]).items() if record["aim_of"] in name]
    return min(peers, default=math.nan) / ours


def _row(name: str, record: Record, bandwidth: float) -> tuple[str, ...]:
    ours = median_us(record, OURS)
    peers = ", ".join(f"{us / ours:.2f} {peer} ({us:.0f})" for peer, us in best_of(record["contestants"]).items())
    method = record["contestants"][OURS].get("method", "")
    time = f"{ours:.1f} µs" + ("" if method == "profiler" else f" ({method or 'failed'})")
    aim = ""
    if record.get("aim") is not None:
        share = judged(record, bandwidth)
        verdict = "unknown" if math.isnan(share) else "met" if share >= record["aim"] else "NOT MET"
        aim = f"{share:.2f} of {record['aim_of'] or 'best'}, aim {record['aim']:.2f}: {verdict}"
    return name, time, _rate(record, ours), peers, aim


def _rate(record: Record, us: float) -> str:
    if record["flops"]:
        return f"{record['flops'] / us / 1e6:.0f} TFLOP/s"
    return f"{record['bytes'] / us / 1e3:.0f} GB/s"


def _share(record: Record) -> float:
    """A key to sort by: our speed relative to the best peer, 1 / ms without a peer, -1 after a failure."""
    peers, ours = best_of(record.get("contestants", {})), median_us(record, OURS)
    if math.isnan(ours):
        return -1.0
    return min(peers.values()) / ours if peers else 1e3 / ours


def _bandwidth(items: Items) -> float:
    """Bytes per second of the best copy; NaN if none was measured."""
    record = items.get("ceiling copy")
    best = min(best_of(record.get("contestants", {})).values(), default=math.nan) if record else math.nan
    return record["bytes"] / (best * 1e-6) if record else math.nan


def _machine(items: Items) -> str:
    lines = [f"copy: {_bandwidth(items) / 1e9:.0f} GB/s"]
    if (clocks := items.get("clocks")) and "by_method_us" in clocks:
        methods = ", ".join(f"{us:.0f} µs by the {how}" for how, us in clocks["by_method_us"].items())
        lines.append(f"matmul 8192³ by XLA: {methods}")
    if (dispatch := items.get("dispatch")) and "dispatch_us" in dispatch:
        lines.append("dispatch: " + ", ".join(f"{how} {us:.1f} µs" for how, us in dispatch["dispatch_us"].items()))
    absent: dict[str, str] = {}
    for record in items.values():
        for name, contestant in (record or {}).get("contestants", {}).items():
            if "error" in contestant:
                absent.setdefault(f"{name}: {_first_line(contestant['error'])}", "")
    lines += [f"absent {reason}" for reason in absent]
    return "\n".join(lines)


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:160]


def _disagreement(record: Record) -> str:
    differences = ", ".join(f"{peer} {d:.2g}" for peer, d in record.get("differences", {}).items())
    return f"results differ from those of every peer: {differences}"
