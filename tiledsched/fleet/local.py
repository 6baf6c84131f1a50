"""Workers for the GPUs of this host, from the leases alone: what a Slurm array, a Kubernetes job and a single host run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiledsched.build.pool import default_jobs
from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.fleet.campaign import Campaign
from tiledsched.fleet.clock import CLOCK, RETRY_S, Clock, retry_while_unavailable
from tiledsched.fleet.gpus import Gpu, gpus_here
from tiledsched.fleet.jobs import find_job
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.worker import POLL_S, STOP_S, Heart, Worker
from tiledsched.store.db import TuningDB


@dataclass(frozen=True, kw_only=True)
class Worked:
    """What the workers of one process did."""

    campaigns: tuple[str, ...]
    """Ids of those they worked on."""
    gpus: int
    """GPUs that took part."""
    notes: tuple[str, ...]
    """Why some of them stopped before the end; empty where all went on."""


def work(
    db: str,
    campaign: str | None = None,
    *,
    gpus: Sequence[Gpu] | None = None,
    without_gpu: int = 0,
    jobs: int | None = None,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda line: None,
    retry_s: float = RETRY_S,
    clock: Clock = CLOCK,
) -> Worked:
    """Work on campaigns with the GPUs of this host until nothing is left to do.

    Args:
        db: URL of the database that holds the leases.
        campaign: id of one; None for all that are running and can be worked on here, the oldest first.
        gpus: which; None for all that CUDA_VISIBLE_DEVICES leaves.
        without_gpu: so many workers that need none, in place of GPUs: they build and rank.
        jobs: compile processes of all together; None for one per CPU.
        wait_s: how long to wait for a campaign where none is running.
        stop: ends it, within ten seconds. Ctrl-C does, too.
        say: told what happens, a line each.
        retry_s: how long the database may be away.
        clock: by which all of it waits.

    Raises:
        ConfigError: there is no such campaign, or no GPU here.
        KeyboardInterrupt: after Ctrl-C, once everything is ended.
    """
    stop = stop or threading.Event()
    looked_at, done, notes, count = list[str](), list[str](), list[str](), 0
    refused: ConfigError | None = None
    with retry_while_unavailable(lambda: TuningDB.open(db), retry_s=retry_s, stop=stop, clock=clock) as opened:
        leases = Leases(opened, retry_s=retry_s, stop=stop, clock=clock)
        gives_up = clock.monotonic() + wait_s
        while not stop.is_set():
            found = [leases.campaign(campaign)] if campaign else leases.campaigns(running=True)[::-1]
            left = [each for each in found if each.id not in looked_at]
            if left:
                looked_at.append(left[0].id)
                try:
                    if leases.end(left[0].id) == "running":
                        here = gpus_here(find_job(left[0].job).gpus, without=without_gpu) if gpus is None else gpus
                        notes += work_on(leases, db, left[0], here, jobs=jobs, stop=stop, say=say)
                        count = max(count, len(here))
                    done.append(left[0].id)
                except ConfigError as error:  # another campaign may be for the GPUs that are here
                    if campaign:
                        raise
                    say(str(error))
                    refused = error
            elif done or clock.monotonic() >= gives_up:
                break
            else:
                clock.wait(min(5.0, max(0.0, gives_up - clock.monotonic())), stop)
    if refused is not None and not done:
        raise refused
    return Worked(campaigns=tuple(done), gpus=count, notes=tuple(notes))


def work_on(
    leases: Leases,
    db: str,
    campaign: Campaign,
    gpus: Sequence[Gpu],
    *,
    jobs: int | None,
    stop: threading.Event,
    say: Callable[[str], None],
) -> list[str]:
    """Work on one campaign, a thread for each GPU that it has something for; why some of them stopped early.

    Raises:
        ConfigError: there is none.
    """
    archs = leases.open_archs(campaign.id)
    mine = [gpu for gpu in gpus if gpu.archs(archs)]
    if not mine:
        has = ", ".join(sorted({gpu.arch for gpu in gpus})) or "none"
        raise ConfigError(
            f"campaign {campaign.id} is for {', '.join(sorted(archs)) or 'nothing more'}, and the GPUs here are {has}; "
            "start workers where such GPUs are, or see: tiledsched doctor"
        )
    each_jobs = max(1, (jobs or default_jobs()) // len(mine))
    workers = [Worker(leases, db, campaign, gpu, jobs=each_jobs, stop=stop, say=say) for gpu in mine]
    threads = [threading.Thread(target=_run, args=(worker,), daemon=True) for worker in workers]
    heart = Heart(leases, campaign, workers)
    try:
        for thread in (heart, *threads):
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(POLL_S)  # a signal that interrupts Thread.join makes Python 3.11 take the thread for ended
    except BaseException:
        stop.set()
        gives_up = time.monotonic() + STOP_S + 2.0
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, gives_up - time.monotonic()))
        raise
    finally:
        heart.end()
    return [f"{worker.gpu.name or worker.gpu.uuid}: {worker.note}" for worker in workers if worker.note]


def _run(worker: Worker) -> None:
    """A worker's thread. A GPU that is stuck beyond help, or a database that stays away, ends this worker and no other."""
    try:
        worker.run()
    except Exception as error:
        worker.note = worker.note or (
            str(error) if isinstance(error, MeasureError) else f"{type(error).__name__}: {error}"
        )
