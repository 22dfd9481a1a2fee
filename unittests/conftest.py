"""Fixtures and markers of all tests.

``ranks`` gives pools of trainers, see ``unittests/harness/__init__.py``.  Every test has the marker ``process`` if its
file starts processes, else ``pure``; ``CMakeLists.txt`` labels the ctest entries by the same words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from unittests.harness import Ranks

STARTS_PROCESSES = re.compile(r"ranks\(|run_fresh|RankPool|subprocess")

# No limit per example: two cores may be busy with other tests.  No database: several sessions run side by side.
hypothesis.settings.register_profile("repository", deadline=None, database=None)
hypothesis.settings.load_profile("repository")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(n)`` is the pool of n trainers, started at its first case and reused by all tests of the session."""
    pools = Ranks()
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its marker."""
    for item in items:
        item.add_marker(label(item.path))


@functools.cache
def label(path: Path) -> str:
    """``process`` or ``pure``, for a test file."""
    return "process" if STARTS_PROCESSES.search(path.read_text(encoding="utf-8")) else "pure"
