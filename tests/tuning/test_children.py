"""Processes that hang, crash or take too much memory are replaced, and lose only their own answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tilekern.tuning.children import Children

PROGRAM = """
import json, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print("ready", flush=True)
for line in sys.stdin:
    what = json.loads(line)["what"]
    if what == "hangs":
        while True: pass
    if what == "crashes":
        os.abort()
    if what == "exits":
        sys.exit(3)
    if what == "takes all memory":
        b = bytearray(1 << 40)
    print(json.dumps({"answer": what, "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def children(tmp_path: Path) -> Generator[Children]:
    with Children(2, tmp_path, (sys.executable, "-c", PROGRAM)) as children:
        yield children


def test_others_answer_beside_those_that_are_lost(children: Children) -> None:
    faults = ["hangs", "crashes", "exits", "takes all memory"]
    answers = children.ask_all([{"what": w} for fault in faults for w in (fault, "works")], 2.0)
    assert [a["answer"] for a in answers[1::2]] == ["works"] * len(faults)
    reasons = [a["refused"] for a in answers[::2]]
    assert reasons == ["hangs: no answer in 2 s", "crashes: SIGABRT", "crashes: exit code 3", "crashes: exit code 1"]


def test_a_process_that_works_stays(children: Children) -> None:
    answers = [children.ask({"what": "works"}, 10.0) for _ in range(3)]
    assert len({a["pid"] for a in answers}) == 1


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    with Children(1, tmp_path, (sys.executable, "-c", PROGRAM)) as children:
        pid = children.ask({"what": "works"}, 10.0)["pid"]
        assert Path("/proc", str(pid)).exists()
    time.sleep(0.1)
    assert not Path("/proc", str(pid)).exists()
