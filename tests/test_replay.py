"""The replay page: one file that shows what happened and runs nothing that a model has said."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step
from lit_refusion.replay import Pass, Replay, token_texts, write_replay

VOID = {"meta", "input"}
HOSTILE = (
    "</script>",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "&lt;",
    "<!--",
    "]]>",
    "\u2028",
    '"',
)
ITEM = Replay(
    prompt="Say </script><b>hi</b> & \"more\"\n'now'",
    tokens=(*HOSTILE, " end", "", " behind"),
    kept=(True,) * 9 + (False, False),
    steps=(
        Pass(kind="select", places=()),
        Pass(kind="verify", places=(4, 5, 6, 7)),
        Pass(kind="<i>predict", places=(0, 1, 2, 3)),
        Pass(kind="verify", places=(8, 10)),
    ),
    seconds=(0.5, 0.25, 0.25, 1.0),
    model="runs/<model>",
    decoder={"slot_size": 4, "threshold": None, "rule": {"name": "a<b"}},
    figures={"tokens": 9, "passes": 4, "tokens_per_pass": 2.25},
)


class Page(HTMLParser):
    """Elements, attributes and the text of scripts; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data


def written(folder: Path, *items: Replay) -> str:
    return write_replay(folder / "page.html", items).read_text(encoding="utf-8")


def plain(item: Replay) -> Any:
    return json.loads(json.dumps(item, default=lambda one: vars(one)))


def test_text_stays_text_and_nothing_is_lost(tmp_path: Path) -> None:
    page = Page(written(tmp_path, ITEM, replace(ITEM, prompt="another", seconds=None)))

    data, program = page.scripts
    assert json.loads(data)["items"] == [plain(ITEM), plain(replace(ITEM, prompt="another", seconds=None))]
    assert not set("<>&\u2028") & set(data)
    assert "innerHTML" not in program
    assert "document.write" not in program
    assert "img" not in page.tags
    assert page.tags.count("script") == 2


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = written(tmp_path, ITEM)
    page = Page(text)

    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'")
    assert not {name for name, _ in page.attributes} & {"src", "href", "action", "onload", "onclick"}
    assert re.findall(r"\w+://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]  # the name of SVG, not a place
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_the_page_can_be_used_by_all(tmp_path: Path) -> None:
    text = written(tmp_path, ITEM)
    page = Page(text)

    assert text.startswith("<!DOCTYPE html>")
    assert ("lang", "en") in page.attributes
    assert ("aria-live", "polite") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert ":focus-visible" in text
    assert any(name == "content" and "width=device-width" in (value or "") for name, value in page.attributes)
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r"\$\(\"(\w+)\"\)", page.scripts[1])) | {"data"}
    assert used <= set(page.ids)


