"""`python -m tilekern COMMAND`: kernels from the command line, with exit codes for CI.

Exit codes: 0: all is well. 1: a result is wrong. 2: the input is wrong, or a kernel is refused. 3: nothing was proved,
because none of the requested targets runs here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tilekern.command_line import checks, explanations, fuzzing, shows, targets, tunes
from tilekern.errors import TilekernError

_EXAMPLES = """\
examples:
  python -m tilekern targets
  python -m tilekern show tilekern.kernels.matmul:matmul --shapes "f32[512,256], f32[256,128]" --target cuda:sm_90
  python -m tilekern show my_kernels.py:my_kernel --shapes "bf16[1000]" --target tpu:v5e --what plan
  python -m tilekern explain my_kernels.py:my_kernel --shapes "f32[512,512]" --target cuda:sm_90,tpu:v5e,cpu:llvm
  python -m tilekern tune my_kernels.py:my_kernel --shapes "f32[512,512]" --budget 60 --out tuned.json
  python -m tilekern check my_package.kernels:my_kernel --reference my_package.kernels:my_reference --examples 200
  python -m tilekern fuzz --minutes 10 --seed 1 --targets cpu:llvm,cuda:sm_90

exit codes: 0 all is well; 1 a result is wrong, or files differ; 2 wrong input, or refused; 3 nothing was proved
"""

OK, WRONG, BAD_INPUT, NOTHING_PROVED = range(4)
"""Exit codes."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line. Returns the exit code of the command, 2 for a refusal, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m tilekern",
        description="Show, explain, tune, check and fuzz tile kernels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "show|explain|tune|tuned|check|fuzz|targets"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    for command in (shows, explanations, tunes, checks, fuzzing, targets):
        command.add(commands)
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    try:
        return options.run(options)
    except TilekernError as error:
        print(f"{type(error).__module__}.{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
