"""Other people's kernels in the interpreter, each within its own host code, against torch in float64.

TileGym's are run where it is installed (`make test` installs it); cuTile's samples where CUTILE_SAMPLES names their
folder: `git clone https://github.com/NVIDIA/cutile-python`, then CUTILE_SAMPLES=cutile-python/samples.
TILEDSCHED_WRITE_TABLES=1 writes docs/results/strangers.csv instead of comparing with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import pytest
from strangers import table

from tiledsched.interpreter import InterpreterError

CASES = [(package, group) for package, groups in table.GROUPS.items() for group in groups]
CUTILE_SAMPLES = os.environ.get("CUTILE_SAMPLES")
WRITE = os.environ.get("TILEDSCHED_WRITE_TABLES") == "1"


def folder_of(package: str) -> Path:
    """Where the package's kernels are; skips the test where they are not."""
    if package == "cutile-python":
        if not CUTILE_SAMPLES:
            pytest.skip("CUTILE_SAMPLES does not name the folder of cuTile's samples")
        return Path(CUTILE_SAMPLES)
    pytest.importorskip("torch")
    if importlib.util.find_spec("tilegym") is None:
        pytest.skip("TileGym is not installed")
    return Path(importlib.import_module("tilegym.ops.cutile").__file__).parent


def skip_other_versions(package: str, folder: Path) -> None:
    found = table.version_of(package, folder)
    written = {row["version"] for key, row in table.read_table().items() if key[0] == package}
    if written != {found}:
        pytest.skip(f"the table is of {package} {written}, here is {found}")


@pytest.mark.skipif(WRITE, reason="the table is being written")
@pytest.mark.parametrize(("package", "group"), CASES)
def test_strangers_kernels_do_as_the_table_says(package, group):
    folder = folder_of(package)
    skip_other_versions(package, folder)
    written = table.read_table()
    for row in table.rows_of(package, group, folder):
        want = dict(written[row["package"], row["file"], row["kernel"]])
        error, allowed = row.pop("largest_error"), want.pop("largest_error")
        assert row == want
        # Sums of another order differ in their last bits, and cases of few elements by all of those.
        assert not error or float(error) <= max(4 * float(allowed), 1e-6), row


@pytest.mark.parametrize("package", table.GROUPS)
def test_the_table_has_every_kernel(package):
    folder = folder_of(package)
    skip_other_versions(package, folder)
    found = table.kernels_in(folder, skip="templates")
    assert found == {key[1:] for key in table.read_table() if key[0] == package}


def test_nine_in_ten_run_and_agree_and_the_rest_says_why():
    rows = list(table.read_table().values())
    agreeing = [row for row in rows if row["runs"] == row["agrees"] == "yes"]
    assert len(agreeing) >= 0.9 * len(rows) > 0
    for row in rows:
        assert row["agrees"] == "yes" or row["lacking_operation"] or row["runs"] == "yes", row


@pytest.mark.skipif(not WRITE, reason="TILEDSCHED_WRITE_TABLES=1 writes docs/results/strangers.csv")
def test_write_the_table():
    rows = table.read_table() if table.TABLE.exists() else {}
    for package, groups in table.GROUPS.items():
        try:
            folder = folder_of(package)
        except pytest.skip.Exception:
            continue
        rows = {key: row for key, row in rows.items() if key[0] != package}
        for group in groups:
            for row in table.rows_of(package, group, folder):
                rows[row["package"], row["file"], row["kernel"]] = row
    table.write_table(rows.values())


def test_finds_what_strangers_missed():
    """A load outside its array, which a GPU answers with zeros: with more keys than columns, or a batch above one."""
    folder_of("tilegym")
    from strangers import tilegym_attention
    from strangers.stand_in import gpu_stand_in

    from tiledsched.interpreter import launches_on_cpu

    with launches_on_cpu(), gpu_stand_in():
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in tilegym_attention.inputs(128, 128))
        with pytest.raises(InterpreterError, match=r"_fmha_variant_kernel_nsbd.*K: .* lies entirely outside the array"):
            tilegym_attention.tilegym("attention_variant").fmha_variant_cutile(q, k, v, layout="nsbd")
