"""What FlashInfer's tuner chooses for its cuTile mixtures of experts is stored and answered.

Where FlashInfer is installed (`pip install flashinfer-python`), its own tuner and runner are used. Elsewhere a stand-in has the
methods, and keeps the tables, that `flashinfer/autotuner/autotuner.py` of flashinfer-python 0.7.4 has. Times are made up, and nothing
is launched: no GPU is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from importlib import util
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from fake_machine import H200, FakeMachine

import tiledsched
from tiledsched.cli import main
from tiledsched.remember import machine as machines
from tiledsched.store.db import TuningDB

TUNER = "flashinfer:AutoTuner"
POLICY = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
X = torch.zeros(4, 8)


@dataclasses.dataclass(frozen=True)
class Key:
    custom_op: str
    runner_class_name: str
    nearest_profile: tuple
    extras: tuple

    @property
    def file_key(self):
        return str(dataclasses.astuple(self))


class AutoTuner:
    """FlashInfer's, without GPU, with one profile for each operation."""

    def __init__(self):
        self.is_tuning_mode, self.winners, self._file_configs, self._file_config_policies = False, {}, {}, {}

    @staticmethod
    def _profiling_policy(tuning_config):
        return tuning_config.policy

    def search_cache(
        self,
        custom_op,
        runners,
        input_shapes,
        tuning_config,
        inputs=None,
        *,
        require_profiling_policy=False,
        validation_profile=None,
    ):
        for place, runner in enumerate(runners):
            key = Key(custom_op, type(runner).__name__, input_shapes, runner.get_cache_key_extras(inputs))
            other = self._file_config_policies.get(key.file_key) != self._profiling_policy(tuning_config)
            name, tactic = self._file_configs.get(key.file_key, ("", None))
            if key in self.winners:
                return True, place, self.winners[key], None
            if name == type(runner).__name__ and not (self.is_tuning_mode and other):
                return True, place, tactic, None
        return False, 0, -1, None

    def choose_one(self, custom_op, runners, tuning_config, inputs):
        shapes = tuple(tuple(each.shape) for each in inputs)
        found = self.search_cache(custom_op, runners, shapes, tuning_config, inputs=inputs)
        if found[0] or not self.is_tuning_mode:
            return runners[found[1]], found[2]
        times = {t: self._profile_single_kernel(runners[0], inputs, t) for t in runners[0].get_valid_tactics(inputs, 0)}
        tactic, name = min(times, key=times.get), type(runners[0]).__name__
        key = Key(custom_op, name, shapes, runners[0].get_cache_key_extras(inputs))
        selection = {"time_ms": times[tactic], "candidates": len(times)}
        self._cache_profile_result(key, None, tuning_config, tactic, selection)
        return runners[0], tactic

    def _cache_profile_result(self, key, profile, tuning_config, tactic, selection):
        self.winners[key] = tactic


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """FlashInfer's modules, or those that stand in for them; and what was timed."""
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda *device: False)
    monkeypatch.setattr(machines, "machine", FakeMachine())
    if util.find_spec("flashinfer") is None:
        package, tuning = ModuleType("flashinfer"), ModuleType("flashinfer.autotuner")
        package.__version__, package.__file__ = "0.7.4", str(tmp_path / "flashinfer" / "__init__.py")
        package.autotuner, tuning.AutoTuner, tuning.TunableRunner = tuning, AutoTuner, object
        tuning.TuningConfig = lambda: SimpleNamespace(policy=POLICY)
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.autotuner", tuning)
    import flashinfer.autotuner

    flashinfer.timed = []
    timed = lambda self, runner, inputs, tactic, *given, **more: flashinfer.timed.append(tactic) or tactic[0] / 1e3  # noqa: E731
    monkeypatch.setattr(flashinfer.autotuner.AutoTuner, "_profile_single_kernel", timed, raising=False)
    return flashinfer


def runner_of(flashinfer, name="CuTileBf16Runner", extras=(), tactics=((64, 64, 64, 1), (32, 128, 64, 2))):
    """A runner of this name with these tactics, of which the one with the smallest tile is fastest."""
    methods = {
        "get_valid_tactics": lambda self, inputs, profile: list(tactics),
        "forward": lambda self, inputs, tactic=-1, do_preparation=False, **more: inputs[0],
        "get_cache_key_extras": lambda self, inputs: extras,
    }
    return type(name, (flashinfer.autotuner.TunableRunner,), methods)()


