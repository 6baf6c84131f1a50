"""Builds on the CPUs of all hosts of a Ray cluster, shared through its object store: what is wanted twice is built once."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.pool import BuildPool
from tiledsched.core.errors import ConfigError, Failure, FailureKind, NoRoomError
from tiledsched.core.extras import installing

MOST_BUILDS = 20_000
"""Builds that are kept in the object store: about a gigabyte. Older ones are in the hosts' cache folders."""
BUILD_TRIES = 3
"""How often a build is begun whose host is lost, or has no room for it."""


def ray_module() -> Any:
    """Ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"a fleet on Ray needs Ray ({error}); run: {installing('fleet')}, or use the GPUs of this host without "
            "--ray-address"
        ) from None
    return ray


@functools.cache
def compile_process() -> BuildPool:
    """The compile process of a process of Ray's, which both stay for the next build."""
    return BuildPool(1)


def build_here(task: BuildTask) -> Built:
    """One build, as a task of Ray's; what hangs or crashes is killed and returned as a failure."""
    (built,) = compile_process().build([task])
    return built


class BuildDirectory:
    """Knows where Ray keeps each build: what is wanted twice is built once.

    It hands out references; the machine code goes from host to host through the object store.
    """

    def __init__(self) -> None:
        self._placed: OrderedDict[str, Any] = OrderedDict()

    def place(self, key: str, task: BuildTask, again: bool) -> list[Any]:
        """The reference of a build, in a list so that nobody waits for it here; of a new one where it is to be made again."""
        if again:
            self._placed.pop(key, None)
        if key not in self._placed:
            build = ray_module().remote(build_here)
            options = {"num_cpus": 1, "max_retries": 0, "scheduling_strategy": "SPREAD"}
            self._placed[key] = build.options(**options).remote(task)
            while len(self._placed) > MOST_BUILDS:
                self._placed.popitem(last=False)
        self._placed.move_to_end(key)
        return [self._placed[key]]


def open_directory() -> Any:
    """The one of a cluster. Where its host is lost it begins anew elsewhere, and calls wait for it: all builds go through it."""
    anew = {"max_restarts": -1, "max_task_retries": -1}
    return ray_module().remote(BuildDirectory).options(num_cpus=0, **anew).remote()


class RayBuilds:
    """What a worker has built by the cluster. Each of its builds has a number, by which its outcome is known."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._waiting: dict[Any, tuple[int, str, BuildTask, int]] = {}

    def submit(self, number: int, key: str, task: BuildTask, tries: int = 0) -> None:
        """Have a task built; tasks with the same key are the same build."""
        self._waiting[self._directory.place.remote(key, task, tries > 0)] = number, key, task, tries

    def finished(self) -> list[tuple[int, Built | NoRoomError]]:
        """What is done since the last call. A build whose host was lost, or is full, is begun again."""
        ray = ray_module()
        done: list[tuple[int, Built | NoRoomError]] = []
        for reference in _ready(ray, self._waiting):
            number, key, task, tries = asked = self._waiting.pop(reference)
            try:
                found = ray.get(reference)
            except ray.exceptions.RayError as error:
                if tries + 1 < BUILD_TRIES:
                    self.submit(number, key, task, tries + 1)
                else:
                    done.append((number, _given_up(task, error)))
                continue
            if isinstance(found, list):  # it is placed: now it is waited for
                self._waiting[found[0]] = asked
            else:
                done.append((number, found))
        return done


def _given_up(task: BuildTask, error: Exception) -> Built | NoRoomError:
    if isinstance(error, NoRoomError):  # Ray's error is the one of the task, too
        return NoRoomError(str(getattr(error, "cause", error)))
    message = f"its host was lost {BUILD_TRIES} times: {type(error).__name__}"
    failure = Failure(kind=FailureKind.COMPILER_KILLED, message=message)
    return Built(task=task, artifact=None, failure=failure, seconds=0.0)


def _ready(ray: Any, references: dict[Any, Any]) -> list[Any]:
    return list(ray.wait(list(references), num_returns=len(references), timeout=0)[0]) if references else []


def on_node(node: str) -> Any:
    """Ray's word for: there, or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)
