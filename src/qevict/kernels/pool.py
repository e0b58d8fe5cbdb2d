"""Threads that wait for shares of the kernel's work. Numba's own loads a second OpenMP beside torch's, which spins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Task = Callable[[], None]


class Pool:
    """Runs tasks side by side; any number of threads may call it, and the pool grows to the most asked for.

    A forked process begins with no threads, so it makes its own.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._tasks: SimpleQueue[tuple[Task, SimpleQueue[BaseException | None]]] = SimpleQueue()
        self._threads = 0
        self._growing = threading.Lock()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, the first in the calling thread, and return when all are done."""
        with self._growing:
            for _ in range(self._threads, len(tasks) - 1):
                threading.Thread(target=self._work, args=(self._tasks,), name="qevict", daemon=True).start()
                self._threads += 1
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for task in tasks[1:]:
            self._tasks.put((task, done))
        tasks[0]()
        for error in [done.get() for _ in tasks[1:]]:
            if error is not None:
                raise error

    @staticmethod
    def _work(tasks: SimpleQueue[tuple[Task, SimpleQueue[BaseException | None]]]) -> None:
        while True:
            task, done = tasks.get()
            try:
                task()
            except BaseException as error:  # it is raised where the work was asked for
                done.put(error)
            else:
                done.put(None)
