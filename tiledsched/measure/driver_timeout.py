"""Questions to the driver, with a deadline: that of a GPU that is stuck may never answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as NotDoneError
from typing import Any, TypeVar

from tiledsched.core.errors import MeasureError

T = TypeVar("T")
LISTED_S = 60.0
"""How long the list of GPUs is waited for, which may load the driver."""
READ_S = 10.0
"""How long a reading is waited for: it takes a millisecond."""


class Asker:
    """Asks each question in a thread of its own, and gives up on one that is not answered in time.

    A process that others watch and may kill needs none: see `unwatched`.
    """

    def __init__(self) -> None:
        self.about = ""
        self._unanswered: Future[Any] | None = None

    def __call__(self, question: Callable[[], T], within_s: float) -> T:
        """The answer, or what is raised instead.

        Raises:
            MeasureError: there is none in time, or an earlier question is still unanswered; the message names the GPU.
        """
        if self._unanswered is None or self._unanswered.done():
            answer: Future[T] = Future()
            threading.Thread(target=_answer, args=(question, answer), daemon=True).start()
            try:
                return answer.result(within_s)
            except NotDoneError:
                self._unanswered = answer
        raise MeasureError(
            f"{self.about or 'a GPU'} of {socket.gethostname()} does not answer its driver (NVML) within {within_s:g} s: it is "
            "stuck; see what nvidia-smi says of it, have an administrator reset it (nvidia-smi --gpu-reset) or restart the "
            "machine, or go on with another: CUDA_VISIBLE_DEVICES with its UUID"
        )


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
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
