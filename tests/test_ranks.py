"""The same choice everywhere: what decides it, what a rank that differs is told, and bundles named by their contents."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from store_samples import DEVICE, FAILURE, TOOLCHAIN, build, entry

import tiledsched as ts
from tiledsched.core.errors import ConfigError
from tiledsched.fleet.campaign import CampaignPlan, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.kernels.softmax import Softmax
from tiledsched.serve.bundle import write_bundle
from tiledsched.serve.ranks import choice_digest, differ
from tiledsched.store.db import TuningDB


def test_the_digest_changes_with_what_would_be_served_and_with_nothing_else(home, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.serve.entries.compiler_at_hand", lambda: TOOLCHAIN.tileiras)
    first = choice_digest()
    with TuningDB.open(home / "tuning.db") as db:
        assert choice_digest() == first
        db.put_entry(entry("modelled", device_name=DEVICE.name))
    second = choice_digest()
    assert second != first
    with TuningDB.open(home / "tuning.db") as db:
        db.record_builds([build()])
        assert choice_digest() == second
        db.record_builds([build(FAILURE)])
    second, before = choice_digest(), second
    assert second != before  # a program that is known not to build is passed over
    with ts.configure(regime="sustained"):
        assert choice_digest() not in (first, second)
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(home / "b.zip"))
    write_bundle(home / "b.zip", [], {}, [], {}, "a compiler")
    third = choice_digest()
    assert third not in (first, second)
    write_bundle(home / "b.zip", [], {}, [], {}, "another compiler")
    assert choice_digest() != third


def test_ranks_that_differ_are_named(home, monkeypatch) -> None:
    differ(["a", "a", "a"])
    with pytest.raises(ConfigError, match=r"1 differ from the other 3; .*TILEDSCHED_BUNDLE"):
        differ(["a", "b", "a", "a"])
    asked = []

    def gather(found, mine, group):
        asked.append(group)
        found[:] = [mine, "another", mine]

    torch = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: bool(asked) or alone[0],
        get_world_size=lambda group: 3,
        all_gather_object=gather,
    )
    alone = [False]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=torch))
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    assert ts.check_ranks() == choice_digest()
    assert asked == []  # no process group: nobody is asked
    alone[0] = True
    with pytest.raises(ConfigError, match="1 differ from the other 2"):
        ts.check_ranks(group="mine")
    assert asked == ["mine"]


@pytest.mark.compiler
@pytest.mark.slow
def test_a_campaigns_bundle_is_named_by_its_contents(home, cli) -> None:
    problems = [Softmax.problem(rows=64, columns=columns) for columns in (64, 128)]
    cli("tune softmax --arch sm_90 --problem rows=64,columns=64:128 --runner none --trials 1")
    with TuningDB.open(home / "tuning.db") as db:
        leases = Leases(db)
        campaign = leases.open(CampaignPlan(job="tune", kernel=Softmax.locator(), problems={"sm_90": problems}))
        worker = leases.join(campaign.id, hostname="here", pid=1, gpu="GPU", device_name="", arch="sm_90")
        leases.finish(leases.take(campaign, worker, ["sm_90"]), Outcome.DONE, result={})
    names = []
    for folder in ("one", "two"):
        (home / folder).mkdir()
        words = f"warmup softmax --arch sm_90 --campaign {campaign.id[:8]} --json".split()
        (made,) = cli([*words, "--out", str(home / folder)]).json["bundles"]
        assert made["problems"] == 1  # of two, the one that was done
        names += [path.name for path in (home / folder).iterdir()]
    assert len(names) == 2
    assert names[0] == names[1]
    assert names[0].startswith("softmax-sm_90-")
