"""The study that trains a GPT under several attentions, on a CPU where torch computes them all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


from docs.studies import gpt
from tiledsched import configure

SHAPE = gpt.Shape(layers=1, heads=2, width=16, context=8, vocabulary=32)


def trained(methods, steps=3, **more):
    runs = [gpt.start(name, gpt.METHODS[name], SHAPE, "cpu", 0) for name in methods]
    data = gpt.tokens(SHAPE, 2, steps)
    taken = gpt.take_turns(runs, data, 2, "cpu", **more)
    return runs, taken


def test_methods_take_turns_and_equal_ones_have_equal_bits(quiet) -> None:
    runs, taken = trained(["ours", "ours-deterministic", "ours-deterministic-again"])
    assert taken == 3
    assert [len(run.losses) for run in runs] == [3, 3, 3]
    assert [len(run.block_ms) for run in runs] == [2, 2, 2]
    assert gpt.same_bits(runs) is True
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.no_grad():
        next(runs[-1].model.parameters()).view(-1)[0] += 1e-3
    assert gpt.same_bits(runs) is False
    assert gpt.same_bits(runs[:2]) is None
    rows = gpt.summarise(runs, "tiny", 2, "cpu")
    assert [row.distance for row in rows] == [0.0, 0.0, 0.0]
    assert "DIFFER" in gpt.to_text(rows, (0.0, 0.0), same=False)


def test_the_command_writes_rows_and_losses(quiet, tmp_path, capsys) -> None:
    rows, losses = tmp_path / "rows.csv", tmp_path / "losses.csv"
    with configure(fallback="torch"):
        code = gpt.main(
            f"--shape tiny --device cpu --methods ours --steps 1 --batch 1 --csv {rows} --losses {losses}".split()
        )
    assert code == 0
    assert rows.read_text().splitlines()[1].startswith("ours,tiny,1,1,6.")
    assert losses.read_text().startswith("step,ours\n0,6.")
    assert "loss of the first step 6." in capsys.readouterr().out


def test_a_compiled_model_is_compared_with_torchs_compiled_model() -> None:
    times = {"cudnn": [9.0, 4.0], "cudnn-compiled": [9.0, 2.0], "ours": [9.0, 5.0], "ours-compiled": [9.0, 4.0]}
    runs = [
        gpt.Run(
            name=name,
            method=gpt.METHODS[name],
            model=torch.nn.Identity(),
            step=lambda *given: given[0],
            optimizer=None,
            losses=[torch.zeros(())],
            block_ms=block_ms,
        )
        for name, block_ms in times.items()
    ]
    ratios = {row.method: row.ratio for row in gpt.summarise(runs, "tiny", 2, "cpu")}
    assert ratios == {"cudnn": 1.0, "cudnn-compiled": 1.0, "ours": 0.8, "ours-compiled": 0.5}
