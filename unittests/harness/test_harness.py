"""The harness itself: values, failures, time limits, deaths, clean starts, and that no process stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unittests.harness import RankFailure, RankPool, Ranks, run_fresh
from unittests.harness.environment import REPOSITORY, trainer_environment
from unittests.harness.ports import PortLease
from unittests.harness.report import Ended, Hung, Raised, Returned, failure_text
from unittests.harness.template import Template, TrainerJob

WORKER = "unittests.harness.dygraph_harness"


def alive(pid: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """The processes that are still alive after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def interrupt_now(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of two of this file's own: its tests break it on purpose."""
    with RankPool(2) as pool:
        yield pool


# -- values --------------------------------------------------------------------------------------------------------


def test_values_come_back_by_rank(pool: RankPool) -> None:
    by_rank = pool.run(WORKER, "identity", 10)
    assert [result["value"] for result in by_rank] == [10, 11]
    assert [result["size"] for result in by_rank] == [2, 2]
    assert [result["PADDLE_TRAINER_ID"] for result in by_rank] == ["0", "1"]
    assert [result["PADDLE_TRAINERS_NUM"] for result in by_rank] == ["2", "2"]
    assert [result["OMP_NUM_THREADS"] for result in by_rank] == ["1", "1"]
    assert len({result["PADDLE_CURRENT_ENDPOINT"] for result in by_rank}) == 2
    assert all(result["PADDLE_CURRENT_ENDPOINT"].startswith("127.0.0.1:") for result in by_rank)


def test_the_same_processes_run_the_next_case(pool: RankPool) -> None:
    pids = [result["pid"] for result in pool.run(WORKER, "identity", offset=0)]
    assert pids == [result["pid"] for result in pool.run(WORKER, "identity", offset=0)] == pool.pids


def test_collectives_work(pool: RankPool) -> None:
    for summed in pool.run(WORKER, "summed", shape=(2, 3)):
        np.testing.assert_array_equal(summed, np.full((2, 3), 3.0))


def test_tensors_arrive_as_arrays(pool: RankPool) -> None:
    result = pool.run(WORKER, "tensors")[1]
    assert result["half"][0].dtype == np.float32 and result["half"][0].tolist() == [0.5, 0.5]
    assert isinstance(result["pair"], tuple) and result["pair"][0].tolist() == [0, 1, 2] and result["pair"][1] is None


def test_one_rank_runs_without_launch() -> None:
    (result,) = run_fresh(1, WORKER, "identity", offset=0)
    assert (result["size"], result["PADDLE_TRAINER_ID"]) == (1, None)


# -- clean starts --------------------------------------------------------------------------------------------------


def test_names_and_seeds_start_over_in_every_case(pool: RankPool) -> None:
    first, second = pool.run(WORKER, "new_model"), pool.run(WORKER, "new_model")
    assert first == second
    assert first[0][0] == ["linear_0.w_0", "linear_0.b_0"]


def test_fresh_starts_over_within_a_case(pool: RankPool) -> None:
    first, second = pool.run(WORKER, "two_models")[0]
    assert first == second


def test_settings_start_over_in_every_case(pool: RankPool) -> None:
    pool.run(WORKER, "change_settings")
    assert pool.run(WORKER, "settings")[0] == {
        "dtype": "float32",
        "flag": False,
        "grad": True,
        "dynamic": True,
        "environment": None,
        "root": False,
    }


def test_warnings_of_the_package_are_errors(pool: RankPool) -> None:
    assert pool.run(WORKER, "warn") == [["paddle_group_sharded.api"]] * 2


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_traceback_and_the_output_reach_the_parent(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "raise_on", rank=1)
    text = str(failure.value)
    assert f"{WORKER}.raise_on failed on 2 rank(s)" in text
    assert "--- rank 0: returned" in text
    assert "--- rank 1: raised" in text
    assert "in raise_on" in text and "ValueError: rank 1 does not like this" in text
    assert "--- output of rank 1" in text and "about to fail or not, I am rank 1" in text


def test_output_of_earlier_cases_is_not_shown(pool: RankPool) -> None:
    pool.run(WORKER, "raise_on", rank=-1)
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "unpicklable")
    assert "about to fail or not" not in str(failure.value)


def test_others_get_a_short_grace_only(pool: RankPool) -> None:
    pool.run(WORKER, "summed", shape=(1,))
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "raise_on", rank=0, wait_on_others=True, timeout=50)
    assert time.monotonic() - start < 15
    assert "--- rank 0: raised" in str(failure.value)
    assert "--- rank 1: still running after" in str(failure.value) and "in raise_on" in str(failure.value)


