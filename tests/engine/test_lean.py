"""The lean forward against the module: hidden states, keys and values, tokens; and where it must not be taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lit_refusion.backbone import Backbone, ForwardChoice
from lit_refusion.config import config_folder
from lit_refusion.decoder import Decoder
from lit_refusion.engine import forward, lean
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.forward import ModuleForward, runs_lean
from lit_refusion.engine.lean import LeanForward
from lit_refusion.engine.obstacles import obstacle
from lit_refusion.engine.queries import Queries
from lit_refusion.engine.request import Request, visible
from lit_refusion.engine.sampling import likeliest
from lit_refusion.engine.scheduler import Watch
from lit_refusion.errors import UserError
from lit_refusion.export import load_model
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.views import MASK
from objectives.orthrus import add_twin
from tests.conftest import ARCHITECTURES, confident_backbone, make_tokenizer, random_prompts, shared_folder

CAPACITY = 40
QWEN, LLAMA = ARCHITECTURES["qwen3"], ARCHITECTURES["llama"]
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN,
    "qwen3, untied, biases, a key head for each query head": {
        **QWEN, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4
    },
    "qwen2": {**{name: QWEN[name] for name in QWEN if name != "head_dim"}, "model_type": "qwen2"},
    "llama": LLAMA,
    "llama, tied, biases, one key head": {
        **LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1
    },
    "linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama3": {
        **LLAMA, "rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "yarn": {**QWEN, "rope_parameters": {**ROPE, "rope_type": "yarn"}},
}  # fmt: skip


def make(architecture: dict[str, Any], **changes: Any) -> Backbone:
    """Random weights, those of norms and biases too."""
    backbone = Backbone.from_architecture({**architecture, **changes}, tokenizer=make_tokenizer(), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return backbone.eval()


def request(length: int, start: int, *, rng: np.random.Generator) -> Request:
    """Tokens that see what is committed and, in two groups of their own, each other."""
    places = start + np.arange(length)
    group = start + np.arange(length) // 3 * 3
    return Request(
        tokens=np.where(rng.random(length) < 0.3, MASK, rng.integers(10, 250, length)),
        positions=rng.permutation(length) + start,
        places=places,
        intervals=visible((0, start), (group, places + 1)) if start else visible((0, places + 1)),
        num_replies=length,
    )


def cache_of(backbone: Backbone, num_rows: int = 3) -> BufferCache:
    return BufferCache(
        backbone.model.config, num_rows=num_rows, capacity=CAPACITY, dtype=backbone.model.dtype, device=backbone.device
    )


def check_equal(backbone: Backbone, *, joins_groups: bool = False, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Rows of equal, unequal and very unequal lengths; rows that are not neighbours."""
    rng = np.random.default_rng(0)
    caches = cache_of(backbone), cache_of(backbone)
    module, forward = ModuleForward(backbone, caches[0]), LeanForward(backbone, caches[1])
    forward.joins_groups = joins_groups
    passes = [
        ([0, 1, 2], [(9, 0), (4, 0), (6, 0)]),
        ([0, 1, 2], [(7, 9), (7, 4), (7, 6)]),
        ([0, 1, 2], [(17, 0), (1, 4), (1, 6)]),
        ([0, 2], [(3, 9), (8, 6)]),
        ([1], [(1, 4)]),
    ]
    with torch.inference_mode():
        for rows, sizes in passes:
            requests = [request(length, start, rng=rng) for length, start in sizes]
            queries = Queries.joined(requests, mask_token_id=backbone.mask_token_id, capacity=CAPACITY)
            (expected, padded), (found, starts) = module(queries, rows), forward(queries, rows)
            assert found.shape == (sum(queries.lengths), backbone.model.config.hidden_size)
            for length, one, two in zip(queries.lengths, padded, starts):
                torch.testing.assert_close(
                    found[two : two + length], expected[one : one + length], rtol=rtol, atol=atol
                )
    stored, wanted = (cache.buffer[:, :, :, :CAPACITY] for cache in caches)
    torch.testing.assert_close(stored, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("call_flops", [0, torch.inf])
@pytest.mark.parametrize("joins_groups", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_buffer_equal_the_modules(
    name: str, joins_groups: bool, call_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the groups' heads joined, as on CUDA, and as heads of their own; rows attend one by one, or together."""
    monkeypatch.setitem(lean.CALL_FLOPS, "cpu", call_flops)
    backbone = make(MODELS[name])
    assert obstacle(backbone) is None
    check_equal(backbone, joins_groups=joins_groups)


def test_bf16_follows_the_module() -> None:
    backbone = make(QWEN)
    backbone.model.to(torch.bfloat16)
    check_equal(backbone, rtol=0.1, atol=0.1)


def test_positions_beyond_the_buffer() -> None:
    backbone = make(LLAMA)
    rng = np.random.default_rng(0)
    places = np.arange(5)
    far = Request(
        tokens=rng.integers(10, 250, 5),
        positions=places * 50,
        places=places,
        intervals=visible((0, places * 0 + 5)),
        num_replies=5,
    )
    queries = Queries.joined([far], mask_token_id=0, capacity=CAPACITY)
    assert not queries.used_intervals()  # all see all: no mask
    with torch.inference_mode():
        expected, _ = ModuleForward(backbone, cache_of(backbone))(queries, [0])
        found, _ = LeanForward(backbone, cache_of(backbone))(queries, [0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_used_intervals_written_out() -> None:
    def used(*intervals: Any, length: int = 3) -> Any:
        places = np.arange(length)
        one = Request(tokens=places, positions=places, places=places, intervals=visible(*intervals), num_replies=0)
        other = Request(
            tokens=places[:1], positions=places[:1], places=places[:1], intervals=visible((0, 6)), num_replies=0
        )
        return Queries.joined([one, other], mask_token_id=0, capacity=9).used_intervals()

    ends = np.array([4, 5, 6])
    assert used((0, ends)) == ((0, False),)
    assert used((0, ends * 0 + 6)) == ()
    assert used((1, ends)) == ((0, True),)
    assert used((0, ends * 0), (ends - 1, ends)) == ((0, False), (1, True))


# --- tokens ---

PRESETS = {
    "ar": {},
    "refusion": {"slot_size": 4, "block_size": 8, "slot_threshold": 0.5, "token_threshold": 0.3},
    "fast_dllm": {"shift": False, "block_size": 8, "steps": 8},
    "llada": {"shift": False, "block_size": 8, "steps": 8, "guidance": 0.5},
    "bd3": {"shift": False, "block_size": 4, "block_origin": "sequence"},
}


def preset(name: str, **changes: Any) -> Decoder:
    settings: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / "decoder" / f"{name}.yaml"), resolve=True)
    return build({**settings, "max_new_tokens": 16, "batch_size": 3, **changes}, Decoder, key="decoder")


def decoded(backbone: Backbone, decoder: Decoder, prompts: list[list[int]], choice: ForwardChoice) -> list[Any]:
    backbone.forward_choice = choice
    return [(g.tokens, g.steps) for g in decoder.generate(backbone, prompts, seed=1)]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_equal_the_modules(tokenizer: Any, architecture: str, name: str) -> None:
    backbone = confident_backbone(tokenizer, architecture=architecture)
    prompts, decoder = random_prompts(5, longest=12), preset(name, **PRESETS[name])
    assert decoded(backbone, decoder, prompts, "lean") == decoded(backbone, decoder, prompts, "module")


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_equal_the_modules_on_golden_prompts(name: str) -> None:
    backbone = Backbone.from_pretrained(shared_folder("golden", "model"))
    cases = json.loads(shared_folder("golden", "refusion_decode.json").read_text())
    prompts, decoder = [case["prompt_ids"] for case in cases[:6]], preset(name, **PRESETS[name])
    assert decoded(backbone, decoder, prompts, "lean") == decoded(backbone, decoder, prompts, "module")


def add_twins(backbone: Backbone) -> None:
    """Those of Orthrus, a little away from what they are copies of."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / "objective" / "orthrus.yaml"))
    build({**settings, "block_size": 4}, Objective).prepare(backbone)
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if ".twin." in name and parameter.requires_grad:
                parameter.mul_(1.05)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("is_hooked", [False, True])
def test_adapted_passes_are_lean_but_for_obstacles_in_the_twins(
    tokenizer: Any, is_hooked: bool, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = confident_backbone(tokenizer, architecture=architecture)
    add_twins(backbone)
    decoder, prompts = preset("orthrus", block_size=4), random_prompts(4, longest=9)
    expected = decoded(backbone, decoder, prompts, "module")
    if is_hooked:
        layer: Any = backbone.layers[1]
        layer.self_attn.twin.k_proj.register_forward_hook(lambda *_: None)
    kinds: list[dict[str, bool]] = []
    call = ModuleForward.__call__
    monkeypatch.setattr(ModuleForward, "__call__", lambda self, *args: (kinds.append(self.extra), call(self, *args))[1])
    assert decoded(backbone, decoder, prompts, "auto") == expected
    assert bool(kinds) is is_hooked
    assert all(kind == {"adapted": True} for kind in kinds)
    if is_hooked:
        with pytest.raises(UserError, match=r"layers\.1\.self_attn\.twin\.k_proj has a hook; use forward=auto"):
            decoded(backbone, decoder, prompts, "lean")


def test_what_adapted_passes_do_beside_the_twins_attention_is_an_obstacle(tokenizer: Any) -> None:
    backbone = confident_backbone(tokenizer)
    add_twins(backbone)
    layer: Any = backbone.layers[0]
    hook = layer.self_attn.register_forward_hook(lambda *_: None)
    assert obstacle(backbone, adapted=True) == "layers.0.self_attn has a hook"
    hook.remove()
    assert obstacle(backbone, adapted=True) is None
    assert runs_lean(backbone)
    hook = layer.self_attn.twin.o_proj.register_forward_hook(lambda *_: None)
    assert not runs_lean(backbone)
    assert runs_lean(backbone, adapted=False)
    hook.remove()
    add_twin(layer.mlp, ("up_proj",))
    assert obstacle(backbone) is None
    assert str(obstacle(backbone, adapted=True)).startswith("layers.0.mlp has a twin")


def test_every_decoding_sees_the_weights_as_they_are(tokenizer: Any) -> None:
    backbone, prompts = confident_backbone(tokenizer), random_prompts(2, longest=9)
    layer: Any = backbone.layers[0]
    decoder, seen = preset("ar"), []
    for change in ("none", "in place", "replaced"):
        with torch.no_grad():
            if change == "in place":
                layer.self_attn.q_proj.weight.mul_(-3)
                layer.input_layernorm.weight.mul_(2)
            elif change == "replaced":
                layer.mlp.up_proj.weight = nn.Parameter(-2 * layer.mlp.up_proj.weight)
        seen.append(decoded(backbone, decoder, prompts, "lean"))
        assert seen[-1] == decoded(backbone, decoder, prompts, "module")
    assert seen[0] != seen[1] != seen[2]


def test_the_likeliest_token_is_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, -torch.inf, 0.0]])
    assert likeliest(logits).tolist() == likeliest(logits.double()).tolist() == [1, 0]


# --- where it must not be taken ---


class Scaled(nn.Linear):
    """Somebody's own projection."""


def hooked(backbone: Backbone) -> None:
    backbone.layers[1].register_forward_hook(lambda *_: None)


def patched(backbone: Backbone) -> None:
    mlp: Any = backbone.layers[0].mlp
    mlp.forward = type(mlp).forward.__get__(mlp)


def replaced(backbone: Backbone) -> None:
    attention: Any = backbone.layers[0].self_attn
    attention.v_proj.__class__ = Scaled


def shared_out(backbone: Backbone) -> None:
    norm: Any = backbone.layers[0].input_layernorm
    norm.weight = nn.Parameter(torch.empty(0))


def marked(backbone: Backbone) -> None:
    next(backbone.layers[0].parameters()).ds_id = 3  # type: ignore[attr-defined]


def sliding(backbone: Backbone) -> None:
    backbone.model.config.layer_types = ["full_attention", "sliding_attention"]


def mixed(backbone: Backbone) -> None:
    backbone.layers[1].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "change", "reason"),
    [
        ({"model_type": "mistral"}, None, "model type 'mistral'"),
        ({"hidden_act": "gelu"}, None, "layers.0.mlp.act_fn is a GELUActivation"),
        ({}, sliding, "it has layers of type 'sliding_attention'"),
        ({"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, None, "RoPE is of type 'dynamic'"),
        ({}, hooked, "layers.1 has a hook"),
        ({}, patched, "layers.0.mlp has a hook"),
        ({}, replaced, "layers.0.self_attn.v_proj is a Scaled"),
        ({}, shared_out, "layers.0.input_layernorm has weights that are shared out"),
        ({}, marked, "layers.0.self_attn.q_proj has weights that are shared out"),
        ({}, mixed, "layers.1.self_attn.q_proj has weights in torch.bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_obstacles_are_named(changes: dict[str, Any], change: Any, reason: str) -> None:
    backbone = make(QWEN, **changes)
    if change is not None:
        change(backbone)
    assert not runs_lean(backbone)
    backbone.forward_choice = "lean"
    with pytest.raises(UserError, match=f"forward=lean: .*{reason}.*use forward=auto"):
        runs_lean(backbone)


def test_autocast_and_shared_models_go_through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, decoder = make(LLAMA), preset("ar", max_new_tokens=2)
    monkeypatch.setattr(forward, "LeanForward", lambda *_, **__: pytest.fail("took the lean forward"))
    waiting = [True]

    def agree(counts: tuple[int, int]) -> bool | None:
        waiting.append(bool(sum(counts)))
        return False if sum(counts) else None

    decoder.generate(backbone, [[20, 21]], watch=Watch(agree=agree))
    assert waiting[-1] is False
    with torch.autocast("cpu", torch.bfloat16):
        decoder.generate(backbone, [[20, 21]])
        backbone.forward_choice = "lean"
        with pytest.raises(UserError, match="autocast is on"):
            decoder.generate(backbone, [[20, 21]])


def test_the_setting_reaches_the_backbone_and_is_checked_at_loading(tmp_path: Path) -> None:
    backbone, decoder = make(QWEN), preset("ar", max_new_tokens=2)
    backbone.model.config.mask_token_id = backbone.mask_token_id
    backbone.model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / "objective" / "ar.yaml"))
    objective = build(settings, Objective)
    for choice in ("auto", "lean", "module"):
        model = load_model(str(tmp_path), objective=objective, device="cpu", forward=choice)
        assert model.backbone.forward_choice == choice
        assert runs_lean(model.backbone) is (choice != "module")
        assert len(decoder.generate(model.backbone, [[20, 21]])[0].tokens) == 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UserError, match=r"forward=lean: .* is a ReLU"):
        load_model(str(tmp_path), objective=objective, device="cpu", forward="lean")
