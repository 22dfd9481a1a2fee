"""Run cases on several ranks, after Paddle's multi-process unit tests, with the ranks reused from case to case.

As in Paddle, a ``test_*.py`` holds the tests and a ``dygraph_*.py`` beside it holds what the trainers do. Starting
trainers costs seconds, a case often only milliseconds, so Paddle is imported once per pytest session, by a template
that forks the trainers, and a pool of N trainers is fed one case after another through pipes::

    # unittests/sharding/dygraph_parity.py: runs inside a trainer, once on every rank
    def losses(level, steps):
        paddle.distributed.get_rank()                      # init_parallel_env() has been called
        ...
        return [float(...), ...]

    # unittests/sharding/test_parity.py: runs in pytest, imports neither Paddle nor the worker
    def test_parity(ranks):
        by_rank = ranks(2).run("unittests.sharding.dygraph_parity", "losses", level="os", steps=10)
        assert by_rank[0] == by_rank[1]

**A case** is a plain function in an importable module. Arguments and return values are pickled; tensors inside
returned lists, tuples and dicts arrive as numpy arrays (bfloat16 as float32). ``run`` keeps two names for itself,
all others go to the function: ``timeout`` (seconds, default 60) and ``expect_exit``.

**Every case starts clean**: ``paddle.seed``, numpy and ``random`` are seeded with 0, automatic names start over
(``linear_0.w_0``), default dtype, device, dynamic mode, gradient mode, ``FLAGS_*``, environment and working directory
(an empty one) are those of a new process, and warnings from ``paddle_group_sharded`` are errors. Inside a case,
``fresh(seed)`` does seeds and names again, so that a second model gets the names and values of the first. What stays
is what Paddle cannot take back: process groups, and the state of ``fleet.init``.

**A world size of 1** is one process without launch: no ``PADDLE_*`` variables, no default group.

**When a rank fails**, ``run`` raises ``RankFailure`` with the traceback, exit code or stacks and the output of
every rank. After one rank has raised or ended, the others get ``GRACE_SECONDS``; ranks that still run then, or when
``timeout`` has passed, show their Python stacks and are killed. The pool is started anew for the next case.

**Ranks that shall die**: ``run(..., expect_exit={1: -9})`` passes only if rank 1 ends with that code (negative:
signal) and all others return; the result of rank 1 is None. ``run_fresh`` takes the same arguments after the world
size and uses new trainers for this one case, for code that should meet a new process. (Environment variables that
Paddle or the C library read when they are loaded, such as ``FLAGS_*``, are those of the pytest process.)

**Nothing is left behind**: the trainers end with the fixture, at exit, and with a killed parent. Output goes to one
file per rank, never to the terminal. Everything listens on 127.0.0.1 except Paddle's own key-value store.
"""

from __future__ import annotations

from unittests.harness.case import fresh
from unittests.harness.pool import GRACE_SECONDS, RankPool, Ranks, run_fresh
from unittests.harness.report import RankFailure

__all__ = ["GRACE_SECONDS", "RankFailure", "RankPool", "Ranks", "fresh", "run_fresh"]
