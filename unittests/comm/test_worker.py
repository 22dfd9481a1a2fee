"""The thread that runs operations in order."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import paddle
import pytest

from paddle_group_sharded.comm.worker import Worker


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_calls_run_in_order_in_one_other_thread() -> None:
    worker = Worker("order")
    seen: list[tuple[int, int]] = []
    tasks = [worker.submit(lambda index=index: seen.append((index, threading.get_ident()))) for index in range(100)]
    tasks[-1].wait()
    assert [index for index, _ in seen] == list(range(100))
    assert {ident for _, ident in seen} not in ({threading.get_ident()}, set())
    assert worker.close()


def test_results_and_errors_come_out_of_every_wait() -> None:
    worker = Worker("errors")
    good = worker.submit(lambda: 5)
    bad = worker.submit(lambda: [][1])
    after = worker.submit(lambda: 6)
    assert [good.wait(), good.wait(), after.wait()] == [5, 5, 6]
    for _ in range(2):
        with pytest.raises(IndexError) as caught:
            bad.wait()
        assert "<lambda>" in [entry.name for entry in caught.traceback], "the traceback shows where it happened"
    worker.close()


def test_close_lets_the_queue_run_dry() -> None:
    worker = Worker("close")
    seen: list[int] = []
    for index in range(5):
        worker.submit(lambda index=index: (time.sleep(0.02), seen.append(index)))
    assert worker.close()
    assert seen == [0, 1, 2, 3, 4]
    assert worker.close()


def test_close_gives_up_after_its_time() -> None:
    worker = Worker("slow")
    release = threading.Event()
    worker.submit(release.wait)
    assert not worker.close(0.1)
    release.set()
    assert worker.close(5)


def test_a_dropped_worker_ends_its_thread() -> None:
    worker = Worker("dropped")
    worker.submit(lambda: None).wait()
    assert threads("dropped") == 1
    del worker
    gc.collect()
    deadline = time.monotonic() + 5
    while threads("dropped") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads("dropped") == 0


def test_a_finished_call_is_let_go() -> None:
    class Held:
        def __call__(self) -> None:
            return None

    worker = Worker("held")
    call = Held()
    gone = weakref.ref(call)
    task = worker.submit(call)
    task.wait()
    worker.submit(lambda: None).wait()
    del call
    assert gone() is None
    worker.close()


def test_autograd_is_off_in_the_thread_only() -> None:
    worker = Worker("autograd")
    weight = paddle.ones([2])
    weight.stop_gradient = False
    assert worker.submit(lambda: (weight * 2).stop_gradient).wait()
    assert not (weight * 2).stop_gradient
    worker.close()
