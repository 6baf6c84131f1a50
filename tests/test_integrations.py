"""Ways in: what torch, transformers, diffusers and Hugging Face kernels ask of us, honoured. On the CPU torch computes."""

from __future__ import annotations

import json
import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiledsched.core.errors import ConfigError, UnsupportedError

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
functional = torch.nn.functional


@pytest.fixture(autouse=True)
def serving(monkeypatch, tmp_path):
    """Nothing is tuned, nothing is remembered, and what goes to torch is not worth a warning here."""
    from tiledsched.ops import sdpa as module

    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    module.reload()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tiledsched")
        yield module
    module.reload()


def tensors(*shape, kv_heads=None, columns=None):
    torch.manual_seed(0)
    batch, heads, rows, head_dim = shape
    key = (batch, kv_heads or heads, columns or rows, head_dim)
    return torch.randn(shape), torch.randn(key), torch.randn(key)


# torch


@pytest.fixture
def routing():
    from tiledsched.ops.integrations import torch as module

    yield module
    module.disable()


@pytest.fixture
def routed_calls(routing, monkeypatch):
    """What reaches `sdpa` through routing; the result is torch's, times two so that it can be told apart."""
    calls = []

    def recorder(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        calls.append((attn_mask, dropout_p, is_causal, scale, enable_gqa))
        return 2 * torch._C._nn.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    monkeypatch.setattr(routing, "sdpa", recorder)
    return calls


def test_routing_replaces_torchs_function_and_gives_it_back(routing) -> None:
    before = functional.scaled_dot_product_attention
    with routing.route_torch_sdpa():
        assert functional.scaled_dot_product_attention is routing.routed_attention
        with routing.route_torch_sdpa():
            assert routing.enabled()
        assert routing.enabled()
    assert functional.scaled_dot_product_attention is before
    with pytest.raises(ZeroDivisionError), routing.route_torch_sdpa():
        1 / 0  # noqa: B018
    assert functional.scaled_dot_product_attention is before
    routing.enable()
    routing.enable()
    routing.disable()
    assert functional.scaled_dot_product_attention is before


def test_another_programs_replacement_stays(routing, monkeypatch) -> None:
    def theirs(*arguments, **named):
        raise AssertionError("not called")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    routing.enable()
    functional.scaled_dot_product_attention = theirs
    routing.disable()
    assert functional.scaled_dot_product_attention is theirs


def test_routed_calls_keep_every_argument(routing, routed_calls) -> None:
    q, k, v = tensors(2, 4, 6, 16, kv_heads=2)
    mask = torch.zeros(6, 6)
    with routing.route_torch_sdpa():
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        functional.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, enable_gqa=True)
    assert routed_calls[0] == (None, 0.0, True, 0.3, True)
    assert routed_calls[1][0] is mask


def test_calls_torch_treats_in_its_own_ways_go_to_torch(routing, routed_calls) -> None:
    q, k, v = tensors(1, 4, 6, 16, kv_heads=1)  # one head for all: torch broadcasts
    before = functional.scaled_dot_product_attention
    with routing.route_torch_sdpa():
        torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v), before(q, k, v))
        torch.testing.assert_close(functional.scaled_dot_product_attention(q[0], q[0], q[0]), before(q[0], q[0], q[0]))
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(q, *tensors(1, 3, 6, 16)[1:])
    assert routed_calls == []


def test_what_is_not_served_ends_in_torchs_own_function(routing) -> None:
    q, k, v = tensors(2, 4, 33, 16)
    mask = torch.ones(33, 33, dtype=torch.bool).tril(2)
    with routing.route_torch_sdpa():
        for more in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
            out = functional.scaled_dot_product_attention(q, k, v, **more)
            torch.testing.assert_close(out, torch._C._nn.scaled_dot_product_attention(q, k, v, **more))
        q.requires_grad_()
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None


def test_compiled_code_follows_routing_on_and_off(routing, routed_calls) -> None:
    q, k, v = tensors(1, 2, 8, 16)
    compiled = torch.compile(
        lambda q: functional.scaled_dot_product_attention(q, k, v), backend="eager", fullgraph=True
    )
    before = compiled(q)
    with routing.route_torch_sdpa():
        torch.testing.assert_close(compiled(q), 2 * before)
    torch.testing.assert_close(compiled(q), before)