def test_the_pool_is_new_and_works_after_a_failure(pool: RankPool) -> None:
    before = [result["pid"] for result in pool.run(WORKER, "identity", offset=0)]
    with pytest.raises(RankFailure):
        pool.run(WORKER, "raise_on", rank=0)
    assert wait_until_gone(before) == []
    assert [result["value"] for result in pool.run(WORKER, "identity", offset=5)] == [5, 6]


def test_a_value_that_cannot_be_pickled_is_the_rank_s_failure(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        pool.run(WORKER, "unpicklable")


def test_an_argument_that_cannot_be_pickled_is_the_caller_s_failure(pool: RankPool) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        pool.run(WORKER, "identity", offset=lambda: 0)


def test_sys_exit_is_shown_as_raised(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        pool.run(WORKER, "exit_python")


def test_a_missing_function_is_shown(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="no_such_function"):
        pool.run(WORKER, "no_such_function")


def test_a_rank_that_does_not_start_is_shown(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_id(rank: int, ports: list[int]) -> dict[str, str]:
        return trainer_environment(rank, ports) | {"PADDLE_TRAINERS_NUM": "two"}

    pool.close()
    with monkeypatch.context() as patch:
        patch.setattr("unittests.harness.rank.trainer_environment", without_id)
        with pytest.raises(RankFailure, match="(?s)the start of the trainers failed.*invalid literal.*two"):
            pool.run(WORKER, "identity", offset=0)
    assert pool.run(WORKER, "raise_on", rank=-1) == [0, 1]


def test_a_paddle_that_cannot_be_imported_is_shown(tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("raise ImportError('this is no Paddle')\n")
    environment = trainer_environment(0, [0])
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    template, (ours, theirs) = Template(environment, str(tmp_path)), multiprocessing.Pipe()
    with ours, theirs, pytest.raises(RankFailure, match="(?s)template of the trainers has ended.*this is no Paddle"):
        template.fork(TrainerJob(environment, str(tmp_path), str(tmp_path / "o"), str(tmp_path / "s")), theirs)
    template.close()


# -- time limits ---------------------------------------------------------------------------------------------------


def test_a_time_limit_shows_the_stacks_of_every_rank(pool: RankPool) -> None:
    pool.run(WORKER, "summed", shape=(1,))
    pids = pool.pids
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "hang", rank=1, timeout=2)
    rank_0, rank_1 = str(failure.value).split("--- rank 1: ")
    assert "still running after 2." in rank_0 and "in summed" in rank_0 and "in hang" in rank_0
    assert "still running after 2." in rank_1 and "in sleep_in_a_named_function" in rank_1
    assert wait_until_gone(pids) == []


# -- deaths --------------------------------------------------------------------------------------------------------


def test_an_unexpected_death_is_a_failure_with_its_signal(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "die", rank=1)
    assert "--- rank 1: ended by SIGKILL (exit code -9)" in str(failure.value)
    assert "these are my last words" in str(failure.value)


def test_a_crash_shows_where_it_happened(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(WORKER, "die", rank=0, by_signal=signal.SIGFPE)
    assert "--- rank 0: ended by SIGFPE" in str(failure.value) and "in die" in str(failure.value)


def test_an_expected_death_passes(pool: RankPool) -> None:
    assert pool.run(WORKER, "die", rank=1, expect_exit={1: -9}) == [0, None]
    assert run_fresh(2, WORKER, "exit_with", rank=0, code=3, expect_exit={0: 3}) == [None, 1]


@pytest.mark.parametrize("function, wrong", [("exit_with", "exit code 4"), ("raise_on", "raised")])
def test_another_end_than_the_expected_is_a_failure(pool: RankPool, function: str, wrong: str) -> None:
    arguments = {"code": 4} if function == "exit_with" else {}
    with pytest.raises(RankFailure, match=r"rank 1 \(expected: ended by SIGKILL \(exit code -9\)\): .*" + wrong):
        pool.run(WORKER, function, rank=1, expect_exit={1: -9}, **arguments)


def test_an_expected_death_that_does_not_come_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 \(expected: ended by SIGKILL \(exit code -9\)\): returned"):
        pool.run(WORKER, "die", rank=-1, expect_exit={1: -9})


def test_a_death_between_cases_is_told_and_repaired(pool: RankPool) -> None:
    pool.run(WORKER, "die_later", seconds=0.5)
    deadline = time.monotonic() + 10
    while any(rank.exit_code() is None for rank in pool._ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.warns(UserWarning, match="die_later: rank 0 ended with exit code 9, rank 1 ended with exit code 9"):
        assert pool.run(WORKER, "raise_on", rank=-1) == [0, 1]


# -- nothing is left behind ----------------------------------------------------------------------------------------


def test_close_ends_the_trainers_and_what_they_started() -> None:
    pool = RankPool(2)
    children = pool.run(WORKER, "start_a_child")
    pids, directory = pool.pids, pool._directory
    assert all(alive(pid) for pid in pids + children)
    pool.close()
    assert wait_until_gone(pids + children) == []
    assert directory is not None and not directory.exists()
    pool.close()


def test_an_interrupt_of_the_parent_ends_the_trainers(pool: RankPool) -> None:
    pool.run(WORKER, "raise_on", rank=-1)
    pids = pool.pids

    previous = signal.signal(signal.SIGALRM, interrupt_now)
    remaining = signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(WORKER, "hang", rank=1)
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *remaining)  # pytest-timeout uses the same timer
    assert wait_until_gone(pids) == []


def test_a_template_that_was_killed_is_replaced(pool: RankPool) -> None:
    pool.run(WORKER, "raise_on", rank=-1)
    pids, template = pool.pids, pool._ranks[0]._template
    template._process.kill()
    assert wait_until_gone(pids) == []
    with pytest.warns(UserWarning, match="rank 0 ended by SIGKILL"):
        assert pool.run(WORKER, "raise_on", rank=-1) == [0, 1]
    assert pool._ranks[0]._template is not template


def test_an_interrupted_request_ends_the_template_and_all_trainers(pool: RankPool) -> None:
    children = pool.run(WORKER, "start_a_child")
    pids, template = pool.pids, pool._ranks[0]._template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template._control, "recv", interrupt_now, raising=False)
        with pytest.raises(KeyboardInterrupt):
            template.exit_code(pids[0])
    assert wait_until_gone(pids + children) == []
    pool.close()
    assert pool.run(WORKER, "raise_on", rank=-1) == [0, 1]


def test_pools_share_a_template(pool: RankPool) -> None:
    pool.run(WORKER, "raise_on", rank=-1)
    with RankPool(1) as other:
        other.run(WORKER, "raise_on", rank=-1)
        assert other._ranks[0]._template is pool._ranks[1]._template


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the trainers end when they next read the pipe")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_a_parent_that_ends_takes_the_trainers_along(end: str) -> None:
    program = f"""
        import os, sys
        from unittests.harness import RankPool
        pool = RankPool(2)
        pool.run("{WORKER}", "raise_on", rank=-1)
        print(*pool.pids, flush=True)
        {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    parent = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=100)
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


# -- parts ---------------------------------------------------------------------------------------------------------


def test_ranks_keeps_one_pool_per_world_size() -> None:
    ranks = Ranks()
    assert ranks(2) is ranks(2)
    assert ranks(2) is not ranks(3)
    assert ranks(3).world_size == 3
    assert ranks(3).pids == []  # nothing starts before a case


def test_a_port_is_leased_once_and_can_be_listened_on() -> None:
    import socket

    first, second = PortLease(50), PortLease(50)
    try:
        assert len(set(first.ports) | set(second.ports)) == 100
        assert not second._take(first.ports[0])
        with socket.socket() as tcp:
            tcp.bind(("127.0.0.1", first.ports[0]))
    finally:
        first.release()
        second.release()


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        leases = iter([stranger.getsockname()[1]])

        class Unlucky(PortLease):
            def __init__(self, count: int) -> None:
                super().__init__(count)
                self.ports[0] = next(leases, self.ports[0])

        monkeypatch.setattr("unittests.harness.pool.PortLease", Unlucky)
        assert run_fresh(2, WORKER, "raise_on", rank=-1) == [0, 1]
        assert next(leases, None) is None


def test_a_failure_reads_well() -> None:
    outcomes = {0: Returned(1), 1: Raised("Traceback:\nValueError: x\n"), 2: Ended(-11), 3: Hung(2.04, "File a\n")}
    output = "\n".join(f"line {number}" for number in range(100))
    assert failure_text("m.f", outcomes, {0: -9}, {0: "", 2: output}).splitlines()[:10] == [
        "m.f failed on 4 rank(s)",
        "--- rank 0 (expected: ended by SIGKILL (exit code -9)): returned",
        "--- rank 1: raised",
        "Traceback:",
        "ValueError: x",
        "--- rank 2: ended by SIGSEGV (exit code -11)",
        "--- rank 3: still running after 2.0 s, killed; its stacks were",
        "File a",
        "--- output of rank 2 (last 80 of 100 lines)",
        "line 20",
    ]