@contextlib.contextmanager
def tuning(tuner):
    """FlashInfer's `autotune(True)`."""
    tuner.is_tuning_mode = True
    yield
    tuner.is_tuning_mode = False


def choose(flashinfer, runner, *, tune=True, inputs=(X,), config=None):
    """The tactic that a tuner of a new process chooses, and how many were timed for it."""
    before, tuner = len(flashinfer.timed), flashinfer.autotuner.AutoTuner()
    with tiledsched.remember(), tuning(tuner) if tune else contextlib.nullcontext():
        config = config or flashinfer.autotuner.TuningConfig()
        tactic = tuner.choose_one("moe_cutile_bf16", [runner], config, list(inputs))[1]
    return tactic, len(flashinfer.timed) - before


def test_a_choice_is_stored_and_answered_in_every_process(flashinfer, capsys):
    runner = runner_of(flashinfer, extras=("cutile_bf16", 90, None, 3.5, "SwiGLU(alpha=1.0)"))
    assert choose(flashinfer, runner, tune=False) == (-1, 0)
    assert choose(flashinfer, runner) == ((32, 128, 64, 2), 2)
    assert choose(flashinfer, runner) == choose(flashinfer, runner, tune=False) == ((32, 128, 64, 2), 0)
    assert choose(flashinfer, runner, inputs=[X[:2]]) == ((32, 128, 64, 2), 2)
    with TuningDB.open() as db:
        assert [each.median_us for each in db.entries(kernel=TUNER)] == [32.0, 32.0]
    assert main(["show", TUNER]) == 0
    assert "(32, 128, 64, 2)" in capsys.readouterr().out