def test_layers_of_torch_are_trained_by_the_kernel_while_routed(launches, routing) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).half()
    x = torch.randn(2, 12, 32).half()
    gradients = []
    for routed in (nullcontext(), routing.route_torch_sdpa()):
        layer.zero_grad()
        with routed:
            layer(x).float().square().mean().backward()
        gradients.append([each.grad for each in layer.parameters()])
    assert launches
    assert max(map(distance, *reversed(gradients))) < 0.03


def test_compiled_gradients_are_torchs(routing) -> None:
    q, k, v = tensors(1, 2, 8, 16)
    q.requires_grad_()
    attend = functional.scaled_dot_product_attention
    (expected,) = torch.autograd.grad(attend(q, k, v, is_causal=True).sum(), q)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: functional.scaled_dot_product_attention(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True
    )
    with routing.route_torch_sdpa():
        (found,) = torch.autograd.grad(compiled(q).sum(), q)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch without the hook")
def test_torchs_own_hook_turns_routing_on_and_off(routing) -> None:
    assert "tiledsched" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("tiledsched")
    assert routing.enabled()
    torch.nn.attention.restore_flash_attention_impl()
    assert not routing.enabled()


# transformers


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def registered(transformers):
    from tiledsched.ops.integrations import transformers as module

    module.register()
    return module


@pytest.fixture
def not_theirs(registered, monkeypatch):
    """transformers' own attention may not be called."""
    theirs = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    monkeypatch.setattr(theirs, lambda *given, **named: pytest.fail("a mask was made"))


@pytest.fixture
def no_masks(registered, not_theirs, monkeypatch):
    """Neither transformers' own attention nor a model may ask for a mask in full."""
    monkeypatch.setattr(registered.SeenKeys, "__getattr__", lambda self, name: pytest.fail(f"a mask was made: {name}"))


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {"Llama": {}, "Qwen3": {}, "Mistral": {"sliding_window": 8}}


def make(transformers, family="Llama", **more):
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES.get(family, {}) | more))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def use(model, method):
    from docs.studies import whole_models as model_run

    model_run.use(model, method)
    return model


def both(model, call, theirs="eager"):
    """What `call(model)` gives under an attention of transformers, and under ours."""
    with torch.no_grad():
        return [call(use(model, method)) for method in (theirs, "tiledsched")]


@pytest.fixture
def masking(transformers):
    from transformers import masking_utils

    return masking_utils


PROMPT = 1 + torch.arange(2 * 20).reshape(2, 20) % 96  # no token is the padding, else a mask would be inferred
PADDED = torch.ones(2, 20, dtype=torch.long)
PADDED[0, :7] = 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])
def test_logits_are_those_of_torch(registered, transformers, family, padding) -> None:
    model = make(transformers, family)
    theirs, ours = both(model, lambda m: m(input_ids=PROMPT, attention_mask=padding).logits, "sdpa")
    torch.testing.assert_close(ours, theirs)


def test_each_phase_asks_for_the_mask_it_means(registered, transformers, monkeypatch) -> None:
    """Causal for a prompt, nothing for one row, the lower right for rows on a cache and for padding."""
    calls = []

    def recorder(q, k, v, **more):
        calls.append((q.shape[2], k.shape[2], more["causal"], more["enable_gqa"]))
        return serving(q, k, v, **more)

    serving = registered.sdpa
    monkeypatch.setattr(registered, "sdpa", recorder)
    model = make(transformers, num_hidden_layers=1)
    both(model, in_chunks, "sdpa")
    assert calls == [(9, 9, True, True), (1, 10, False, True), (10, 20, "bottom_right", True)]
    calls.clear()
    both(model, lambda m: m(input_ids=PROMPT, attention_mask=PADDED), "sdpa")
    assert calls == [(20, 20, "bottom_right", True)]
    calls.clear()
    both(model, lambda m: generated(m, None, 2), "sdpa")
    if transformers.__version__ >= "5":  # before, a static cache always came with a mask
        assert calls[0] == (20, 20, True, True)  # the part of the cache that is written


def test_an_encoder_is_not_causal(registered, transformers) -> None:
    torch.manual_seed(2)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97
    )
    model = transformers.BertModel(config).eval()
    for padding in (None, PADDED):
        theirs, ours = both(
            model, lambda m, padding=padding: m(input_ids=PROMPT, attention_mask=padding).last_hidden_state, "sdpa"
        )
        torch.testing.assert_close(ours, theirs)


def test_what_changes_the_scores_is_refused(registered, transformers) -> None:
    q, k, v = tensors(1, 2, 4, 16)
    with pytest.raises(UnsupportedError, match=r"head_mask.*attn_implementation='eager'"):
        registered.attention(torch.nn.Module(), q, k, v, None, head_mask=torch.zeros(2))


