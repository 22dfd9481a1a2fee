"""A thread that runs what it is given, in order: how operations overlap with computing on a backend that blocks."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any, Callable, Optional

import paddle

__all__ = ["Task", "Worker"]


class Task:
    """A call handed to a :class:`Worker`; what :class:`~.base.Work` describes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Optional[Callable[[], Any]] = call  # dropped when done, and with it the tensors it holds
        self._result: Any = None
        self._error: Optional[BaseException] = None
        self._done = threading.Lock()  # held until done: one lock is lighter than an Event
        self._done.acquire()

    def wait(self) -> Any:
        """Block until the call has run; return its result, or raise what it raised."""
        with self._done:
            if self._error is not None:
                raise self._error
            return self._result

    def run(self) -> threading.Lock:
        """Run the call, in the worker's thread; whoever waits goes on when the lock is released that this returns."""
        call, self._call = self._call, None
        try:
            self._result = call() if call is not None else None
        except BaseException as error:
            self._error = error
        return self._done


class Worker:
    """One daemon thread, first in, first out, without autograd.  It ends with :meth:`close` or with its owner."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Optional[Task]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._tasks)

    def submit(self, call: Callable[[], Any]) -> Task:
        """Queue ``call``; it runs after all that were queued before."""
        task = Task(call)
        self._tasks.put(task)
        return task

    def close(self, seconds: Optional[float] = None) -> bool:
        """Let the queue run dry and end the thread; ``False`` if it still runs after ``seconds``."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


def _serve(tasks: queue.SimpleQueue[Optional[Task]]) -> None:
    with paddle.no_grad():  # the switch is per thread
        while True:
            task = tasks.get()
            if task is None:
                return
            done = task.run()
            del task  # from here on the tensors of the call and of its result are the waiter's alone
            done.release()


def _stop(tasks: queue.SimpleQueue[Optional[Task]]) -> None:
    tasks.put(None)