OTHERS = {
    "compiler": lambda flashinfer, patch: patch.setattr(machines, "machine", FakeMachine(compiler="13.6.1")),
    "GPU": lambda flashinfer, patch: patch.setattr(
        machines, "machine", FakeMachine(gpu=dataclasses.replace(H200, name="NVIDIA H100"))
    ),
    "release": lambda flashinfer, patch: patch.setattr(flashinfer, "__version__", "0.8.0"),
    "measuring anew": lambda flashinfer, patch: patch.setenv("TILEDSCHED_REMEMBER", "new"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_choice_holds_for_one_compiler_gpu_and_release(flashinfer, monkeypatch, name):
    runner = runner_of(flashinfer)
    assert choose(flashinfer, runner)[1] == 2
    OTHERS[name](flashinfer, monkeypatch)
    assert choose(flashinfer, runner, tune=False) == (-1, 0)
    assert choose(flashinfer, runner)[1] == 2
    assert choose(flashinfer, runner)[1] == (2 if name == "measuring anew" else 0)


def test_a_choice_holds_for_one_source(flashinfer, monkeypatch, tmp_path):
    kernels = tmp_path / "flashinfer" / "fused_moe" / "cutile"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(flashinfer, "__file__", str(tmp_path / "flashinfer" / "__init__.py"))
    for text, timed in (("one", 2), ("one", 0), ("two", 2)):
        (kernels / "moe.py").write_text(text)
        assert choose(flashinfer, runner_of(flashinfer))[1] == timed


def test_only_runners_of_cutile_are_stored_and_nothing_where_that_is_switched_off(flashinfer, monkeypatch):
    for name in ("CutlassRunner", "_CuTileStageRunner"):
        assert (
            choose(flashinfer, runner_of(flashinfer, name))[1]
            == choose(flashinfer, runner_of(flashinfer, name))[1]
            == 2
        )
    monkeypatch.setenv("TILEDSCHED_REMEMBER", "off")
    assert choose(flashinfer, runner_of(flashinfer))[1] == choose(flashinfer, runner_of(flashinfer))[1] == 2
    monkeypatch.delenv("TILEDSCHED_REMEMBER")
    assert choose(flashinfer, runner_of(flashinfer))[1] == 2


def test_what_the_user_read_from_a_file_of_flashinfers_comes_first(flashinfer):
    runner, tuner = runner_of(flashinfer), flashinfer.autotuner.AutoTuner()
    choose(flashinfer, runner)
    with tiledsched.remember():
        tuner.search_cache("something", [], (), flashinfer.autotuner.TuningConfig())
        (key,) = tuner._file_configs
    tuner = flashinfer.autotuner.AutoTuner()
    tuner._file_configs[key] = "CuTileBf16Runner", (64, 64, 64, 1)
    with tiledsched.remember():
        found = tuner.choose_one("moe_cutile_bf16", [runner], flashinfer.autotuner.TuningConfig(), [X])
    assert found[1] == (64, 64, 64, 1)


def test_a_database_that_cannot_be_read_is_a_warning(flashinfer, tmp_path, caplog):
    (tmp_path / "tuning.db").write_bytes(b"no database" * 1000)
    assert choose(flashinfer, runner_of(flashinfer)) == ((32, 128, 64, 2), 2)
    assert "choices of FlashInfer's tuner are not remembered" in caplog.text


def test_methods_are_put_back_and_another_tuner_is_left_alone(flashinfer, monkeypatch):
    tuner = flashinfer.autotuner.AutoTuner
    before = tuner.search_cache, tuner._cache_profile_result
    with tiledsched.remember():
        assert tuner.search_cache is not before[0]
    assert (tuner.search_cache, tuner._cache_profile_result) == before
    first, second = tiledsched.remember(), tiledsched.remember()
    for each in (first, second):  # the first made is undone first
        assert tuner.search_cache is not before[0]
        each.undo()
    assert (tuner.search_cache, tuner._cache_profile_result) == before
    monkeypatch.delattr(tuner, "_cache_profile_result")
    with tiledsched.remember():
        assert tuner.search_cache is before[0]


def test_the_methods_are_those_of_the_release_that_is_known(flashinfer):
    tuner = flashinfer.autotuner.AutoTuner
    names = [
        tuple(inspect.signature(each).parameters) for each in (tuner._cache_profile_result, tuner._profiling_policy)
    ]
    assert names == [("self", "key", "profile", "tuning_config", "tactic", "selection"), ("tuning_config",)]
    assert {"_file_configs", "_file_config_policies"} <= vars(tuner()).keys()


@pytest.mark.skipif(util.find_spec("flashinfer") is None, reason="needs flashinfer-python")
def test_flashinfers_own_runner_of_a_mixture_of_experts(flashinfer, monkeypatch):
    """Its candidates of both products are ranked, and their combinations are timed; the second time, nothing is."""
    import cuda.tile
    from flashinfer import fused_moe
    from flashinfer.fused_moe import runners

    launched = []
    monkeypatch.setattr(cuda.tile, "launch", lambda *given: launched.append(given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(runners.CuTileBf16Runner, "_check_support", lambda self: None)
    tokens, columns, experts = 16, 64, 4
    inputs = [
        *(torch.zeros(tokens, columns).bfloat16() for _ in range(2)),
        *(torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)),
        *(torch.zeros(experts, columns, 256).bfloat16(), torch.zeros(experts, 128, columns).bfloat16()),
    ]
    found = []
    for tune in (True, True, False):
        launched.clear()
        runner = object.__new__(runners.CuTileBf16Runner)
        runners.MoERunner.__init__(runner)
        vars(runner).update(
            config=fused_moe.MoEConfig(
                routing=fused_moe.RoutingConfig(num_experts=experts, top_k=2),
                quant=fused_moe.QuantConfig(),
                experts=fused_moe.ExpertConfig(intermediate_size=128),
            ),
            device=torch.device("cpu"),
            _device_arch=90,
            _num_sms=132,
            _workspace_cache={},
        )
        runner.check_support()
        runner.build()
        runner._configure_tuning(tokens, columns)
        monkeypatch.setattr(flashinfer.autotuner.AutoTuner, "_instance", None)
        before = len(flashinfer.timed)
        tuner = flashinfer.autotuner.AutoTuner.get()
        with tiledsched.remember(), tuning(tuner) if tune else contextlib.nullcontext():
            found.append(tuner.choose_one("moe_cutile_bf16", [runner], runner.tuning_config, inputs)[1])
        assert bool(len(flashinfer.timed) - before) == bool(launched) == (len(found) == 1)
    assert len(found[0]) == 7
    assert found == found[:1] * 3
