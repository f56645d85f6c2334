"""Adding an objective and a decoder from outside the packages: one Python file, one YAML, nothing else touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lit_refusion.cli import main
from tests.conftest import ARCHITECTURES

OBJECTIVE = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_refusion.attention import FULL
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, View


@dataclass(frozen=True, kw_only=True)
class Cloze(Objective):
    """Hide one response token and predict it in place, with full attention."""

    name: ClassVar[str] = "cloze"
    terms: ClassVar[tuple[str, ...]] = ("cloze",)
    needs_mask_token: ClassVar[bool] = True
    weight: float

    def view(self, example, rng):
        ids = np.concatenate([example.prompt_ids, example.response_ids])
        hidden = np.arange(len(ids)) == len(example.prompt_ids) + rng.integers(len(example.response_ids))
        return View(
            input_ids=np.where(hidden, MASK, ids),
            position_ids=np.arange(len(ids)),
            targets=np.where(hidden, ids, IGNORE),
            weights=(self.weight * hidden).astype(np.float32),
            term=np.where(hidden, 0, -1),
        )

    def attention(self, step):
        return FULL

    def spec(self, mask_token_id):
        return DiffusionSpec(objective=self.name, mask_token_id=mask_token_id, shift="none", attention=FULL.name)
'''

DECODER = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_refusion.decoder import Decoder
from lit_refusion.engine.request import Request, visible
from lit_refusion.generation import Generation, Step
from lit_refusion.views import MASK


@dataclass(frozen=True, kw_only=True)
class OneShot(Decoder):
    """Fill the whole canvas of [MASK]s in one pass."""

    objectives: ClassVar[frozenset[str]] = frozenset({"cloze"})

    def row(self, prompt, eos_token_id, rng):
        places = np.arange(len(prompt) + self.max_new_tokens)
        reply = yield Request(
            tokens=np.concatenate([prompt, np.full(self.max_new_tokens, MASK)]),
            positions=places,
            places=places,
            intervals=visible((0, np.full(len(places), len(places)))),
            num_replies=self.max_new_tokens,
        )
        tokens = tuple(reply.tokens.tolist())
        step = Step("fill", tuple(range(len(tokens))), tokens)
        return Generation(tokens=tokens, uncut_tokens=tokens, forward_passes=1, stop="length", steps=(step,))
'''


def test_own_objective_and_decoder(
    records: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "own_cloze.py").write_text(OBJECTIVE)
    (package / "own_one_shot.py").write_text(DECODER)
    for group, text in {
        "objective": "_target_: own_cloze.Cloze\nweight: 1.0\n",
        "decoder": "_target_: own_one_shot.OneShot\nmax_new_tokens: 6\nbatch_size: 2\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(text)
    monkeypatch.syspath_prepend(str(package))
    own = ["--config-dir", str(tmp_path / "conf")]

    data = [f"data.folder={tmp_path}/data"]
    assert (
        main(
            ["prepare", "data=files", f"data.sources.0.files=[{records}]", f"data.tokenizer={tokenizer_folder}", *data]
        )
        == 0
    )
    architecture = [f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items()]
    assert main([
        "train", "objective=own", "data=prepared", *data, f"run={tmp_path}/run", "trainer.max_steps=30",
        "loader.validation_fraction=0.2",
        "trainer.log_every=1", "trainer.validate_every=10", "trainer.progress=none", *architecture, *own,
    ]) == 0  # fmt: skip
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    losses = [float(row["val/ce/cloze"]) for row in rows if row["val/ce/cloze"]]
    assert losses[-1] < losses[0]

    assert main(["export", f"run={tmp_path}/run", f"out={tmp_path}/model"]) == 0
    capsys.readouterr()
    assert main(["generate", f"model={tmp_path}/model", "decoder=own", "prompt=What?", "--show-steps", *own]) == 0
    assert "1 fill" in capsys.readouterr().out
    # The other decoders refuse it.
    assert main(["generate", f"model={tmp_path}/model", "decoder=refusion", "prompt=What?"]) == 2
    assert "trained with 'cloze'" in capsys.readouterr().err
    assert "own_cloze" in sys.modules
