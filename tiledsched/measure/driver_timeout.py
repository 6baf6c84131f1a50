"""Questions to the driver, with a deadline: that of a GPU that is stuck may never answer."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from typing import Any, TypeVar

from tiledsched.core.errors import MeasureError

T = TypeVar("T")
LISTED_S = 60.0
"""How long the list of GPUs is waited for, which may load the driver."""
READ_S = 10.0
"""How long a reading is waited for: it takes a millisecond."""


class Asker:
    """Asks in a thread of its own, one for all questions: handing one over costs less than the driver takes to answer.

    A process that others watch and may kill needs none: see `unwatched`.
    """

    def __init__(self) -> None:
        self.about = ""
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unanswered: Future[Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, question: Callable[[], T], within_s: float) -> T:
        """The answer, or what is raised instead.

        Raises:
            MeasureError: there is none in time, or an earlier question is still unanswered; the message names the GPU.
        """
        answer: Future[T] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # the latter after a fork
                self._thread = threading.Thread(target=self._answer, daemon=True)
                self._thread.start()
            stuck = self._unanswered is not None and not self._unanswered.done()
        if not stuck:
            self._questions.put((question, answer))
            try:
                return answer.result(within_s)
            except NotDoneError:
                self._unanswered = answer
        raise MeasureError(
            f"{self.about or 'a GPU'} of {socket.gethostname()} does not answer its driver (NVML) within {within_s:g} s: it is "
            "stuck; see what nvidia-smi says of it, have an administrator reset it (nvidia-smi --gpu-reset) or restart the "
            "machine, or go on with another: CUDA_VISIBLE_DEVICES with its UUID"
        )

    def _answer(self) -> None:
        while True:
            question, answer = self._questions.get()
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)


asked = Asker()
"""This process's."""


def unwatched(question: Callable[[], T], within_s: float) -> T:
    """Asks as :class:`Asker` does, without a deadline: for a process that is killed where it does not answer."""
    del within_s
    return question()
