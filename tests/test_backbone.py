"""The backbone: which id is [MASK], which models are refused, fresh and loaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lit_refusion.attention import CAUSAL
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.mask_token import check_mask_not_in_data, choose_mask_token
from lit_refusion.views import Batch, View, collate
from tests.conftest import ARCHITECTURES, make_tokenizer

NO_MASK = make_tokenizer(mask_token=None)


def make_model(*, vocab_size: int = 320, tied: bool = True, **fields: Any) -> PreTrainedModel:
    architecture = {**ARCHITECTURES["qwen3"], "vocab_size": vocab_size, "tie_word_embeddings": tied, **fields}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))


def make_batch(num_tokens: int = 12) -> Batch:
    view = View(
        input_ids=np.arange(4, 4 + num_tokens),
        position_ids=np.arange(num_tokens),
        targets=np.full(num_tokens, -100),
        weights=np.zeros(num_tokens, np.float32),
        term=np.full(num_tokens, -1),
    )
    return collate([[view]], mask_token_id=None, pad_to_multiple=1, num_examples=1, num_response_tokens=1)


def tables(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


# --- which id is [MASK] ---


def test_requested_id_comes_first(tokenizer: PreTrainedTokenizerBase) -> None:
    assert choose_mask_token(make_model(mask_token_id=300), tokenizer, 310) == 310


def test_id_of_the_config_comes_second(tokenizer: PreTrainedTokenizerBase) -> None:
    assert choose_mask_token(make_model(mask_token_id=300), tokenizer, None) == 300


def test_id_of_the_tokenizer_comes_third(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.mask_token_id is not None
    assert choose_mask_token(make_model(), tokenizer, None) == tokenizer.mask_token_id


def test_spare_row_of_a_padded_table_comes_fourth() -> None:
    model = make_model(vocab_size=len(NO_MASK) + 3)
    before = tables(model)[0].clone()

    assert choose_mask_token(model, NO_MASK, None) == len(NO_MASK)
    assert torch.equal(tables(model)[0], before)


@pytest.mark.parametrize("tied", [True, False])
def test_full_table_grows_by_rows_at_the_mean(tied: bool) -> None:
    full = len(NO_MASK)
    model = make_model(vocab_size=full, tied=tied)
    before = [table.clone() for table in tables(model)]

    assert choose_mask_token(model, NO_MASK, None) == full

    assert model.config.vocab_size == 320
    for old, new in zip(before, tables(model)):
        assert new.shape == (320, 32)
        assert torch.equal(new[:full], old)
        torch.testing.assert_close(new[full:], old.mean(dim=0).expand(320 - full, -1))
    assert (tables(model)[0] is tables(model)[1]) == tied


def test_without_tokenizer_the_id_must_be_known() -> None:
    assert choose_mask_token(make_model(mask_token_id=300), None, None) == 300
    with pytest.raises(UserError, match=r"backbone\.mask_token_id: .*no tokenizer.*give its id"):
        choose_mask_token(make_model(), None, None)


@pytest.mark.parametrize("name", ["eos", "pad", "bos", "unk"])
def test_special_tokens_of_the_config_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"backbone\.mask_token_id=300 is the {name} .*leave it null"):
        choose_mask_token(make_model(**{f"{name}_token_id": 300}), NO_MASK, 300)


@pytest.mark.parametrize("name", ["eos", "pad"])
def test_special_tokens_of_the_tokenizer_are_refused(name: str) -> None:
    token_id = getattr(NO_MASK, f"{name}_token_id")

    with pytest.raises(UserError, match=rf"mask_token_id={token_id} is the {name}"):
        choose_mask_token(make_model(eos_token_id=None, pad_token_id=None, bos_token_id=None), NO_MASK, token_id)


def test_every_one_of_several_ends_is_refused() -> None:
    with pytest.raises(UserError, match="mask_token_id=301 is the eos"):
        choose_mask_token(make_model(eos_token_id=[300, 301]), NO_MASK, 301)


@pytest.mark.parametrize("token_id", [-1, 320, 10**9])
def test_id_outside_the_table_is_refused(token_id: int) -> None:
    with pytest.raises(UserError, match=rf"mask_token_id={token_id} lies outside .* 320 rows"):
        choose_mask_token(make_model(), NO_MASK, token_id)


def test_clash_of_the_tokenizers_own_mask_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="is the eos"):
        choose_mask_token(make_model(eos_token_id=tokenizer.mask_token_id), tokenizer, None)


def test_mask_that_occurs_in_the_data_is_refused() -> None:
    counts = np.array([0, 4, 0])

    check_mask_not_in_data(2, counts, origin="data")
    check_mask_not_in_data(3, counts, origin="data")  # a spare row behind the tokenizer's ids
    with pytest.raises(UserError, match=r"folder: the mask token 1 occurs 4 times .*choose another"):
        check_mask_not_in_data(1, counts, origin="folder")


# --- which models are refused ---

SMALL = {key: value for key, value in ARCHITECTURES["llama"].items() if key not in ("model_type", "head_dim")}


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2}, "no rotary position embedding"),
        (
            {**SMALL, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "sliding-window",
        ),
        (
            {
                **SMALL,
                "model_type": "gemma3_text",
                "layer_types": ["full_attention"] * 2,
                "final_logit_softcapping": 30.0,
            },
            "final_logit_softcapping",
        ),
        ({**SMALL, "model_type": "granite", "logits_scaling": 8.0}, "logits_scaling"),
        ({**SMALL, "model_type": "cohere"}, "logit_scale"),
        ({**SMALL, "model_type": "no_such_model"}, "backbone.architecture"),
        ({**SMALL, "model_type": "mistral", "sliding_window": 16}, "sliding-window"),
        ({**SMALL, "model_type": "gemma2"}, "sliding-window"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_unsupported_architectures_are_refused(
    architecture: dict[str, Any], part: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError, match=part) as caught:
        Backbone.from_architecture(architecture, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


def test_wrong_type_in_the_architecture_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="hidden_size"):
        Backbone.from_architecture({**ARCHITECTURES["qwen3"], "hidden_size": "wide"}, tokenizer=tokenizer)


def test_unknown_field_of_the_architecture_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="hiden_size"):
        Backbone.from_architecture({**ARCHITECTURES["qwen3"], "hiden_size": 64}, tokenizer=tokenizer)


def test_table_smaller_than_the_tokenizer_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="vocab_size"):
        Backbone.from_architecture({**ARCHITECTURES["qwen3"], "vocab_size": 64}, tokenizer=tokenizer)


# --- fresh weights ---


def weights(backbone: Backbone) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in backbone.parameters()])


def test_fresh_weights_depend_on_the_seed_only(tokenizer: PreTrainedTokenizerBase) -> None:
    made = []
    for global_seed, seed in [(1, 5), (2, 5), (1, 6)]:
        torch.manual_seed(global_seed)
        state = torch.random.get_rng_state()
        made.append(weights(Backbone.from_architecture(ARCHITECTURES["llama"], tokenizer=tokenizer, seed=seed)))
        assert torch.equal(torch.random.get_rng_state(), state)

    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_fresh_model_takes_its_ids_from_the_tokenizer(backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> None:
    assert backbone.vocab_size % 64 == 0
    assert backbone.vocab_size >= len(tokenizer)
    assert backbone.eos_token_id == tokenizer.eos_token_id
    assert backbone.mask_token_id == tokenizer.mask_token_id
    assert backbone.max_length == 256


# --- loading ---


def test_round_trip_of_a_saved_model(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)

    loaded = Backbone.from_pretrained(tmp_path, tokenizer=tokenizer)

    assert loaded.mask_token_id == backbone.mask_token_id
    assert type(loaded.model) is type(backbone.model)
    assert torch.equal(weights(loaded), weights(backbone))
    with torch.no_grad():
        first, second = (item.logits(item(make_batch(), CAUSAL)) for item in (backbone, loaded))
    assert torch.equal(first, second)


def test_dtype_is_as_asked(backbone: Backbone, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)

    loaded = Backbone.from_pretrained(tmp_path, mask_token_id=300, dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.mask_token_id == 300


@pytest.mark.parametrize("what", ["no folder", "empty folder", "not a model"])
def test_folder_without_a_model_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if what != "no folder":
        path.mkdir()
    if what == "not a model":
        (path / "config.json").write_text("{}")

    with pytest.raises(UserError, match=rf"backbone\.path={path}: cannot load the model") as caught:
        Backbone.from_pretrained(path)
    assert "\n" not in str(caught.value)


def test_missing_weights_file_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(UserError, match=r"backbone\.path=.*safetensors"):
        Backbone.from_pretrained(tmp_path, mask_token_id=300)


def test_weights_file_that_was_cut_off_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])

    with pytest.raises(UserError, match=r"backbone\.path="):
        Backbone.from_pretrained(tmp_path, mask_token_id=300)


def test_weights_that_the_file_lacks_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1." not in name}
    save_file(kept, file, metadata={"format": "pt"})

    with pytest.raises(UserError, match=r"backbone\.path=.*layers\.1\."):
        Backbone.from_pretrained(tmp_path, mask_token_id=300)


def test_weights_of_another_shape_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    backbone.model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))

    with pytest.raises(UserError, match=r"backbone\.path="):
        Backbone.from_pretrained(tmp_path, mask_token_id=300)


def test_model_without_eos_says_so(backbone: Backbone) -> None:
    backbone._eos_token_id = None

    with pytest.raises(UserError, match="eos_token_id"):
        _ = backbone.eos_token_id


def test_gradient_checkpointing_changes_no_gradient(backbone: Backbone) -> None:
    backbone.train()
    gradients = []
    for is_on in (False, True):
        if is_on:
            backbone.enable_gradient_checkpointing()
        backbone.zero_grad()
        backbone(make_batch(), CAUSAL).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in backbone.parameters() if p.grad is not None]))

    assert backbone.model.is_gradient_checkpointing
    torch.testing.assert_close(gradients[0], gradients[1])


def test_gguf_file_is_loaded(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    # transformers does not read the head width from the file: 128 is its default.
    architecture = {**ARCHITECTURES["qwen3"], "tie_word_embeddings": False, "head_dim": 128}
    backbone = Backbone.from_architecture(architecture, tokenizer=tokenizer, seed=1)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen3")
    for key, value in {
        "context_length": 256,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-6,
        "rope_freq_base": 10000.0,
        "vocab_size": backbone.vocab_size,
    }.items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name, tensor in backbone.model.state_dict().items():
        layer, kind = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(layer)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    loaded = Backbone.from_pretrained(tmp_path, gguf_file="tiny.gguf", mask_token_id=300)

    with torch.no_grad():
        first, second = (item.logits(item(make_batch(), CAUSAL)) for item in (backbone, loaded))
    torch.testing.assert_close(first, second)
