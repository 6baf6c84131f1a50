"""Machine code that another user may have written, or put in its place, is launched through no door."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cubins import ARCH, CUBINS, MADE

from tiledsched.build import sealed
from tiledsched.build.sealed import is_usable, read_sealed
from tiledsched.build.store import ProgramStore, StoredProgram, read_program, write_program
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import make_private, others_may_change
from tiledsched.core.launches import signature, steps
from tiledsched.core.space_files import space_for
from tiledsched.kernels.softmax import Softmax
from tiledsched.serve import warmup
from tiledsched.serve.bundle import read_bundle, write_bundle
from tiledsched.serve.prebuilt import make_kernel

HERE, NOBODY = MADE["x86_64"], 65534
PROBLEM = Softmax.problem(rows=4096, columns=512)
SCHEDULE = space_for(ARCH, Softmax).default(PROBLEM)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder three folders deep, each private."""
    found = tmp_path / "home" / "shared" / "cache"
    monkeypatch.setenv("TILEDSCHED_CACHE", str(found))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    sealed.warn_once.cache_clear()
    return found


def served():
    """The kernel object of a launch, its signature and the file of its program."""
    (step,) = steps(Softmax, PROBLEM, SCHEDULE, arch_spec(ARCH))
    (kernel,) = make_kernel(Softmax, SCHEDULE, PROBLEM, load_settings(), arch_spec(ARCH))
    wanted = signature(Softmax, PROBLEM, SCHEDULE, step)
    return kernel, wanted, kernel.program_path(wanted)


def launched(monkeypatch) -> str:
    """Which machine code a launch would run: what lies on disk, or what is compiled now."""
    import cuda.tile as ct

    compiled = (b"compiled now", "softmax", None, ("more",))
    monkeypatch.setattr(ct.kernel, "_compile", lambda self, *given: compiled)
    monkeypatch.setattr("tiledsched.serve.prebuilt.host_of", lambda code: "")
    kernel, wanted, _ = served()
    return "compiled" if kernel._compile(wanted, None, (9, 0)) == compiled else "from disk"


DOORS = {
    "a launch": launched,
    "the store, of a schedule": lambda _: "from disk" if ProgramStore().get(ARCH, HERE.fingerprint) else "compiled",
    "the store, whether it is there": lambda _: (
        "from disk" if ProgramStore().has(ARCH, HERE.fingerprint) else "compiled"
    ),
    "a program": lambda _: "from disk" if read_program(served()[2]) else "compiled",
    "whether to compile": lambda _: "from disk" if is_usable(served()[2]) else "compiled",
    "warmup": lambda _: "from disk" if warmup._stored([served()[2]], ARCH) else "compiled",
    "any sealed file": lambda _: "from disk" if read_sealed(served()[2], StoredProgram) else "compiled",
}
PLACES = ("the file", "its folder", "the folder of all programs", "the cache", "a folder above", "the top")


def of_place(name: str, cache: Path, path: Path) -> Path:
    folders = [path, path.parent, cache / "programs", cache, cache.parent, cache.parent.parent]
    return folders[PLACES.index(name)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("door", DOORS)
def test_what_others_may_write_is_not_launched(door, place, cache, monkeypatch, caplog) -> None:
    path = served()[2]
    ProgramStore().put(HERE)
    write_program(path, StoredProgram(cubin=CUBINS["x86_64"], symbol="softmax"))
    if place in ("the file", "its folder"):
        path = ProgramStore().path(ARCH, HERE.fingerprint) if "the store" in door else path
    assert DOORS[door](monkeypatch) == "from disk"
    changed = of_place(place, cache, path)
    usual = changed.stat().st_mode
    for mode in (0o777, 0o775, 0o757):
        changed.chmod(mode)
        assert DOORS[door](monkeypatch) == "compiled", oct(mode)
        if place == "the top" and door != "a launch":
            changed.chmod(mode | 0o1000)  # as /tmp is: nobody renames what belongs to others
            assert DOORS[door](monkeypatch) == "from disk"
    changed.chmod(usual)
    if os.geteuid() == 0:
        os.chown(changed, NOBODY, -1)
        assert DOORS[door](monkeypatch) == "compiled"
        os.chown(changed, 0, -1)
    assert DOORS[door](monkeypatch) == "from disk"
    said = {each.getMessage() for each in caplog.records if "is not used" in each.getMessage()}
    assert all(str(changed) in each and "TILEDSCHED_CACHE" in each for each in said)
    assert bool(said) == (door not in ("the store, whether it is there", "whether to compile"))


@pytest.mark.parametrize("place", ["the cache", "a folder above"])
def test_tuning_says_at_once_that_it_cannot_keep_programs_there(place, cache) -> None:
    ProgramStore().ready()
    changed = of_place(place, cache, cache)
    changed.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"others may write {changed} \(mode 777\).*chmod go-w"):
        ProgramStore().ready()


def test_folders_of_programs_are_private_whatever_the_umask(tmp_path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        assert ProgramStore(tmp_path / "c").put(HERE) is None
    finally:
        os.umask(before)
    assert not others_may_change(tmp_path / "a" / "b")
    assert ProgramStore(tmp_path / "c").has(ARCH, HERE.fingerprint)


def test_a_link_is_judged_by_what_it_leads_to(cache, tmp_path) -> None:
    ProgramStore().put(HERE)
    (tmp_path / "link").symlink_to(cache)
    assert ProgramStore(tmp_path / "link").has(ARCH, HERE.fingerprint)
    cache.chmod(0o777)
    assert not ProgramStore(tmp_path / "link").has(ARCH, HERE.fingerprint)


def test_a_bundle_that_others_may_write_is_refused_whoever_owns_it(tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_bundle(folder / "b.zip", [], {}, [], {}, "a compiler")
    for changed, mode in ((folder / "b.zip", 0o666), (folder / "b.zip", 0o664), (folder, 0o777)):
        usual = changed.stat().st_mode
        changed.chmod(mode)
        with pytest.raises(ConfigError, match=rf"others may write {changed} \(mode {mode:o}\)"):
            read_bundle(folder / "b.zip")
        changed.chmod(usual)
    if os.geteuid() == 0:
        os.chown(folder / "b.zip", NOBODY, -1)  # the user named the file: its owner is trusted
    assert read_bundle(folder / "b.zip").programs == ()