SLIDING = {"sliding_window": 8}
ASKING = {
    "Mistral": SLIDING,
    "Gemma2": SLIDING
    | {
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOss": SLIDING
    | {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "Llama": {},
}
RIGHT = PADDED.flip(1)
ENDS = PADDED.clone()
ENDS[1, 15:] = 0


@pytest.mark.parametrize("family", sorted(ASKING.keys() - {"Mistral"}))  # whose windows Gemma2 has, too
def test_windows_softcap_and_sinks_stay_what_they_are_in_compiled_code(
    family, registered, not_theirs, transformers, monkeypatch
) -> None:
    """Not masks of all scores: neither kernel nor torch's attention is given one."""
    model = use(make(transformers, family, **ASKING[family]), "tiledsched")
    asked = []
    serving = registered.sdpa
    monkeypatch.setattr(registered, "sdpa", lambda *given, **named: asked.append(named) or serving(*given, **named))
    with torch.no_grad():
        expected = model(input_ids=PROMPT).logits
        eagerly = [each.get("window") for each in asked]
        asked.clear()
        torch._dynamo.reset()
        found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=PROMPT).logits
    torch.testing.assert_close(found, expected)
    assert [each.get("window") for each in asked] == eagerly
    assert (8 in eagerly) == (family != "Llama")


WINDOW = {"sliding_window": 8, "attention_chunk_size": None}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_chunk_size": 8},
        {"sliding_window": 4},
        {"allow_is_causal_skip": False},
        {"attention_mask": PADDED == 1},
    ],
)
def test_what_is_told_of_a_window_while_it_is_traced(change, registered, transformers, monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    config = SimpleNamespace(**{name: change.get(name, usual) for name, usual in WINDOW.items()})
    told = {name: value for name, value in change.items() if name not in WINDOW}
    seen = registered._seen_keys(sizes(20, local_size=8, config=config, allow_is_causal_skip=True) | told)
    assert (seen is None) is bool(change)
    assert seen is None or (seen.causal, seen.window, seen.columns) == (True, 8, 20)


def in_chunks(model, cache=None, padding=None, chunks=(9, 1, 10)):
    """Logits of the rows that are no padding: the prompt in pieces, each on the cache of those before it."""
    logits, done = [], 0
    for piece in PROMPT.split(list(chunks), dim=1):
        done += piece.shape[1]
        seen = None if padding is None else padding[:, :done]
        output = model(input_ids=piece, attention_mask=seen, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1) if padding is None else torch.cat(logits, 1)[padding.bool()]


@pytest.mark.parametrize("family", sorted(ASKING))
@pytest.mark.parametrize("padding", [None, PADDED, ENDS], ids=["whole", "left", "both"])
@pytest.mark.parametrize("chunks", [(20,), (9, 1, 10)], ids=["at once", "in chunks"])
def test_windows_padding_softcap_and_sinks_are_served(
    launches, fresh, registered, not_theirs, transformers, family, padding, chunks
) -> None:
    """As `eager`, which every family has, and by the kernel alone: whatever went to torch would be an error."""
    model = make(transformers, family, **ASKING[family]).half()
    if family == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    wanted, found = both(model, lambda m: in_chunks(m, None, padding, chunks))
    assert len(launches) == 2 * len(chunks)
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=5e-2)


@pytest.mark.parametrize("padding", [None, PADDED, RIGHT], ids=["whole", "left", "right"])
def test_windows_of_two_sides_are_served(launches, fresh, registered, not_theirs, transformers, padding) -> None:
    """ModernBERT's local layers, which see as many keys after a row's own as before it."""
    config = transformers.ModernBertConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.ModernBertModel(config).eval().half()
    seen = torch.ones_like(PROMPT) if padding is None else padding
    wanted, found = both(model, lambda m: m(input_ids=PROMPT, attention_mask=padding).last_hidden_state[seen.bool()])
    assert len(launches) == 2
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=5e-2)


TEXTS = [[5, 9, 3, 8, 2, 7, 4, 6, 1, 11, 12], [4], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


@pytest.mark.parametrize("family", sorted(ASKING))
@pytest.mark.parametrize("told", ["positions", "FlashAttention's arguments"])
def test_packed_sequences_are_served(launches, fresh, registered, not_theirs, transformers, family, told) -> None:
    """What the collator without padding makes: each text as by itself, without a mask and without torch's attention."""
    model = make(transformers, family, **ASKING[family]).half()
    flash = told != "positions"
    if family == "GptOss" and not flash:
        pytest.skip("its layers are not told of positions that begin again")
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=flash)
    batch = collate([{"input_ids": text} for text in TEXTS])
    batch.pop("labels")
    use(model, "eager")
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=torch.tensor([text])).logits for text in TEXTS], 1)
        use(model, "tiledsched")
        found = model(**batch, use_cache=False).logits
    assert len(launches) == 2
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=5e-2)


