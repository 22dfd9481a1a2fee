"""A rank that comes 45 s late between two steps does not end the run, and changes no number."""
# ctest: serial
# ctest: timeout=300

from __future__ import annotations

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_misuse"


def test_a_rank_that_sleeps_45_seconds(ranks: Ranks) -> None:
    for runs in ranks(2).run(WORKER, "late", 45.0, timeout=150):
        for level in ("os_g", "p_g_os"):
            for name, value in runs["DataParallel"].items():
                assert runs[level][name].tobytes() == value.tobytes(), (level, name)
