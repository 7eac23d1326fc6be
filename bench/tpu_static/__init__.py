"""Static speed of our TPU kernels and of their peers, without a TPU: `python -m bench.tpu_static`.

The cycles come from `tilekern.estimate.tpu`.

cases       the compared cases, a module for each family of kernels; `compare`: runs the cases
table       the text of a comparison; `picture`: its PNG
golden      the cycles that no library kernel may exceed
"""
