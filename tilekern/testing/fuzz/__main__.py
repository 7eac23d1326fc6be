"""The child process of the fuzzer; see `tilekern.testing.fuzz.run`."""

import json
import os
import sys
from pathlib import Path

from tilekern.debug_options import VARIABLE
from tilekern.testing.fuzz.worker import run_one, work

if __name__ == "__main__":
    # Plans are verified, and memory that a program may not read yet holds NaN.
    os.environ[VARIABLE] = "verify,poison"
    task = json.loads(sys.argv[1])
    folder = Path(task["folder"])
    if "one" in task:
        name, number = task["one"]
        run_one(folder, name, number)
    else:
        work(folder, task["names"], task["seconds"], stop=task["stop"], shrink=task["shrink"])