def sizes(length, **more):
    """What transformers tells of a mask for two sequences."""
    lengths = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
    return {"batch_size": 2, "attention_mask": None, **lengths, **more}


def test_packed_sequences_are_told_in_the_words_of_every_version(registered, masking) -> None:
    """transformers 5.18 and newer count positions from where a sequence begins; versions differ in the order of the parts."""
    packed = masking.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 7, [0] * 12]))
    window = masking.sliding_window_causal_mask_function(4)
    for function, wanted in ((masking.causal_mask_function, None), (window, 4)):
        for parts in ((function, packed), (packed, function)):
            found = registered._seen_keys(sizes(12, mask_function=masking.and_masks(*parts)))
            assert (found.causal, found.window, found.longest) == (True, wanted, 12)
            assert found.offsets.tolist() == [0, 5, 12, 24]
    chunked = masking.and_masks(masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=int)), packed)
    assert registered._seen_keys(sizes(12, mask_function=chunked)) is None


def test_packed_sequences_in_several_rows_are_served(launches, fresh, registered, transformers) -> None:
    """Rows of a batch are sequences, too; under gradients torch's operations are told the same."""
    model = make(transformers).half()
    positions = torch.tensor([[*range(8), *range(12)], [*range(20)]])
    given = {"input_ids": PROMPT, "position_ids": positions, "use_cache": False}
    wanted, found = both(model, lambda m: m(**given).logits)
    assert len(launches) == 2
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=5e-2)


