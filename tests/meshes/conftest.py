"""Tests that need 8 devices: tests/test_meshes.py runs them in processes that have as many."""

import jax

collect_ignore_glob = [] if jax.device_count() >= 8 else ["test_*.py"]
