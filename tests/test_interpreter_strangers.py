"""Other people's kernels in the interpreter, each within its own host code, against torch in float64.

TileGym's are run where it is installed (`make test` installs it); cuTile's samples where CUTILE_SAMPLES names their
folder: `git clone https://github.com/NVIDIA/cutile-python`, then CUTILE_SAMPLES=cutile-python/samples.
WRITE_TABLES=1 writes docs/results/strangers.csv instead of comparing with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from strangers import table

from tiledsched.interpreter import InterpreterError, launches_on_cpu

CASES = [(package, group) for package, groups in table.GROUPS.items() for group in groups]
CUTILE_SAMPLES = os.environ.get("CUTILE_SAMPLES")
WRITE = os.environ.get("WRITE_TABLES") == "1"


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


@pytest.mark.skipif(not WRITE, reason="WRITE_TABLES=1 writes docs/results/strangers.csv")
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


def test_finds_a_load_outside_its_array():
    """TileGym's attention in another layout moves along the columns of K instead of along its keys."""
    folder_of("tilegym")
    from strangers.stand_in import gpu_stand_in
    from strangers.tilegym_attention import inputs, tilegym

    q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in inputs(128, 128))
    outside = r"_fmha_variant_kernel_nsbd.*K: the tile .* lies entirely outside the array"
    with launches_on_cpu(), gpu_stand_in(), pytest.raises(InterpreterError, match=outside):
        tilegym("attention_variant").fmha_variant_cutile(q, k, v, layout="nsbd")


def test_finds_rows_that_are_nan_where_products_are_fused():
    """TileGym's attention over a window has -1e30 for what a row does not see, and scales it. Where a row sees nothing of the first
    keys, the scaled number and what rounding takes from it are subtracted, which is far from zero if the product is fused."""
    folder_of("tilegym")
    from strangers import programs, tilegym_attention

    (window,) = (each for each in tilegym_attention.PROGRAMS if each.file == "experimental/swa_attention.py")
    assert programs.run(window).agrees
    assert programs.run(window, "fused").error == np.inf


def test_finds_blocks_that_load_outside_their_array():
    """A sample starts a block for every batch, though its first block has taken them all."""
    folder_of("cutile-python")
    import torch
    from strangers.samples import sample
    from strangers.stand_in import gpu_stand_in

    signal = torch.zeros(2, 256, dtype=torch.complex64)
    outside = r"fft_kernel, block \(1, 0, 0\): x_packed_in: the tile .* lies entirely outside the array"
    with launches_on_cpu(), gpu_stand_in(), pytest.raises(InterpreterError, match=outside):
        sample("FFT.py").cutile_fft(signal, (4, 8, 8))


def test_finds_undetermined_padding_that_is_used():
    """A masked key's value is multiplied by zero, which leaves what an unpadded load holds only where that is finite."""
    folder_of("tilegym")
    from strangers.programs import difference, plain
    from strangers.references import attention
    from strangers.stand_in import gpu_stand_in
    from strangers.tilegym_attention import inputs, tilegym

    q, k, v = inputs(128, 200)
    out = {}
    for held in ("nan", "zero"):
        with launches_on_cpu(undetermined=held), gpu_stand_in():
            out[held] = plain(tilegym("attention").tile_fmha(q, k, v, is_causal=False))
    assert np.isnan(out["nan"]).all()
    assert difference(out["zero"], plain(attention(q, k, v))) < 1e-3