def distance(found, wanted):
    """Norm of the difference over the norm."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("family", "batch", "how"),
    [
        ("Llama", None, "checkpointed"),
        ("Llama", "packed", "in compiled layers"),
        ("Mistral", PADDED, "as it is"),
        ("Gemma2", ENDS, "checkpointed"),
        ("GptOss", RIGHT, "checkpointed"),
        ("GptOss", "packed", "as it is"),
    ],
)
def test_models_are_trained_by_the_kernel(launches, registered, not_theirs, transformers, family, batch, how) -> None:
    """The loss and every gradient of `eager`; whatever went to torch would be an error."""
    model = make(transformers, family, **ASKING[family]).half().train()
    given = {"input_ids": PROMPT, "labels": PROMPT, "attention_mask": batch}
    alone = [given]
    if isinstance(batch, str):
        collate = transformers.DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
        given = dict(collate([{"input_ids": text} for text in TEXTS]))
        alone = [{"input_ids": torch.tensor([text]), "labels": torch.tensor([text])} for text in TEXTS if len(text) > 1]
    elif batch is not None:
        row_before = functional.pad(batch, (1, 0))[
            :, :-1
        ]  # it predicts a label, and what rows of padding are is undefined
        given["labels"] = PROMPT.masked_fill((batch & row_before) == 0, -100)
    found = []
    for method, parts in (("eager", alone), ("tiledsched", [given])):
        use(model, method).zero_grad()
        if method == "tiledsched" and how == "checkpointed":
            model.gradient_checkpointing_enable()
        if method == "tiledsched" and how == "in compiled layers":
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        # The mean over all tokens of a batch, made of the means over its sequences.
        weights = [part["labels"][:, 1:].ne(-100).sum() for part in parts]
        losses = [
            model(**part, use_cache=False).loss * weight / sum(weights)
            for part, weight in zip(parts, weights, strict=True)
        ]
        (64 * sum(losses)).backward()  # scaled, as in every training in float16
        found.append((sum(losses).detach(), {name: each.grad for name, each in model.named_parameters()}))
    (wanted_loss, wanted), (loss, gradients) = found
    torch.testing.assert_close(loss, wanted_loss, atol=2e-3, rtol=1e-3)
    assert max(distance(gradients[name], each) for name, each in wanted.items() if each is not None) < 0.03


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss", "Gemma2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_of_eager(registered, transformers, family, cache) -> None:
    model = make(transformers, family, **ASKING[family])
    assert torch.equal(*both(model, lambda m: generated(m, PADDED, cache_implementation=cache)))


def generated(model, padding, tokens=9, cache_implementation="static", **more):
    """Tokens that a model makes on a cache, which the prompt fills in part."""
    return model.generate(
        input_ids=PROMPT,
        attention_mask=padding,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation=cache_implementation,
        disable_compile=True,
        **more,
    )


@pytest.mark.parametrize(
    ("family", "window"), [("Mistral", 8), ("Mistral", 24), ("Gemma2", 8), ("GptOss", 24), ("Llama", 0)]
)
@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "left"])
def test_generation_on_a_static_cache_needs_no_masks(
    registered, transformers, no_masks, family, window, padding
) -> None:
    """Windows that the cache fills before, in, or after the first step."""
    model = make(transformers, family, **(ASKING[family] | ({"sliding_window": window} if window else {})))
    assert torch.equal(*both(model, lambda m: generated(m, padding)))


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_prompt_in_chunks_on_a_static_cache_needs_no_masks(registered, transformers, no_masks, family) -> None:
    model = make(transformers, family)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        wanted, found = use(model, "eager")(input_ids=PROMPT).logits, in_chunks(use(model, "tiledsched"), cache)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_steps_on_a_static_cache_compile_once(registered, transformers, no_masks) -> None:
    """As `generate` compiles them: masks are made before, and no step is another program."""
    model = make(transformers, num_hidden_layers=1)
    wanted = generated(use(model, "eager"), PADDED)
    use(model, "tiledsched")
    torch._dynamo.reset()
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend("eager")
    eager, compiled = model.forward, torch.compile(model.forward, backend=counter, fullgraph=True)
    model.forward = lambda *given, **named: (eager if named["input_ids"].shape[1] > 1 else compiled)(*given, **named)
    assert torch.equal(generated(model, PADDED), wanted)
    assert counter.frame_count == 1


def test_a_step_is_served_by_the_kernel_and_poses_one_problem(
    launches, fresh, registered, transformers, no_masks
) -> None:
    model = make(transformers, "Gemma2", **ASKING["Gemma2"]).half()
    found = both(model, lambda m: generated(m, PADDED, 4, output_logits=True, return_dict_in_generate=True))
    torch.testing.assert_close(*(torch.stack(each.logits) for each in found), atol=5e-3, rtol=5e-2)
    assert len(launches) == 2 * 4
    assert len({tuple(each.shape for each in given[:3]) for *_, given in launches[2:]}) == 2  # a window's keys, and all


def test_a_step_on_a_static_cache_that_is_traced_whole_needs_no_mask(registered, masking, no_masks) -> None:
    """Its place is a tensor, and a compiled model makes its masks itself."""
    q, k, v = tensors(2, 4, 1, 16, kv_heads=2, columns=20)
    named = sizes(20, q_length=1, mask_function=masking.causal_mask_function)
    named |= {"allow_is_causal_skip": False, "use_vmap": False, "device": "cpu"}
    layer = torch.nn.Module()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda place: registered.attention(layer, q, k, v, registered.mask(**named | {"q_offset": place}))[0],
        backend="eager",
        fullgraph=True,
    )
    for place in map(torch.tensor, (3, 19)):
        seen = masking.sdpa_mask(**named | {"q_offset": place})
        wanted = functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        torch.testing.assert_close(compiled(place), wanted.transpose(1, 2))


def test_masks_that_say_more_stay_masks(registered, masking) -> None:
    """Holes in the padding, packed sequences, chunked attention, and functions that nobody knows."""
    holes = torch.ones(2, 20, dtype=torch.bool)
    holes[0, 5] = False
    causal, window = masking.causal_mask_function, masking.sliding_window_causal_mask_function(4)
    chunked = masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=int))
    for function, padding, more in (
        (causal, holes, {}),
        (chunked, None, {"local_size": 4}),
        (masking.and_masks(window, causal), None, {}),
        (lambda b, h, q, k: k <= q, PADDED.bool(), {}),
        (causal, PADDED.bool(), {"use_vmap": True}),
        (window, None, {"allow_is_causal_skip": False}),
    ):
        assert registered._seen_keys(sizes(20, mask_function=function, attention_mask=padding, **more)) is None
    named = sizes(20, mask_function=window, attention_mask=PADDED.bool(), local_size=4)
    found, whole = registered.mask(**named), masking.sdpa_mask(**named)
    assert (found.columns, found.causal, found.window, found.lengths) == (20, True, 4, None)
    assert found.starts.tolist() == [7, 0]
    for dense in (
        found.materialize(),
        found[:, :, :, :],
        torch.logical_and(found, found),
        ~~found,
        found.to("cpu").bool(),
    ):
        assert torch.equal(dense, whole)
    assert found.shape == whole.shape


def test_masks_are_refused_where_settings_say_so(registered, monkeypatch, serving) -> None:
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    serving.reload()
    q, k, v = tensors(1, 2, 4, 16)
    with pytest.raises(UnsupportedError, match="the mask is more than causal"):
        registered.attention(torch.nn.Module(), q, k, v, torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_a_missing_library_is_named(monkeypatch) -> None:
    from tiledsched.ops.integrations import diffusers, transformers

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[transformers\]'"):
        transformers.register()
    with pytest.raises(ConfigError, match=r"pip install .*\[diffusers\]'"):
        diffusers.register()


# diffusers


@pytest.fixture(scope="module")
def dispatch():
    pytest.importorskip("diffusers")
    from diffusers.models import attention_dispatch

    from tiledsched.ops.integrations import diffusers

    diffusers.register()
    diffusers.register()
    return attention_dispatch


@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": PADDED[:, :12] == 1}])
def test_diffusers_backend_gives_what_its_native_one_gives(dispatch, more) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 12, 4, 16) for _ in range(3))  # rows before heads
    found = []
    for name in ("native", "tiledsched"):
        with dispatch.attention_backend(name):
            found.append(dispatch.dispatch_attention_fn(q, k, v, **more))
    assert found[0].shape == (2, 12, 4, 16)
    torch.testing.assert_close(found[1], found[0])


@pytest.fixture
def flux(dispatch):
    """A small model of images, and the inputs of a step."""
    import diffusers

    torch.manual_seed(4)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def test_a_diffusers_model_is_trained_by_the_kernel(launches, flux) -> None:
    model, inputs = flux
    model, inputs = model.half(), {name: each.half() for name, each in inputs.items()}
    gradients = []
    for name in ("native", "tiledsched"):
        model.zero_grad()
        model.set_attention_backend(name)
        (64 * model(**inputs).sample.float().square().mean()).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    forward = [given[0].shape for _, _, kernel, given in launches if kernel.problem.kernel == "attention"]
    assert forward == [(1, 2, 24, 16)] * 2
    assert max(distance(gradients[1][name], each) for name, each in gradients[0].items() if each.any()) < 0.03


def test_diffusers_backend_refuses_what_it_does_not_compute(dispatch) -> None:
    from tiledsched.ops.integrations import diffusers

    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match="set_attention_backend"):
        diffusers.attention(q, q, q, return_lse=True)


# Hugging Face kernels


def test_kernels_loads_the_package_from_a_folder(tmp_path) -> None:
    kernels = pytest.importorskip("kernels")
    from tiledsched.ops.integrations.kernel_package import write_kernel_package

    files = write_kernel_package(tmp_path)
    assert {path.relative_to(tmp_path).parts[0] for path in files} == {"README.md", "build"}
    kernel = kernels.get_local_kernel(tmp_path)
    q, k, v = tensors(1, 4, 9, 16, kv_heads=2)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(kernel.sdpa(q, k, v, causal=True, scale=0.3), expected)


def test_the_kernel_package_says_what_it_holds(tmp_path) -> None:
    import base64
    import hashlib

    from tiledsched.ops.integrations.kernel_package import main

    assert main([str(tmp_path)]) == 0
    ids = set()
    for backend in ("cuda", "cpu"):
        variant = tmp_path / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        ids.add(metadata["id"])
        for name, digest in metadata["digest"]["files"].items():
            assert base64.b64encode(hashlib.sha256((variant / name).read_bytes()).digest()).decode() == digest
    assert len(ids) == 2


def test_the_blocks_of_the_page_on_use_run_one_after_the_other(
    transformers, dispatch, routing, tmp_path, monkeypatch
) -> None:
    import diffusers
    from test_engines import stand_in

    pytest.importorskip("kernels")
    stand_in(monkeypatch, "flashinfer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda name, attn_implementation: use(make(transformers), attn_implementation),
    )
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=[4, 4, 8]
    )
    pipeline = SimpleNamespace(transformer=transformer)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda name, torch_dtype: pipeline)
    page = (ROOT / "docs" / "tutorials" / "use-in-my-model.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert first.startswith("# needs a GPU\n")
    names = dict(zip("qkv", tensors(1, 2, 8, 16), strict=True), torch=torch)
    for block in others:
        exec(compile(block, block, "exec"), names)
    assert len(others) == 6
