"""Builds on the CPUs of all hosts of a Ray cluster, shared through its object store: what is wanted twice is built once."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from tiledsched.build.compiler import BuildTask, Built
from tiledsched.core.errors import ConfigError, Failure, FailureKind, NoRoomError
from tiledsched.core.extras import installing

LOOK_EVERY_S = 2.0
"""Between two looks at the nodes."""
MOST_BUILDS = 20_000
"""Builds that are kept in the object store: about a gigabyte. Older ones are in the hosts' cache folders."""
BUILD_TRIES = 3
"""Hosts that a build is sent to, where they are lost."""


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


class BuildHost:
    """The compile processes of one host."""

    def __init__(self, jobs: int) -> None:
        from tiledsched.build.pool import BuildPool

        self._pool = BuildPool(jobs)

    async def build(self, task: BuildTask) -> Built:
        """One build; what hangs or crashes is killed and returned as a failure."""
        import asyncio

        return await asyncio.wrap_future(self._pool.submit(task))


class BuildDirectory:
    """Knows which host does which build: what is wanted twice is built once.

    It hands out references; the machine code goes from host to host through the object store.
    """

    def __init__(self) -> None:
        self._placed: OrderedDict[str, tuple[Any, str]] = OrderedDict()
        self._hosts: dict[str, tuple[Any, int]] = {}
        self._turn: dict[str, float] = {}
        self._looked_s = 0.0
        self.started = 0

    def place(self, key: str, task: BuildTask, lost: bool) -> list[Any]:
        """The reference of a build, in a list so that nobody waits for it here; with `lost`, of a new one, on another host."""
        _, but = self._placed.pop(key, (None, "")) if lost else (None, "")
        if key not in self._placed:
            self.started += 1
            node = self._next_node(but)
            self._placed[key] = self._hosts[node][0].build.remote(task), node
            while len(self._placed) > MOST_BUILDS:
                self._placed.popitem(last=False)
        self._placed.move_to_end(key)
        return [self._placed[key][0]]

    def count(self) -> int:
        """Builds that were started."""
        return self.started

    def _next_node(self, but: str) -> str:
        """The host that had the fewest builds for its CPUs; another than `but`, where there is one."""
        ray = ray_module()
        if not self._hosts or time.monotonic() - self._looked_s > LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            alive = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
            self._hosts = {node: host for node, host in self._hosts.items() if node in alive}
            for node, cpus in alive.items():
                if cpus and node not in self._hosts:
                    host = ray.remote(BuildHost).options(num_cpus=0, scheduling_strategy=on_node(node)).remote(cpus)
                    self._hosts[node] = host, cpus
                    self._turn[node] = min(self._turn.values(), default=0.0)
        node = min(self._hosts, key=lambda each: (each == but, self._turn[each]))
        self._turn[node] += 1.0 / self._hosts[node][1]
        return node


def open_directory() -> Any:
    """The one of a cluster. Where its host is lost it begins anew elsewhere, and calls wait for it: all builds go through it."""
    anew = {"max_restarts": -1, "max_task_retries": -1}
    return ray_module().remote(BuildDirectory).options(num_cpus=0, **anew).remote()


class RayBuilds:
    """What a worker has built by the cluster, see :class:`tiledsched.fleet.worker.Builds`."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._asked: dict[Any, tuple[int, str, BuildTask, int]] = {}
        self._building: dict[Any, tuple[int, str, BuildTask, int]] = {}

    def submit(self, number: int, key: str, task: BuildTask, tries: int = 0) -> None:
        """Ask for it."""
        self._asked[self._directory.place.remote(key, task, tries > 0)] = number, key, task, tries

    def finished(self) -> list[tuple[int, Built | NoRoomError]]:
        """What is done since the last question. A build whose host was lost, or is full, is sent to another."""
        ray = ray_module()
        for reference in _ready(ray, self._asked):
            what = self._asked.pop(reference)
            try:
                (building,) = ray.get(reference)
                self._building[building] = what
            except ray.exceptions.RayError as error:
                self._again(what, error)
        done: list[tuple[int, Built | NoRoomError]] = []
        for reference in _ready(ray, self._building):
            number, key, task, tries = what = self._building.pop(reference)
            try:
                done.append((number, ray.get(reference)))
            except ray.exceptions.RayError as error:
                if tries + 1 < BUILD_TRIES:
                    self.submit(number, key, task, tries + 1)
                elif isinstance(error, NoRoomError):  # Ray's error is the one of the task, too
                    done.append((number, NoRoomError(str(getattr(error, "cause", error)))))
                else:
                    done.append((number, _lost(task, error)))
        return done

    def _again(self, what: tuple[int, str, BuildTask, int], error: Exception) -> None:
        number, key, task, tries = what
        if tries + 1 >= BUILD_TRIES:
            raise error
        self.submit(number, key, task, tries + 1)


def _lost(task: BuildTask, error: Exception) -> Built:
    message = f"its host was lost {BUILD_TRIES} times: {type(error).__name__}"
    return Built(
        task=task, artifact=None, failure=Failure(kind=FailureKind.COMPILER_KILLED, message=message), seconds=0.0
    )


def _ready(ray: Any, references: dict[Any, Any]) -> list[Any]:
    return list(ray.wait(list(references), num_returns=len(references), timeout=0)[0]) if references else []


def on_node(node: str) -> Any:
    """Ray's word for: there, or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)
