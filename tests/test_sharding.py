"""Attention of distributed tensors: what is split over ranks stays split, forward and backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
SPLIT = {"batch": "S(0)", "heads": "S(1)", "batch and features": "S(0)", "heads and features": "S(1)", "pages": "S(0)"}
"""How the outputs of cases are split. Those of the others are whole, because their inputs had to be gathered."""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.slow
def test_ranks_share_the_batch_or_the_heads_and_gather_anything_else(tmp_path) -> None:
    script = Path(__file__).with_name("sharded_attention.py")
    environment = os.environ | {"TILEDSCHED_DB": str(tmp_path / "none.db"), "TILEDSCHED_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, (placement, shape, errors) in found.items():
            assert placement == SPLIT.get(name, "R"), name
            assert shape == ([1, 6, 8, 16] if name == "three heads of keys" else [1, 2, 8, 16]), name
            assert max(errors.values()) < 5e-3, (name, errors)
            assert ("sinks" in errors) == ("features" in name)


def test_processes_without_distributed_tensors_do_not_import_them(monkeypatch) -> None:
    from tiledsched.ops import sharding

    monkeypatch.setattr(sharding, "_registered", [])
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    sharding.register()
    assert not sharding._registered
    assert "torch.distributed.tensor" not in sys.modules
