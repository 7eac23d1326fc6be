"""The process in PyTorch's environment: `python pytorch_child.py THREADS`, see `pytorch.py`.

First it says its version. A JSON object with a case prepares it, an empty one makes a call. Arrays are [B, heads,
length, width], as PyTorch likes them best.
"""

import json
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention


def answer(**values):
    """Write one line."""
    print(json.dumps(values), flush=True)


def prepare(length, heads, width, dtype, causal):
    """A function that makes one call."""
    q, k, v = (torch.randn(1, heads, length, width).to(getattr(torch, dtype)) for _ in range(3))

    def call():
        with torch.no_grad():
            scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def main():
    """Answer until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    answer(version=torch.__version__)
    call = None
    for line in sys.stdin:
        case = json.loads(line)
        if case:
            call = prepare(**case)
            answer(ready=True)
            continue
        start = time.perf_counter()
        call()
        answer(seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
