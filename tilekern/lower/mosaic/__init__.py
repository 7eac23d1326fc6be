"""The TPU backend: a Func becomes one `pallas_call`, which Mosaic compiles."""
