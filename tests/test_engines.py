"""Ways into serving engines: what vLLM and FlashInfer ask of us is honoured, and calls that are not ours stay theirs.

Where an engine is installed, its own registries are used. Elsewhere stand-ins have the names and the signatures of vllm 0.33.0
(vllm/ir/op.py, vllm/model_executor/custom_op.py) and of flashinfer-python 0.7.4 (flashinfer/trace_apply/apply.py, norm, activation).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import runpy
import subprocess
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tiledsched.core.errors import ConfigError
from tiledsched.core.files import read_toml

torch = pytest.importorskip("torch")
functional = torch.nn.functional
ROOT = Path(__file__).parent.parent
SIGNATURES = {
    "vllm.ir.op:IrOp.register_impl": "self, provider, *, supported=True, supports_args=None, inplace=False",
    "vllm.ir.op:IrOp.get_priority": "self",
    "vllm.ir.op:IrOp.set_priority": "self, priority",
    "vllm.ir.op:IrOp.dispatch": "self, *args, **kwargs",
    "vllm.model_executor.custom_op:CustomOp.register_oot": "_decorated_op_cls=None, name=None",
    "vllm.model_executor.layers.activation:SiluAndMul.forward_cuda": "self, x",
    "flashinfer.trace_apply:enable_apply": "solutions=None",
    "flashinfer.trace_apply:disable_apply": "",
    "flashinfer:rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
    "flashinfer:silu_and_mul": "input, out=None, enable_pdl=None",
}
"""What our code calls, and what it may be called with."""


# vLLM


class IrOp:
    """An operation of vLLM IR and its implementations."""

    registry: dict = {}

    def __init__(self, native):
        self.native, self.impls, self.order = native, {"native": SimpleNamespace(provider="native", impl_fn=native)}, []
        self.registry[native.__name__] = self

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def decorate(function):
            for each in (function, supports_args):
                mine, theirs = (inspect.signature(one, eval_str=True).parameters for one in (each, self.native))
                if list(mine.values()) != list(theirs.values()):
                    raise ValueError(f"{provider} has schema {mine}, which does not match native schema {theirs}")
            assert provider not in self.impls
            self.impls[provider] = SimpleNamespace(
                provider=provider, impl_fn=function, supported=supported, supports_args=supports_args
            )

        return decorate

    def get_priority(self):
        return [each.provider for each in self.order]

    @contextlib.contextmanager
    def set_priority(self, priority):
        before, self.order = self.order, [self.impls[each] for each in priority]
        yield
        self.order = before

    def dispatch(self, *args, **kwargs):
        first = self.order[0]
        return first if first.supports_args(*args, **kwargs) else self.impls["native"]

    def __call__(self, *args, **kwargs):
        return self.dispatch(*args, **kwargs).impl_fn(*args, **kwargs)


class CustomOp:
    """A layer of vLLM that can be replaced."""

    name = "silu_and_mul"

    @classmethod
    def register_oot(cls, _decorated_op_cls=None, name=None):
        op_registry_oot[name], _decorated_op_cls.name = _decorated_op_cls, name


class SiluAndMul(CustomOp):
    def forward_cuda(self, x):
        return functional.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


op_registry_oot: dict = {}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    out = functional.rms_norm(x.float(), x.shape[-1:], eps=epsilon)
    return (out if weight is None else out * weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(x + x_residual, weight, epsilon), x + x_residual


def stand_in(monkeypatch, name, **holds):
    """A module of this name, and its parents."""
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        if parent:
            monkeypatch.setattr(stand_in(monkeypatch, parent), last, module, raising=False)
    for key, value in holds.items():
        monkeypatch.setattr(module, key, value, raising=False)
    return module


def vllm_stand_in(monkeypatch):
    monkeypatch.setattr(IrOp, "registry", {})
    IrOp(rms_norm), IrOp(fused_add_rms_norm)
    gpu = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda capability: capability == 80)
    monkeypatch.setitem(globals(), "op_registry_oot", {})
    stand_in(monkeypatch, "vllm.ir.op", IrOp=IrOp)
    stand_in(monkeypatch, "vllm.ir.ops")
    stand_in(monkeypatch, "vllm.platforms", current_platform=gpu)
    stand_in(monkeypatch, "vllm.envs", VLLM_PLUGINS=None)
    stand_in(monkeypatch, "vllm.model_executor.custom_op", CustomOp=CustomOp, op_registry_oot=op_registry_oot)
    stand_in(monkeypatch, "vllm.model_executor.layers.activation", SiluAndMul=SiluAndMul)


@pytest.fixture
def vllm(monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        vllm_stand_in(monkeypatch)
    return import_module("vllm.ir.op").IrOp.registry


@pytest.fixture
def provider():
    return import_module("tiledsched.ops.integrations.vllm")


def halves(*shape):
    return torch.randn(shape).half()


def test_vllm_has_our_norms_and_gives_us_the_calls_that_are_ours(vllm, provider, launches):
    assert provider.register() == provider.register() == {"rms_norm": [], "fused_add_rms_norm": []}
    x, weight, residual = halves(5, 3, 64), halves(64), halves(5, 3, 64)
    for operation in (vllm[name] for name in provider.IMPLEMENTATIONS):
        operation.impls["tiledsched"].supported = True  # there is no GPU
        more = [residual] if operation is vllm["fused_add_rms_norm"] else []
        theirs = operation.impls["native"].impl_fn(x, *more, weight, 1e-3)
        with operation.set_priority(["tiledsched", "native"]):
            torch.testing.assert_close(operation(x, *more, weight, 1e-3), theirs, rtol=2e-3, atol=2e-3)
            others = {
                "float32": [each.float() for each in (x, *more, weight)],
                "another type": [x, *more, weight.float()],
                "another device": [each.to("meta") for each in (x, *more, weight)],
                "no weight": [x, *more, None],
            } | ({"another shape": [x, residual[:1], weight]} if more else {})
            for name, given in others.items():
                assert operation.dispatch(*given, 1e-3).provider == "native", name
            assert operation.dispatch(x, *more, weight, 1e-3, 32).provider == "native"
            assert operation.dispatch(x, *more, weight, 1e-3).provider == "tiledsched"
            assert provider.register()["fused_add_rms_norm" if more else "rms_norm"][0] == "tiledsched"
    assert len(launches) == 2


def test_vllm_replaces_a_layer_only_where_it_names_the_plugin(vllm, provider, launches, monkeypatch):
    layers, activation = import_module("vllm.model_executor.custom_op"), "vllm.model_executor.layers.activation"
    provider.plugin()
    assert "SiluAndMul" not in layers.op_registry_oot
    monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", ["tiledsched"], raising=False)
    provider.plugin()
    provider.plugin()
    theirs, ours = import_module(activation).SiluAndMul, layers.op_registry_oot["SiluAndMul"]
    assert issubclass(ours, theirs)
    assert ours.name == theirs.name == "silu_and_mul"
    layer, x = object.__new__(ours), halves(4, 128)
    torch.testing.assert_close(layer.forward_cuda(x), SiluAndMul().forward_cuda(x), rtol=2e-3, atol=4e-3)
    assert len(launches) == 1
    monkeypatch.setattr(theirs, "forward_cuda", lambda self, x: "theirs")  # that of vLLM needs a GPU
    assert layer.forward_cuda(x.float()) == "theirs"


def test_vllm_without_the_registry_or_with_other_operations_runs_without_us(provider, monkeypatch, caplog):
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, cast: bool = False) -> torch.Tensor: ...

    vllm_stand_in(monkeypatch)
    IrOp(rms_norm)
    with pytest.raises(ConfigError, match=r"no rms_norm of the signature known .*install vllm 0\.33"):
        provider.register()
    del IrOp.registry["rms_norm"]
    with pytest.raises(ConfigError, match="no rms_norm of the signature known"):
        provider.register()
    monkeypatch.delattr("vllm.ir.op.IrOp")
    with pytest.raises(ConfigError, match=r"vLLM with vllm\.ir is needed"):
        provider.register()
    provider.plugin()
    assert "registers no operation with vLLM" in caplog.text


def test_vllm_finds_the_plugin():
    (value,) = read_toml(ROOT / "pyproject.toml")["project"]["entry-points"]["vllm.general_plugins"].values()
    loaded = EntryPoint("tiledsched", value, "vllm.general_plugins").load()
    assert loaded.__name__ == "plugin"
    started = [sys.executable, "-c", "import sys, tiledsched.ops.integrations.vllm as v; print('vllm' in sys.modules)"]
    assert subprocess.run(started, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "False\n"


# FlashInfer


def flashinfer_stand_in(monkeypatch):
    def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
        return rms_norm(input, weight, eps)

    def silu_and_mul(input, out=None, enable_pdl=None):
        return SiluAndMul().forward_cuda(input)

    inputs = {"rmsnorm": ("hidden_states", "weight"), "silu_and_mul": ("input",)}
    originals = {"rmsnorm": rmsnorm, "silu_and_mul": silu_and_mul, "gelu_and_mul": silu_and_mul}
    package = stand_in(monkeypatch, "flashinfer", **originals)

    def enable_apply(solutions=None):
        def wrapped(name, original):
            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                run = solutions.get(f"{name}_h{args[0].shape[-1]}")
                return original(*args, **kwargs) if run is None else run(**dict(zip(inputs[name], args, strict=False)))

            wrapper._trace_apply = True
            return wrapper

        for name in inputs:
            setattr(package, name, wrapped(name, originals[name]))
        return len(inputs)

    stand_in(monkeypatch, "flashinfer.trace_apply", enable_apply=enable_apply, disable_apply=lambda: None)


@pytest.fixture
def flashinfer(monkeypatch):
    if importlib.util.find_spec("flashinfer") is None:
        flashinfer_stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield import_module("flashinfer")
    import_module("flashinfer.trace_apply").disable_apply()


@pytest.fixture
def door():
    return import_module("tiledsched.ops.integrations.flashinfer")


def test_flashinfer_calls_our_solutions(flashinfer, door, launches):
    enable = import_module("flashinfer.trace_apply").enable_apply
    for again in range(2):  # made anew while the first ones are in place
        assert enable({name: door.solution(name, eps=0.5) for name in ("rmsnorm_h64", "silu_and_mul_h128")}) >= 2
        x, weight, gate = halves(4, 64), halves(64), halves(4, 128)
        expected = rms_norm(x, weight, 0.5)
        torch.testing.assert_close(flashinfer.rmsnorm(x, weight), expected, rtol=2e-3, atol=2e-3)
        expected = SiluAndMul().forward_cuda(gate)
        torch.testing.assert_close(flashinfer.silu_and_mul(gate), expected, rtol=2e-3, atol=4e-3)
        assert len(launches) == 2 * again + 2


@pytest.mark.parametrize(("name", "activation"), [("gelu_and_mul", "none"), ("gelu_tanh_and_mul", "tanh")])
def test_each_gate_is_the_one_of_its_name(flashinfer, door, launches, monkeypatch, name, activation):
    monkeypatch.setattr(flashinfer, name, None, raising=False)
    x = halves(4, 128) * 2
    expected = functional.gelu(x[:, :64].double(), approximate=activation) * x[:, 64:]
    torch.testing.assert_close(door.solution(f"{name}_h128")(input=x).double(), expected, rtol=1e-3, atol=1e-4)


def test_what_is_not_ours_goes_on_to_flashinfer_and_is_said(flashinfer, door, monkeypatch, caplog):
    def rmsnorm(*given):
        return given

    applied = functools.wraps(rmsnorm)(lambda *given: pytest.fail("the solution calls itself"))
    monkeypatch.setattr(flashinfer, "rmsnorm", applied)
    x, weight = torch.randn(4, 64), torch.randn(64)
    found = door.solution("rmsnorm_h64", eps=0.25)(hidden_states=x, weight=weight)
    assert [*map(id, found)] == [id(x), id(weight), id(found[2])]
    assert found[2] == 0.25
    assert "FlashInfer's own rmsnorm serves a call of rmsnorm_h64" in caplog.text


WRONG = {
    "fused_add_rmsnorm_h64": "no kernel for the definition",
    "rmsnorm": "no kernel for the definition",
    "rmsnorm_hx": "no kernel",
    "rmsnorm_h64": "give eps",
}


@pytest.mark.parametrize("name", WRONG)
def test_definitions_that_cannot_be_answered_are_refused(flashinfer, door, name):
    with pytest.raises(ConfigError, match=WRONG[name]):
        door.solution(name)


def test_solutions_are_written_for_definitions_that_flashinfer_wrote(flashinfer, door, launches, tmp_path, capsys):
    with pytest.raises(ConfigError, match="FLASHINFER_TRACE_DUMP=1"):
        door.main([str(tmp_path)])
    for name in ("rmsnorm_h64", "gqa_ragged_h32", "fused_add_rmsnorm_h64"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "axes": {}}))
    with pytest.raises(ConfigError, match="give eps"):
        door.main([str(tmp_path)])
    assert door.main([str(tmp_path), "--eps", "0.5"]) == door.main([str(tmp_path), "--eps", "0.5"]) == 0
    path = tmp_path / "solutions" / "tiledsched_rmsnorm_h64.json"
    assert set(capsys.readouterr().out.split()) == {str(path)}
    found = json.loads(path.read_text())
    assert (found["definition"], found["spec"]["language"]) == ("rmsnorm_h64", "python")
    file, function = found["spec"]["entry_point"].split("::")
    (tmp_path / file).write_text({each["path"]: each["content"] for each in found["sources"]}[file])
    x, weight = halves(4, 64), halves(64)
    run = runpy.run_path(str(tmp_path / file))[function]
    expected = rms_norm(x, weight, 0.5)
    torch.testing.assert_close(run(hidden_states=x, weight=weight), expected, rtol=2e-3, atol=2e-3)
    assert len(launches) == 1
    (tmp_path / "broken.json").write_text('["name"]')
    with pytest.raises(ConfigError, match=r"broken\.json is no definition"):
        door.write_solutions(tmp_path, 0.5)


@pytest.mark.parametrize("place", SIGNATURES)
def test_signatures_are_those_known(place, request):
    """Of the stand-ins, and of the engines where they are installed."""
    module, _, names = place.partition(":")
    request.getfixturevalue(module.partition(".")[0])
    found = functools.reduce(getattr, names.split("."), import_module(module))
    parameters = inspect.signature(found).parameters.values()
    plain = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    assert str(plain) == f"({SIGNATURES[place]})"
