"""Tests that need 8 devices: tests/test_meshes.py runs them in processes that have as many."""

import os

import pytest

collect_ignore_glob = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of a test are a sweep: half of them run each day, if there are two."""
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.sweep(2))
