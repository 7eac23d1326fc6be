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
    "tilekern/lower/mosaic/stored_dtypes.py:wide_dtype:dtype:ff754c5c": "int32 has all numbers of 8 and 16 bits, too",
    "tilekern/lower/llvm/runtime/code_table.py:_add:dtype:6744763f": (
        "a constant of 32 bits fills a register of 64 bits with zeros, on x86-64 and AArch64"
    ),
    "tilekern/testing/programs/memory.py:Memory._write:bound:84e95506": (
        "random programs are as right; another share of their stores has masks"
    ),
    "kernels/ragged_dot/kernel.py:groups_of_rows:dtype:456e4eab": "a number of groups, from 0 on, becomes int32 again",
    "kernels/flash_attention/masks.py:Segments._within_ranges:mask:2149ed44": (
        "a loop from key 0 on visits more tiles, of which each pair is masked; only its speed differs"
    ),
    "tilekern/testing/programs/facts.py:<module>:bound:44be4bbb": (
        "the slopes and the magnitude of a quotient hold up to 9, too"
    ),
    "kernels/gated_delta_rule/inverse.py:_index:dtype:6d8bfe3a": (
        "indices from 0 on, which are only compared, divided and added"
    ),
    "kernels/rope/normed.py:_backward:flag:53fb7329": "a cotangent that nothing reads is computed, too",
    "tilekern/estimate/cpu/rates.py:<module>:bound:5bce3b29": (
        "only a measured rate differs, by what a second level holds of a longer copy"
    ),
    "tilekern/blocks/choose.py:by_speed:dtype:981f2117": "blocks are below 2**31",
}
