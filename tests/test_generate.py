"""The ways of `generate`: files of prompts, streaming, conversations, records and the replay page."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.cli import main
from lit_refusion.config import choices, config_folder, load_config
from lit_refusion.conversation import Conversation
from lit_refusion.decoder import Decoder
from lit_refusion.engine.scheduler import Watch
from lit_refusion.errors import UserError
from lit_refusion.export import LoadedModel
from lit_refusion.generation import Generation, Step
from lit_refusion.objective import Objective
from lit_refusion.prompts import read_prompts
from lit_refusion.schema import build
from lit_refusion.streaming import Stream
from lit_refusion.writer import Writer
from tests.conftest import confident_backbone, random_prompts

LENGTH = 16


def node(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(config_folder() / group / f"{name}.yaml"), resolve=True)


def objective_of(decoder: Decoder) -> Objective:
    objectives = (build(node("objective", name), Objective) for name in choices("objective"))
    return next(objective for objective in objectives if objective.name in decoder.objectives)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model that was never trained."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    backbone = confident_backbone(tokenizer, seed=3)
    objective = build(load_config("train", ["data.folder=x", "data=prepared"])["objective"], Objective)
    backbone.model.config.diffusion_spec = objective.spec(backbone.mask_token_id).to_dict()
    backbone.model.config.mask_token_id = backbone.mask_token_id
    backbone.model.config.prompt_format = {"style": "chat", "template_kwargs": {}}
    backbone.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generate(model: Path, *settings: object) -> int:
    return main(["generate", f"model={model}", f"decoder.max_new_tokens={LENGTH}", *map(str, settings)])


def answer(text: str) -> str:
    """What stands before the line of figures."""
    return re.split(r"\n\d+ tokens, ", text)[0]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Steps and streams


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in choices("decoder")),
        ("refusion", {"recompute_kv": True, "as_released": True, "slot_size": 4, "token_threshold": 0.99}),
        ("refusion", {"slot_size": 16, "stop_at_eos": False}),
        ("fast_dllm", {"as_released": True}),
    ],
)
def test_every_step_is_told_and_the_stream_becomes_the_answer(
    name: str, changes: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    decoder = build({**node("decoder", name), **changes}, Decoder)
    objective = objective_of(decoder)
    backbone = confident_backbone(tokenizer, seed=5)
    objective.prepare(backbone)
    decoder = dataclasses.replace(decoder, max_new_tokens=30, batch_size=2)
    decoder = decoder.fit_to(objective.spec(backbone.mask_token_id))
    prompts = random_prompts(4, longest=9)
    steps: list[list[Step]] = [[] for _ in prompts]
    ended: dict[int, Generation] = {}
    pieces: list[list[str]] = [[] for _ in prompts]
    streams = [Stream(tokenizer, max_new_tokens=30, write=own.append) for own in pieces]
    counts: list[int] = []

    def on_step(number: int, step: Step) -> None:
        assert number not in ended
        steps[number].append(step)
        streams[number].on_step(step)
        counts.append(sum(map(len, steps)))

    found = decoder.generate(backbone, prompts, watch=Watch(on_step=on_step, on_done=ended.__setitem__))

    assert found == [ended[number] for number in range(len(prompts))]
    assert counts == list(range(1, len(counts) + 1))
    for generation, own, stream, text in zip(found, steps, streams, pieces):
        assert tuple(own) == generation.steps
        whole = tokenizer.decode(list(generation.tokens), skip_special_tokens=True)
        assert stream.finish(generation) == whole
        assert "".join(text) == whole
        assert all(text)

    # Alone, a row has told all its steps when the next pass begins: nothing waits for the end.
    steps[0].clear()
    passes: list[int] = []
    backbone.model.base_model.register_forward_pre_hook(lambda *_: passes.append(len(steps[0])))
    decoder.generate(backbone, prompts[:1], watch=Watch(on_step=lambda _, step: steps[0].append(step)))
    assert passes == list(range(found[0].forward_passes))


def test_steps_are_told_while_the_row_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    """With two rows under way, one step of each is told in turn: nothing waits for the end."""
    decoder = dataclasses.replace(build(node("decoder", "ar"), Decoder), max_new_tokens=6, stop_at_eos=False)
    told: list[int] = []

    decoder.generate(
        confident_backbone(tokenizer), [[5], [6, 7]], watch=Watch(on_step=lambda number, _: told.append(number))
    )

    assert sorted(told[:2]) == sorted(told[2:4]) == [0, 1]
    assert len(told) == 12


def stream_of(tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int = 99) -> tuple[Stream, list[str]]:
    pieces: list[str] = []
    return Stream(tokenizer, max_new_tokens=max_new_tokens, write=pieces.append), pieces


def test_a_stream_waits_for_what_stands_before(tokenizer: PreTrainedTokenizerBase) -> None:
    a, b, c = tokenizer("abc")["input_ids"]
    stream, pieces = stream_of(tokenizer)

    stream.on_step(Step("reveal", (2,), (c,)))
    assert pieces == []
    stream.on_step(Step("reveal", (0,), (a,)))
    assert pieces == ["a"]
    stream.on_step(Step("reveal", (1,), (b,)))
    assert pieces == ["a", "bc"]


def test_a_stream_holds_back_half_characters_and_what_may_be_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    smile = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    a, b = tokenizer("ab")["input_ids"]
    stream, pieces = stream_of(tokenizer, max_new_tokens=len(smile) + 2)

    for place, token in enumerate(smile):
        stream.on_step(Step("token", (place,), (token,)))
    assert pieces == ["🙂"]
    end = len(smile)
    stream.on_step(Step("token", (end, end + 1, end + 2), (a, b, a)))
    assert pieces == ["🙂", "ab"]  # the last one is behind the budget

    stream, pieces = stream_of(tokenizer)
    stream.on_step(Step("token", (0, 1, 2), (a, tokenizer.eos_token_id, b)))
    assert pieces == ["a"]
    tokens = (a, tokenizer.eos_token_id, b)
    stream.finish(Generation(tokens=tokens, uncut_tokens=tokens, forward_passes=1, stop="length"))
    assert "".join(pieces) == "ab"


def test_a_tokenizer_that_takes_back_what_it_said(tokenizer: PreTrainedTokenizerBase) -> None:
    class Tidy:
        eos_token_id = -1

        def decode(self, tokens: list[int], **_: object) -> str:
            return "".join(" ," if token == 1 else "a" for token in tokens).replace(" ,a", ",a")

    pieces: list[str] = []
    stream = Stream(Tidy(), max_new_tokens=9, write=pieces.append)  # type: ignore[arg-type]
    stream.on_step(Step("token", (0, 1), (0, 1)))
    stream.on_step(Step("token", (2,), (0,)))

    assert stream.finish(Generation(tokens=(0, 1, 0), uncut_tokens=(0, 1, 0), forward_passes=2, stop="length")) == "a,a"
    assert "".join(pieces) == "a ,\na,a"


# The command


def test_streaming_prints_the_same(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "prompt=What is 1 + 2?") == 0
    plain = capsys.readouterr().out
    assert generate(model, "prompt=What is 1 + 2?", "--stream", "--show-steps") == 0
    streamed = capsys.readouterr().out

    without_time = re.compile(r"[\d.]+ tokens/s")
    assert without_time.sub("", plain).splitlines()[-1] == without_time.sub("", streamed).splitlines()[-1]
    assert streamed.startswith(answer(plain) + "\n")


def test_files_of_prompts_give_the_answers_of_single_prompts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["What is 1 + 2?", "Tom has 3, Ann has 4.", "Is <b> & 'c' right?"]
    (tmp_path / "p.txt").write_text("\ufeff" + prompts[0] + "\n\n" + prompts[1] + "\r\n" + prompts[2], encoding="utf-8")
    messages = [{"role": "user", "content": prompts[2]}, {"role": "assistant", "content": "to be written anew"}]
    lines: list[Any] = [{"prompt": prompts[0]}, {"query": prompts[1], "response": "no"}, {"messages": messages}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    singles = []
    for number, prompt in enumerate(prompts):
        assert generate(model, f"prompt={prompt}", f"out={tmp_path}/{number}.jsonl") == 0
        singles += records(tmp_path / f"{number}.jsonl")

    for kind in ("txt", "jsonl"):
        capsys.readouterr()
        out, page = tmp_path / "new" / f"{kind}.jsonl", tmp_path / "new" / f"{kind}.html"
        assert generate(model, f"prompts={tmp_path}/p.{kind}", f"out={out}", "--html", page) == 0
        printed = capsys.readouterr().out
        found = records(out)
        assert found == [{**single, "number": number} for number, single in enumerate(singles, start=1)]
        for record in found:
            assert (
                f"[{record['number']}]\n{record['text']}\n{record['tokens']} tokens, {record['passes']} for" in printed
            )
            assert record["tokens"] == len(record["token_ids"])
        assert re.search(rf"\n3 prompts: {sum(r['tokens'] for r in found)} tokens, .* tokens/s\n", printed)
        data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])["items"]
        assert [item["prompt"] for item in data] == prompts
        assert [item["figures"]["passes"] for item in data] == [record["passes"] for record in found]
        assert [item["seconds"] for item in data] == [None] * 3
        assert data[0]["model"] == str(model)
        assert data[0]["decoder"]["max_new_tokens"] == LENGTH


def test_the_page_of_one_prompt_knows_the_times(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("an older page")

    assert generate(model, "prompt=What is 1 + 2?", "--html", page) == 0

    item = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])["items"][0]
    assert len(item["seconds"]) == len(item["steps"]) == item["figures"]["passes"]
    assert all(seconds > 0 for seconds in item["seconds"])
    assert sum(item["kept"]) == item["figures"]["tokens"]


def test_a_system_prompt_comes_first_unless_the_record_has_its_own(model: Path, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": own}))

    assert generate(model, f"prompts={tmp_path}/p.jsonl", "system=Be brief, please.", f"out={tmp_path}/o.jsonl") == 0

    found = records(tmp_path / "o.jsonl")
    assert found[0]["messages"] == [
        {"role": "system", "content": "Be brief, please."},
        {"role": "user", "content": "a"},
    ]
    assert found[1]["messages"] == own


# Conversations


def talk(model: Path, text: str, monkeypatch: pytest.MonkeyPatch, *settings: object) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return generate(model, "--chat", *settings)


def test_a_conversation_is_kept_and_reset(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 'What is 1 + 2?\n\n  \nand then?\n/nope\n/reset\nTom has 3, "Ann" has 4.\n/quit\nnever read\n'
    out, page = tmp_path / "o.jsonl", tmp_path / "p.html"

    assert talk(model, lines, monkeypatch, "system=Be kind.", f"out={out}", "--html", page) == 0

    printed = capsys.readouterr()
    first, second, third = records(out)
    system = {"role": "system", "content": "Be kind."}
    assert first["messages"] == [system, {"role": "user", "content": "What is 1 + 2?"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and then?"},
    ]
    assert third["messages"] == [system, {"role": "user", "content": 'Tom has 3, "Ann" has 4.'}]
    assert printed.out == "".join(record["text"] + "\n" for record in (first, second, third)) + f"{page}\n"
    assert "/nope: unknown command; /reset" in printed.err
    items = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])["items"]
    assert [item["prompt"].splitlines()[-1] for item in items] == [
        "user: What is 1 + 2?", "user: and then?", 'user: Tom has 3, "Ann" has 4.',
    ]  # fmt: skip


def test_a_conversation_that_outgrows_the_window_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(model, "x" * 300 + "\nWhat is 1 + 2?", monkeypatch) == 0

    printed = capsys.readouterr()
    assert re.search(r"window of 256; .*, or say /reset\n", printed.err)
    assert generate(model, "prompt=What is 1 + 2?") == 0
    assert printed.out == answer(capsys.readouterr().out) + "\n"


@pytest.fixture
def conversation(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Conversation]:
    backbone = confident_backbone(tokenizer, seed=3)
    decoder = dataclasses.replace(build(node("decoder", "ar"), Decoder), max_new_tokens=6, stop_at_eos=False)
    objective = objective_of(decoder)
    prompt_format = PromptFormat(style="chat", template_kwargs={})
    loaded = LoadedModel(backbone, tokenizer, objective.spec(None), prompt_format)
    writer = Writer(model=loaded, decoder=decoder, prompt_format=prompt_format, seed=0)

    def make(said: list[str | type[BaseException]], write: Callable[[str], object]) -> Conversation:
        def read() -> str:
            following = said.pop(0) if said else EOFError
            if isinstance(following, str):
                return following
            raise following

        return Conversation(writer=writer, system=None, read=read, write=write, tell=lambda line: None)

    return make


def test_ctrl_c_stops_the_answer_and_not_the_conversation(conversation: Callable[..., Conversation]) -> None:
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    one = conversation(["first", KeyboardInterrupt, "second"], write)
    answers = one.run()

    assert len(answers) == 1
    stopped = "".join(pieces[:2])
    assert one.messages[:3] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": stopped},
        {"role": "user", "content": "second"},
    ]
    assert answers[0].messages == one.messages[:3]
    assert one.messages[3]["content"] == answers[0].text


def test_a_question_whose_answer_was_stopped_before_it_began_is_forgotten(
    conversation: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    one = conversation(["first"], lambda text: None)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", interrupted)
        assert one.run() == []
    assert one.messages == []


def test_turns_draw_different_noise(conversation: Callable[..., Conversation]) -> None:
    one = conversation(["same", "/reset", "same"], lambda text: None)
    decoder = dataclasses.replace(one.writer.decoder, temperature=2.0)
    one.writer = dataclasses.replace(one.writer, decoder=decoder)

    first, second = one.run()

    assert first.messages == second.messages
    assert first.text != second.text


# Bad input

BAD: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], ["prompt=None", "give just one of", "--chat"]),
    "two ways": (["prompt=a", "prompts={txt}"], ["prompt=a", "prompts={txt}", "just one"]),
    "chat and prompt": (["prompt=a", "--chat"], ["--chat", "just one"]),
    "stream of many": (["prompts={txt}", "--stream"], ["--stream", "leave it out"]),
    "steps in a chat": (["--chat", "--show-steps"], ["--show-steps", "--html"]),
    "plain chat": (["--chat", "prompt_style=plain"], ["prompt_style=plain", "no turns"]),
    "no file": (["prompts={root}/none.txt"], ["prompts={root}/none.txt", "check the path"]),
    "folder": (["prompts={root}/x.jsonl"], ["prompts={root}/x.jsonl", "cannot read it"]),
    "unknown kind": (["prompts={root}/a.csv"], ["prompts={root}/a.csv", ".txt or .jsonl"]),
    "out is there": (["prompt=a", "out={txt}"], ["out={txt}", "exists already", "another file"]),
    "out below a file": (["prompt=a", "out={txt}/o.jsonl"], ["out={txt}/o.jsonl", "cannot write it"]),
    "page is a folder": (["prompt=a", "--html", "{root}"], ["--html {root}", "another file"]),
    "page below a file": (["prompt=a", "--html", "{txt}/p.html"], ["--html {txt}/p.html", "cannot write it"]),
    "seed": (["prompt=a", "seed=-1"], ["seed=-1", "negative"]),
    "one of many too long": (["prompts={long}"], ["prompt 2:", "window of 256", "shorten"]),
    "half a character": (["prompt=a\udcff"], ["prompt: not UTF-8"]),
}


@pytest.mark.parametrize(("settings", "parts"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(
    settings: list[str], parts: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"root": tmp_path, "txt": tmp_path / "p.txt", "long": tmp_path / "long.txt"}
    names["txt"].write_text("a\n")
    names["long"].write_text("a\n" + "b" * 300)
    (tmp_path / "x.jsonl").mkdir()

    assert generate(model, *(text.format(**names) for text in settings)) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("lit-refusion generate: error: ")
    for part in parts:
        assert part.format(**names) in lines[0]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"text": "a"}', "it has ['text']; give prompt, query or messages"),
        ('{"prompt": 3}', "field 'prompt' must be text"),
        ('{"prompt": " "}', "field 'prompt' must be text"),
        ('{"prompt": "\\ud83d"}', "half a surrogate pair"),
        ('{"messages": "a"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "messages[1]: must have role and content"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[1]: field 'content'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "add the user's"),
    ],
)
def test_bad_records_are_named(line: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)

    with pytest.raises(UserError, match=re.escape(f"prompts={path}: line 3")) as caught:
        read_prompts(path)

    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")

    with pytest.raises(UserError, match="no prompt in it"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(tmp_path / "bytes.txt")


def test_a_template_that_refuses_says_why(
    conversation: Callable[..., Conversation], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system prompts') }}")

    with pytest.raises(UserError, match=r"chat template refuses it .*no system prompts"):
        conversation([], print).writer.write([[{"role": "user", "content": "a"}]])


def test_decoding_leaves_the_model_as_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    """An interruption in the middle of a pass changes nothing that the next answer needs."""
    own = confident_backbone(tokenizer, seed=3).train()
    decoder = dataclasses.replace(build(node("decoder", "ar"), Decoder), max_new_tokens=6)
    expected = decoder.generate(own, [[5, 6]])

    def on_step(number: int, step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(own, [[5, 6]], watch=Watch(on_step=on_step))

    assert own.training
    assert torch.is_grad_enabled()
    assert decoder.generate(own, [[5, 6]]) == expected
