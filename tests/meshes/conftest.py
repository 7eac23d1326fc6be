"""Tests that need 8 devices: tests/test_meshes.py runs them in processes that have as many."""

import os

collect_ignore_glob = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