def test_the_same_replay_gives_the_same_bytes_in_one_rename(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    first = write_replay(path, [ITEM]).read_bytes()
    path.write_text("something else")

    assert write_replay(path, [ITEM]).read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was decoded"):
        write_replay(tmp_path / "page.html", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/page\.html: cannot write it"):
        write_replay(tmp_path / "file" / "page.html", [ITEM])
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match=r"folder\.html: cannot write it"):
        write_replay(tmp_path / "folder.html", [ITEM])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.html"]


def test_a_generation_as_a_replay(tokenizer: PreTrainedTokenizerBase) -> None:
    """Place 2 is never decided, and the last place stands behind the answer."""
    a, b, c = tokenizer("abc")["input_ids"]
    eos = tokenizer.eos_token_id
    generation = Generation(
        tokens=(a, b, eos),
        uncut_tokens=(a, b, eos, c),
        forward_passes=3,
        stop="eos",
        steps=(Step("select", (), ()), Step("verify", (3, 4), (eos, c)), Step("verify", (1, 0), (b, a))),
        statistics={"own": 1.5},
    )

    found = Replay.of(generation, tokenizer, prompt="p", seconds=[1.0, 2.0, 3.0], model="m", decoder={"k": 4})

    assert found.tokens == ("a", "b", "", "<|im_end|>", "c")
    assert found.kept == (True, True, False, True, False)
    assert found.steps == (
        Pass(kind="select", places=()),
        Pass(kind="verify", places=(3, 4)),
        Pass(kind="verify", places=(1, 0)),
    )
    assert found.figures == {"tokens": 3, "passes": 3, "tokens_per_pass": 1.0, "own": 1.5}
    assert (found.seconds, found.model, found.decoder) == ((1.0, 2.0, 3.0), "m", {"k": 4})
    with pytest.raises(AssertionError):
        Replay.of(generation, tokenizer, prompt="p", seconds=[1.0], model="m", decoder={})


@pytest.mark.parametrize("text", ["What is 1 + 2?", "ü 你好 🙂!", "", " a\n\n b\t", "<|im_end|>"])
def test_texts_of_tokens_make_the_text(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]

    texts = token_texts(tokens, tokenizer)

    assert len(texts) == len(tokens)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_texts_of_broken_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    """Bytes that are no character are shown as such, and do not swallow what follows."""
    smile = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    letter = tokenizer("a", add_special_tokens=False)["input_ids"]

    texts = token_texts([*smile[:2], *letter, *smile, smile[0]], tokenizer)

    assert "".join(texts) == tokenizer.decode([*smile[:2], *letter, *smile, smile[0]])
    assert "🙂" in texts


def test_texts_of_a_tokenizer_that_drops_a_leading_space() -> None:
    class Pieces:
        def decode(self, tokens: list[str], **_: object) -> str:
            return "".join(tokens).removeprefix(" ")

    pieces: Any = [" The", " answer", ".", " It", "self"]

    assert token_texts(pieces, Pieces()) == ["The", " answer", ".", " It", "self"]  # type: ignore[arg-type]


FAKE_PAGE = """
const elements = new Map();
function element(tag) {
  const own = { tagName: tag.toUpperCase(), children: [], listeners: {}, attributes: {}, className: "", value: "" };
  let text = "";
  Object.defineProperty(own, "textContent", {
    get: () => text + own.children.map((child) => typeof child === "string" ? child : child.textContent).join(""),
    set: (value) => { text = String(value); own.children = []; },
  });
  own.append = (...more) => own.children.push(...more);
  own.replaceChildren = (...more) => { text = ""; own.children = more; };
  own.setAttribute = (name, value) => { own.attributes[name] = String(value); };
  own.getAttribute = (name) => own.attributes[name] ?? null;
  own.addEventListener = (name, call) => { own.listeners[name] = call; };
  own.getBoundingClientRect = () => ({ top: 0, bottom: 0, left: 0, width: 100 });
  own.scrollIntoView = () => {};
  return own;
}
const document = element("document");
document.getElementById = (id) => {
  if (!elements.has(id)) elements.set(id, element("div"));
  return elements.get(id);
};
document.createElement = element;
document.createElementNS = (_, tag) => element(tag);
document.getElementById("data").textContent = process.argv[2];
document.getElementById("speed").value = "2";
"""
FOLLOWED = """
const seen = [];
const look = () => seen.push({
  at, counters: $("counters").textContent, spoken: $("spoken").textContent,
  classes: spans.map((span) => span.className),
  bars: $("strip").children.map((bar) => bar.getAttribute("class")),
});
look();
const key = (name) => document.listeners.keydown({ key: name, target: { tagName: "BODY" }, preventDefault() {} });
key("ArrowRight"); key("ArrowRight"); look();
key("End"); look();
key("ArrowRight"); key("ArrowLeft"); look();
key("Home"); look();
const legend_lines = $("legend").children.map((line) => line.textContent);
console.log(JSON.stringify({ seen, legend: legend_lines, text: $("text").textContent }));
process.exit(0);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_program_shows_each_pass(tmp_path: Path) -> None:
    page = Page(written(tmp_path, ITEM))
    program = FAKE_PAGE + page.scripts[1] + FOLLOWED
    (tmp_path / "page.js").write_text(program, encoding="utf-8")

    run = subprocess.run(
        ["node", tmp_path / "page.js", page.scripts[0]], capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)

    start, second, last, third, home = found["seen"]
    assert [look["at"] for look in found["seen"]] == [0, 2, 4, 3, 0]
    assert set(start["classes"]) == {"token open"}
    assert second["classes"] == ["token open"] * 4 + ["token new kind0"] * 4 + ["token open"] * 3
    assert last["classes"][:9] == ["token done kind1"] * 4 + ["token done kind0"] * 4 + ["token new kind0"]
    assert last["classes"][9:] == ["token open", "token new kind0 behind"]
    assert third["classes"][8:] == ["token open"] * 3
    assert home["classes"] == start["classes"]
    assert second["counters"] == "pass 2 of 4tokens 4tokens per pass 2.00this pass verify, 4 tokenstime 0.75 s"
    assert last["counters"] == "pass 4 of 4tokens 9tokens per pass 2.25this pass verify, 2 tokenstime 2.00 s"
    assert last["spoken"].startswith("pass 4 of 4; tokens 9;")
    assert second["bars"] == ["none past", "kind0 past now", "kind1", "kind0"]
    assert found["legend"] == [
        "verify", "<i>predict", "not decided yet", "behind the end of the answer", "passes that decide nothing: select",
    ]  # fmt: skip
    assert found["text"] == "".join(ITEM.tokens)
