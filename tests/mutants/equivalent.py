"""Drawn faults that no test can find, each with the reason: the program means the same, or only its speed differs."""

EQUIVALENT: dict[str, str] = {
    "tilekern/training/adamw.py:_stepped:dtype:b4e52b38": "coordinates from 0 on have the same bits as int32",
    "tilekern/nn/attention.py:dot_product_attention:dtype:91b9c372": "zeros are the same in both dtypes",
    "tilekern/distributed/ring.py:_merged:swap:59b81bb5": "logaddexp is symmetric, in floats too",
    "tilekern/distributed/ring.py:_Derivative.along:flag:1c1c8896": "a barrier orders memory, and changes no value",
    "tilekern/kernel/divided.py:<module>:bound:a379a09e": "the size of a cache: a lost entry is computed again",
    "tilekern/distributed/exchange.py:_grouping:dtype:a5fda61d": "numbers from 0 on, int32 beside int32",
    "tilekern/lower/rewrite/narrow_floats.py:encoded:identity:222df693": "lanes of larger numbers do not read it",
    "tilekern/lower/mosaic/plan/step_blocks.py:_Steps.blocks:dtype:3b5e80fa": "zeros, to which int64 places are added",
    "tilekern/lower/triton/ptx/machine.py:Arena.__init__:dtype:f1f857de": "numbers of thread blocks are below 2**31",
    "tilekern/_interception.py:_Codes.changes:drop:ae4d7a14": "without it a loop finds no change; only time differs",
}
