"""lm-eval-harness on local tasks, offline: our model's answers and likelihoods against computations by hand."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_refusion.backbone import Backbone
from lit_refusion.commands import harness as command
from lit_refusion.errors import UserError
from lit_refusion.evaluation.harness_requests import cut, request_keys, scored
from lit_refusion.spec import DiffusionSpec
from objectives.autoregressive import Autoregressive
from objectives.refusion import ReFusion
from tests.conftest import REPOSITORY, confident_backbone

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lit-refusion[harness]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402

from lit_refusion.evaluation.harness import HarnessModel  # noqa: E402

REFUSION = ReFusion(slot_sizes=(8,), masking="bernoulli", mdm_weight=1.0, eps=1e-3, complementary=False)
GENERATE = """
task: own_generation
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["%s"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["one", "two", "three"]
doc_to_target: 1
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLL = """
task: own_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
QUESTIONS = ["What is 1 + 2?", "The answer", "is 3. What is the answer to 1?", "1 + 2 is 3.", "Now"]
STOP = "#"


def save(backbone: Backbone, tokenizer: Any, spec: DiffusionSpec, folder: Path) -> Path:
    backbone.model.config.diffusion_spec = spec.to_dict()
    backbone.model.config.mask_token_id = backbone.mask_token_id
    backbone.model.config.prompt_format = {"style": "plain", "template_kwargs": {}}
    backbone.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    """A causal model, one for slots of 8, and three tasks whose right answers are what the causal model says."""
    root = tmp_path_factory.mktemp("harness")
    backbone = confident_backbone(tokenizer, seed=5)
    found = {"root": root, "tasks": root / "tasks"}
    found["ar"] = save(backbone, tokenizer, Autoregressive(average="example").spec(None), root / "ar")
    found["slots"] = save(backbone, tokenizer, REFUSION.spec(backbone.mask_token_id), root / "slots")
    answers = [greedy(backbone, tokenizer, text, 12) for text in QUESTIONS]
    answers[-1] = "another"
    records = root / "records.jsonl"
    lines = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found["tasks"].mkdir()
    (found["tasks"] / "generation.yaml").write_text(GENERATE % (records, STOP))
    (found["tasks"] / "choice.yaml").write_text(CHOOSE % records)
    (found["tasks"] / "text.yaml").write_text(ROLL % records)
    return found


def log_p(backbone: Backbone, tokens: Sequence[int]) -> torch.Tensor:
    """[N, V] after each token."""
    with torch.no_grad():
        return backbone.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)


def greedy(backbone: Backbone, tokenizer: Any, text: str, count: int) -> str:
    tokens = tokenizer(text)["input_ids"]
    start = len(tokens)
    for _ in range(count):
        scores = log_p(backbone, tokens)[-1]
        scores[backbone.mask_token_id] = -torch.inf
        tokens.append(int(scores.argmax()))
        if tokens[-1] == backbone.eos_token_id:
            break
    return tokenizer.decode(tokens[start:], skip_special_tokens=True).split(STOP)[0]


def load(folder: Path, *overrides: str) -> HarnessModel:
    return HarnessModel.load([f"model={folder}", "device=cpu", *overrides])


@pytest.fixture(scope="module")
def causal(places: dict[str, Path]) -> HarnessModel:
    return load(places["ar"], "objective=ar", "decoder=ar", "decoder.batch_size=3")


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=arguments[i], idx=i, metadata=("task", i, 1))  # type: ignore[arg-type]
        for i in range(len(arguments))
    ]


# --- likelihoods ---


def test_loglikelihoods_are_the_chain_rule(causal: HarnessModel) -> None:
    tokenizer, backbone = causal.tokenizer, causal.backbone
    pairs = [("What is", " 1 + 2?"), ("", "The answer"), ("The answer is ", "3."), ("x" * 300, " end")]
    found = causal.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, text), (value, is_greedy) in zip(pairs, found, strict=True):
        whole = tokenizer(context.rstrip() + context[len(context.rstrip()) :] + text)["input_ids"]
        head = tokenizer(context.rstrip())["input_ids"] if context else []
        if not head:
            whole, head = [backbone.eos_token_id, *whole], [backbone.eos_token_id]
        num_text = len(whole) - len(head)
        whole = whole[-256:]
        scores = log_p(backbone, whole)
        places = range(len(whole) - num_text, len(whole))
        assert value == pytest.approx(sum(float(scores[p - 1, whole[p]]) for p in places), rel=1e-4)
        best = scores.clone()
        best[:, backbone.mask_token_id] = -torch.inf
        assert is_greedy == all(int(best[p - 1].argmax()) == whole[p] for p in places)
    text = greedy(backbone, tokenizer, "Now", 3)
    assert tokenizer("Now" + text)["input_ids"][: len(tokenizer("Now")["input_ids"])] == tokenizer("Now")["input_ids"]


def test_greedy_continuations_are_recognised(causal: HarnessModel) -> None:
    tokens = causal.tok_encode("Now")
    scores = log_p(causal.backbone, tokens)[-1]
    scores[causal.backbone.mask_token_id] = -torch.inf
    best, other = scores.topk(2).indices.tolist()
    found = causal._loglikelihood_tokens([(("", ""), tokens, [best]), (("", ""), tokens, [other]), (("", ""), [], [])])
    assert [is_greedy for _, is_greedy in found] == [True, False, True]
    assert found[2][0] == 0.0


def test_rolling_sums_windows_that_cover_every_token_once(causal: HarnessModel) -> None:
    text = "What is 1 + 2? " * 90
    (found,) = causal.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    tokens = [causal.eot_token_id, *causal.tok_encode(text)]
    assert len(tokens) > 2 * 256
    total, done = 0.0, 1
    while done < len(tokens):
        stop = min(done + 255, len(tokens))
        start = max(0, stop - 256)  # the last window has as much context as fits
        scores = log_p(causal.backbone, tokens[start:stop])
        total += sum(float(scores[p - 1 - start, tokens[p]]) for p in range(done, stop))
        done = stop
    assert found == pytest.approx(total, rel=1e-4)


def test_bounds_do_not_depend_on_order_and_are_never_greedy(places: dict[str, Path]) -> None:
    model = load(places["slots"], "objective=refusion", "objective.slot_sizes=[8]", "num_draws=4")
    pairs = [(text, f" the {text}") for text in QUESTIONS]
    found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    turned = model.loglikelihood(requests("loglikelihood", *pairs[::-1]), disable_tqdm=True)[::-1]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in turned], rel=1e-5)
    assert not any(is_greedy for _, is_greedy in found)
    alone = model.loglikelihood(requests("loglikelihood", pairs[2]), disable_tqdm=True)
    assert alone[0][0] == pytest.approx(found[2][0], rel=1e-5)


def test_likelihoods_need_an_objective_that_fits(places: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="objective: missing"):
        load(places["slots"]).loglikelihood(requests("loglikelihood", ("a", "b")), disable_tqdm=True)
    with pytest.raises(UserError, match="slot_sizes"):
        load(places["slots"], "objective=refusion")


# --- text ---


def test_text_is_the_decoders_and_independent_of_order(places: dict[str, Path]) -> None:
    for folder, more in ((places["ar"], ["decoder=ar"]), (places["slots"], ["decoder=refusion"])):
        model = load(folder, *more, "decoder.batch_size=2", "decoder.max_new_tokens=16")
        asked = [(text, {"until": [], "max_gen_toks": 16 if i % 2 else 8}) for i, text in enumerate(QUESTIONS)]
        found = model.generate_until(requests("generate_until", *asked), disable_tqdm=True)
        turned = model.generate_until(requests("generate_until", *asked[::-1]), disable_tqdm=True)[::-1]
        assert found == turned
        assert len(set(found)) > 1
        if more == ["decoder=ar"]:
            expected = [
                greedy(model.backbone, model.tokenizer, text, 16 if i % 2 else 8) for i, text in enumerate(QUESTIONS)
            ]
            assert [text.split(STOP)[0] for text in found] == expected


def test_until_cuts_and_the_decoder_has_the_default_budget(places: dict[str, Path]) -> None:
    model = load(places["ar"], "decoder=ar", "decoder.max_new_tokens=20")
    (whole,) = model.generate_until(requests("generate_until", (QUESTIONS[0], {"until": []})), disable_tqdm=True)
    stop = whole[4:6]
    (short,) = model.generate_until(
        requests("generate_until", (QUESTIONS[0], {"until": ["never there", stop]})), disable_tqdm=True
    )
    assert short == whole.split(stop)[0]
    assert model.max_gen_toks == 20
    (long,) = model.generate_until(requests("generate_until", ("x" * 400, {"until": []})), disable_tqdm=True)
    (tail,) = model.generate_until(requests("generate_until", ("x" * 236, {"until": []})), disable_tqdm=True)
    assert long == tail  # what does not fit loses its beginning
    with pytest.raises(UserError, match="max_gen_toks=400"):
        model.generate_until(requests("generate_until", ("x", {"max_gen_toks": 400})), disable_tqdm=True)


def test_a_stop_that_is_a_token_ends_as_a_token(tokenizer: Any) -> None:
    ids = tokenizer("one<|im_start|>two")["input_ids"]
    assert cut(ids, ["<|im_start|>"], tokenizer) == "one"
    assert cut(ids, ["tw"], tokenizer) == "one"
    assert cut(ids, [], tokenizer) == "onetwo"


def test_repeated_requests_have_their_own_noise(places: dict[str, Path]) -> None:
    one, two, other = request_keys([[1, 2], [1, 2], [1, 3]])
    assert two == (one + 1) % 2**64
    assert other not in (one, two)
    assert scored([1, 2, 3], [4], window=3).prompt_ids.tolist() == [2, 3]
    assert scored([1, 2], [4], window=9).index != scored([1], [2, 4], window=9).index
    model = load(places["slots"], "decoder=refusion", "decoder.temperature=2.0", "decoder.max_new_tokens=16")
    asked = [("Now", {"until": [], "do_sample": True, "temperature": 2.0})] * 4
    found = model.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert len(set(found)) > 1
    assert sorted(found) == sorted(model.generate_until(requests("generate_until", *asked), disable_tqdm=True))


def test_chat_template(places: dict[str, Path], causal: HarnessModel) -> None:
    history = [{"role": "user", "content": "What is 1?"}]
    assert causal.apply_chat_template(history).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert causal.chat_template(True) == causal.tokenizer.chat_template
    assert causal.tokenizer_name
    assert not causal.is_chat  # it was trained on plain text
    assert load(places["ar"], "decoder=ar", "prompt_style=chat").is_chat


# --- whole evaluations ---


def run(*overrides: str) -> int:
    return command.run(
        argparse.Namespace(command="evaluate", overrides=list(overrides), config_dir=None, show_config=False)
    )


def test_the_command_runs_local_tasks(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = [f"model={places['ar']}", f"include={places['tasks']}", f"out={out}", "device=cpu", "bootstrap_iters=0"]
    assert run("harness=own_generation,own_choice,own_text", *where, "objective=ar", "decoder=ar") == 0
    assert "own_generation" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert result["results"]["own_generation"]["exact_match,none"] == pytest.approx(0.8)
    samples = [json.loads(line) for line in (out / "samples_own_choice.jsonl").read_text().splitlines()]
    expected = [max(range(3), key=lambda i: float(s["filtered_resps"][i][0])) == 1 for s in samples]
    assert result["results"]["own_choice"]["acc,none"] == pytest.approx(sum(expected) / 5)
    assert result["results"]["own_text"]["bits_per_byte,none"] > 0
    config = result["config"]
    assert config["decoder"]["_target_"].endswith("AutoregressiveDecoder") or config["decoder"]["_target_"]
    assert config["likelihood"]["kind"] == "exact"
    assert {"weights_fingerprint", "tokenizer_fingerprint", "spec", "path", "seed"} <= set(config)
    with pytest.raises(UserError, match="exists already"):
        run("harness=own_text", *where, "objective=ar", "decoder=ar")


def test_the_registered_name_works_from_the_harness(places: dict[str, Path]) -> None:
    assert get_model("lit_refusion") is HarnessModel
    results = lm_eval.simple_evaluate(
        model="lit_refusion",
        model_args=f"model={places['slots']},decoder=refusion,objective=refusion,objective.slot_sizes=[8],num_draws=2",
        tasks=["own_generation", "own_choice"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(places["tasks"]), include_defaults=False),
        apply_chat_template=True,
        batch_size=2,
        device="cpu",
        limit=3,
        bootstrap_iters=0,
    )
    assert results["n-samples"]["own_generation"]["effective"] == 3
    prompt = results["samples"]["own_generation"][0]["arguments"][0][0]
    assert prompt.endswith("<|im_start|>assistant\n")
    assert results["config"]["decoder"]["batch_size"] == 2


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["harness=no_such_task", "out=o"], "no such task"),
        (["harness=[]", "out=o"], "give the name"),
        (["harness=own_text"], "out: missing"),
        (["harness=own_text", "out=o", "include=nowhere"], "include=nowhere"),
        (["harness=own_text", "out=o", "limit=0"], "limit=0"),
        (["harness=own_text", "out=o", "decoder=llada"], "LLaDA|llada|decodes models"),
    ],
)
def test_bad_settings_are_named(places: dict[str, Path], overrides: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        run(f"include={places['tasks']}", *overrides, f"model={places['ar']}", "device=cpu")


def test_without_the_harness_the_extra_is_named(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.utils", None)
    with pytest.raises(UserError, match=r"lit-refusion\[harness\]"):
        run("harness=own_text", "out=o", f"model={places['ar']}")


SCRIPT = """
import sys
from argparse import Namespace
from lit_refusion.commands import harness
sys.exit(harness.run(Namespace(command="evaluate", overrides=sys.argv[1:], config_dir=None, show_config=False)))
"""


def test_two_processes_share_the_requests(places: dict[str, Path], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    where = [f"model={places['ar']}", f"include={places['tasks']}", "device=cpu", "bootstrap_iters=0", "objective=ar"]
    tasks = "harness=own_generation,own_choice"
    assert run(tasks, *where, "decoder=ar", f"out={tmp_path / 'one'}") == 0
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    arguments = [str(script), tasks, *where, "decoder=ar", f"out={tmp_path / 'two'}"]
    subprocess.run([*start, *arguments], check=True, env=environment, capture_output=True, timeout=300)
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert two["n-samples"] == one["n-samples"]
    assert two["results"] == one["results"]
