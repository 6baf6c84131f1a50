"""Plan a campaign, and see it through with the GPUs of this host or of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import config, errors, problem, problem_lists, registry
from tiledsched.fleet import clock, local, status
from tiledsched.fleet.campaign import CampaignPlan, Limits
from tiledsched.fleet.gpus import gpus_here
from tiledsched.fleet.jobs import JOBS, find_job
from tiledsched.fleet.leases import Leases, expected
from tiledsched.store.db import TuningDB
from tiledsched.store.location import location


def plan(
    command: str,
    kernel: problem.KernelClass | str,
    problems: problem_lists.Cases | str | None,
    archs: Collection[str],
    *,
    options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    budget_s: float | None = None,
    by_arch: Mapping[str, Sequence[problem.Problem]] | None = None,
) -> CampaignPlan:
    """A campaign: each problem for each arch, those of most work first.

    Args:
        command: tune, record, refresh or bench; or `module:function`, a job of your own (see `tiledsched.fleet.jobs`).
        kernel: the class, or where it is declared.
        problems: problems, or values by name; the name of a suite; None for all suites.
        archs: e.g. sm_90 and sm_100.
        options: keyword arguments of the function of that name (`tiledsched.tune`, ...), as JSON has them.
        limits: how long it waits and how often it tries.
        budget_s: seconds after which nothing more is begun; None for no limit.
        by_arch: what is to be done for each arch, in this order, in place of `problems` and `archs`.

    Raises:
        ConfigError: there is no such command, or it has no such option.
    """
    kernel = registry.load_kernel(kernel)
    if command not in JOBS and ":" not in command:
        raise errors.ConfigError(f"a fleet does {', '.join(JOBS)}, not {command!r}; name one of them")
    given = {name: value for name, value in (options or {}).items() if value is not None}
    described = JOBS[command].options if command in JOBS else None
    if described is not None:
        given = described.from_mapping(given, command).to_json()
    return CampaignPlan(
        job=command,
        kernel=kernel.locator(),
        problems=by_arch or dict.fromkeys(archs, expected(problem_lists.problems_of(kernel, problems))),
        options=given,
        compiler=compiler_at_hand(),
        source_hash=kernel.source_hash(),
        budget_s=budget_s,
        **vars(limits or Limits()),
    )


def where(db: str | None) -> str:
    """The database of a fleet, as workers take it: by a flag, the environment or the user's own."""
    return location(db or config.load_settings().db)


def run(
    planned: CampaignPlan,
    *,
    db: str | None = None,
    ray_address: str | None = None,
    without_gpu: int = 0,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> status.FleetStatus:
    """Open a campaign, or one that is there again, and work until it ends. What could not be done is listed in what is returned.

    Args:
        planned: what :func:`plan` made.
        db: path or URL of the database; None for the user's.
        ray_address: of a Ray cluster; None for the GPUs of this host.
        without_gpu: so many workers (on each node) that need no GPU, in place of those that do.
        jobs: compile processes of this host, or of each actor; None for one per CPU of each host.
        say: told what happens, a line each.

    Raises:
        TiledschedError: there is no GPU here, no cluster, or the database stays away.
        KeyboardInterrupt: after Ctrl-C, once everything is ended; what was done is stored, and the same plan goes on.
    """
    url = where(db)
    registry.allow(
        planned.kernel, *filter(None, [planned.options.get("sampler")])
    )  # the user named them: the database's row may
    with clock.retry_while_unavailable(lambda: TuningDB.open(url)) as opened:
        leases = Leases(opened)
        campaign = leases.open(planned)
        say(f"campaign {campaign.id}: see it with: tiledsched fleet status {campaign.id}")
        worked = local.Worked(campaigns=(), gpus=0, notes=())
        if leases.end(campaign.id) == "running":
            if ray_address is not None:
                from tiledsched.fleet.on_ray import run_on_ray

                worked = run_on_ray(url, campaign.id, address=ray_address, without_gpu=without_gpu, jobs=jobs, say=say)
            else:
                gpus = gpus_here(find_job(campaign.job).gpus, without=without_gpu)
                worked = local.work(url, campaign.id, gpus=gpus, jobs=jobs, say=say)
                _give_up(leases, campaign.id, worked, gpus={gpu.arch for gpu in gpus})
        for note in worked.notes:
            say(note)
        return status.read_status(leases, campaign.id)


def _give_up(leases: Leases, campaign_id: str, worked: local.Worked, *, gpus: Collection[str]) -> None:
    """What is left when every worker here has ended, and no other works on it, could not be done: say so, and end."""
    others = [each for each in status.read_status(leases, campaign_id).workers if each.state in ("working", "idle")]
    if leases.end(campaign_id) == "running" and not others:
        why = (
            "; ".join(dict.fromkeys(worked.notes))
            or f"no GPU of its arch took part (here: {', '.join(sorted(gpus)) or 'none'})"
        )
        leases.end(campaign_id, why=why)
