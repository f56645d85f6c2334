"""A run that is killed, stopped, changed or moved to other devices goes on as if nothing had happened, or refuses."""

from __future__ import annotations

import functools
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_refusion.cli import main
from lit_refusion.data.plan import Plan
from lit_refusion.data.shards import Shards
from lit_refusion.data.split import split
from lit_refusion.run_folder import checkpoint_path, is_whole
from tests.children import (
    OBJECTIVES,
    PACKED,
    Blow,
    Child,
    as_it_was,
    assert_same_run,
    assert_same_state,
    checkpoint,
    command,
    figures,
    metrics,
    prepared_data,
    run,
    start,
    start_ranks,
    steps_with,
    train,
    weights,
)

STEPS = 8
VALIDATED, SAVED = (3, 6, 8), (2, 4, 6, 8)
HELD_OUT_BATCHES = 2
"""Batches of 4 that every validation has at least; which examples are held out is up to their hashes."""
LAYOUTS = {"padded": [], "packed": PACKED}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("data"), tokenizer_folder)


def arguments(data: Path, folder: Path, objective: str, *extra: str) -> list[str]:
    """A run of 8 steps of two micro-batches, to be started as often as it takes."""
    short = ["loader.micro_batch_size=4", f"trainer.max_steps={STEPS}", "trainer.loggers=[csv]"]
    return command(data, folder, objective, *short, "resume=auto", *extra)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Uninterrupted runs, by objective and settings."""

    @functools.cache
    def make(objective: str = "refusion", *extra: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        finish(arguments(data, folder / "run", objective, *extra))
        return folder / "run"

    return make


def begin(command: list[str], *blows: Blow) -> Child:
    """The run in a process of its own; its output goes beside the run folder."""
    folder = Path(next(text for text in command if text.startswith("run=")).removeprefix("run="))
    return start(train, command, *blows, log=folder.with_suffix(".log"))


def finish(command: list[str]) -> None:
    child = begin(command)
    assert child.wait() == 0, child.output


# Killed


def draw(place: str, rng: random.Random, *, done: int) -> Blow:
    """A SIGKILL behind step `done`, at a moment that the run is bound to come by."""
    if place == "training":
        place, turn = rng.choice([("training", 0), ("training", 1), ("gradients", 0)])
        return Blow(signal.SIGKILL, place, rng.randrange(done, STEPS), turn)
    if place == "validation":
        step, turn = rng.choice([step for step in VALIDATED if step > done]), rng.randrange(HELD_OUT_BATCHES + 1)
        if turn == HELD_OUT_BATCHES:
            place, turn = "validated", 0
        return Blow(signal.SIGKILL, place, step, turn)
    moments = [("saving last", step) for step in SAVED if step > done] + [("saving best", VALIDATED[0])] * (done < 3)
    return Blow(signal.SIGKILL, *rng.choice(moments))


def steps_saved(folder: Path) -> int:
    """The step that the run will go on from."""
    last = checkpoint_path(folder, "last")
    assert not last.exists() or is_whole(last)
    return checkpoint(folder)["global_step"] if last.exists() else 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_that_is_killed_three_times_ends_as_one_that_is_not(
    objective: str, layout: str, num_workers: int, whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """SIGKILL in a training step, a validation and a save, in an order and at moments drawn by lot."""
    rng = random.Random(f"{objective} {layout} {num_workers}")
    folder = tmp_path / "run"
    command = arguments(data, folder, objective, *LAYOUTS[layout], f"loader.num_workers={num_workers}")
    for place in rng.sample(["training", "validation", "saving"], 3):
        blow = draw(place, rng, done=steps_saved(folder))
        child = begin(command, blow)
        assert child.wait() == -signal.SIGKILL, (blow, child.output)
        if place == "saving":
            half = folder / "checkpoints" / f".{blow.place.removeprefix('saving ')}.ckpt.partial"
            assert half.stat().st_size > 10_000
            assert not is_whole(half)
    finish(command)
    assert_same_run(folder, whole(objective, *LAYOUTS[layout]))
    assert steps_with("val/loss", folder) == list(VALIDATED)
    assert steps_with("train/loss", folder) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    "file", [".last.ckpt.partial", ".previous.ckpt.partial", ".best.ckpt.partial", "metrics.partial"]
)
def test_a_run_that_is_killed_before_a_file_gets_its_name_ends_as_one_that_is_not(
    file: str, turn: int, whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "refusion")
    child = begin(command, Blow(signal.SIGKILL, f"renaming {file}", turn=turn))
    assert child.wait() == -signal.SIGKILL, child.output
    finish(command)
    assert_same_run(tmp_path / "run", whole())


def test_a_run_that_is_killed_before_its_first_save_starts_afresh(
    whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "refusion", "trainer.checkpoint_every=4")
    assert begin(command, Blow(signal.SIGKILL, "validated", 3)).wait() == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["best.ckpt"]
    finish(command)
    assert_same_state(tmp_path / "run", whole())
    assert figures(tmp_path / "run") == figures(whole())


def test_figures_of_several_steps_stand_at_the_same_steps_after_a_kill(
    whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "ar", "trainer.log_every=3")
    assert begin(command, Blow(signal.SIGKILL, "training", 5)).wait() == -signal.SIGKILL
    finish(command)
    assert steps_with("train/loss", tmp_path / "run") == steps_with("train/loss", whole("ar", "trainer.log_every=3"))


def test_tensorboard_shows_every_step_once_after_a_kill(data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = arguments(data, tmp_path / "run", "ar", "trainer.loggers=[csv,tensorboard]")
    assert begin(command, Blow(signal.SIGKILL, "training", 5)).wait() == -signal.SIGKILL
    finish(command)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))


def test_a_run_with_a_relative_folder_keeps_its_best_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = arguments(data, Path("run"), "ar", "trainer.max_steps=4")
    assert main(command) == 0
    assert main([*command, "trainer.max_steps=6"]) == 0
    assert "dirpath has changed" not in Path("run/logs/rank-0.log").read_text()


def test_a_run_folder_that_was_moved_keeps_its_best_checkpoint(data: Path, tmp_path: Path) -> None:
    """All validations of a run that does not learn give one number, and the first of them is the best."""
    still = "optimizer.learning_rate=1e-20"
    command = arguments(data, tmp_path / "here", "ar", still)
    assert begin(command, Blow(signal.SIGKILL, "training", 5)).wait() == -signal.SIGKILL
    assert checkpoint(tmp_path / "here", "best")["global_step"] == 3
    shutil.move(tmp_path / "here", tmp_path / "there")
    finish(arguments(data, tmp_path / "there", "ar", still))
    assert checkpoint(tmp_path / "there", "best")["global_step"] == 3


# Stopped


@pytest.mark.parametrize(
    ("number", "place", "step", "turn", "end"),
    [
        *[(number, "training", 3, 1, 4) for number in SIGNALS],
        *[(number, "validation", 3, 1, 4) for number in SIGNALS],
        (signal.SIGTERM, "training", 0, 0, 1),
        (signal.SIGTERM, "gradients", 4, 0, 5),
        (signal.SIGTERM, "validated", 3, 0, 4),
        (signal.SIGTERM, "saving best", 3, 0, 4),
        (signal.SIGTERM, "saving last", 4, 0, 5),
        (signal.SIGTERM, "saving last", 6, 0, 7),
    ],
)
def test_a_signal_ends_the_run_at_the_end_of_a_step_and_it_goes_on_as_if_it_had_not(
    number: signal.Signals, place: str, step: int, turn: int, end: int,
    whole: Callable[..., Path], data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    command = arguments(data, tmp_path / "run", "refusion")
    child = begin(command, Blow(number, place, step, turn))
    assert child.wait() == 130, child.output
    assert f"stopped at step {end}; continue with resume=auto" in child.output
    assert checkpoint(tmp_path / "run")["global_step"] == end
    finish(command)
    assert_same_run(tmp_path / "run", whole())


def test_a_stop_at_a_step_that_is_validated_waits_for_the_validation(
    whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "refusion")
    assert begin(command, Blow(signal.SIGTERM, "training", 2)).wait() == 130
    assert checkpoint(tmp_path / "run")["global_step"] == 3
    assert checkpoint_path(tmp_path / "run", "best").exists()
    finish(command)
    assert_same_run(tmp_path / "run", whole())


def test_a_run_that_is_stopped_in_its_last_step_is_validated_when_it_goes_on(
    whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "refusion")
    assert begin(command, Blow(signal.SIGTERM, "training", STEPS - 1)).wait() == 130
    assert checkpoint(tmp_path / "run")["global_step"] == STEPS
    finish(command)
    assert_same_run(tmp_path / "run", whole())


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("place", ["training", "validation"])
def test_a_signal_to_the_whole_group_lets_the_loaders_serve_the_step_to_its_end(
    place: str, number: signal.Signals, whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """A terminal's Ctrl-C and Slurm's signals reach the loader's processes as well."""
    command = arguments(data, tmp_path / "run", "refusion", "loader.num_workers=2")
    child = begin(command, Blow(number, place, 3, group=True))
    assert child.wait() == 130, child.output
    assert checkpoint(tmp_path / "run")["global_step"] == 4
    finish(command)
    assert_same_run(tmp_path / "run", whole())


TWICE = [Blow(signal.SIGTERM, "training", 3, 0), Blow(signal.SIGTERM, "training", 3, 1)]


def test_a_second_signal_ends_the_run_in_the_middle_of_a_step(
    whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    command = arguments(data, tmp_path / "run", "refusion")
    child = begin(command, *TWICE)
    assert child.wait() not in (0, -signal.SIGALRM)
    assert "stopped at step" not in child.output
    assert checkpoint(tmp_path / "run")["global_step"] == 2
    finish(command)
    assert_same_run(tmp_path / "run", whole())


def test_a_second_signal_gives_the_exit_code_of_an_interruption(data: Path, tmp_path: Path) -> None:
    assert begin(arguments(data, tmp_path / "run", "refusion"), *TWICE).wait() == 130


def test_resuming_a_finished_run_changes_nothing(whole: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    shutil.copytree(whole("ar"), tmp_path / "run")
    finish(arguments(data, tmp_path / "run", "ar"))
    assert_same_run(tmp_path / "run", whole("ar"))


# On other devices


def plan_of(data: Path) -> Plan:
    """The plan of the runs here, from the data alone."""
    return Plan(split(Shards(str(data)), 0.2)[0], seed=3, global_batch_size=8)


def seen(folder: Path, *, first: int, end: int) -> dict[str, Counter[tuple[int, int, int]]]:
    """(step, example, epoch) of what the ranks whose files lie in a folder trained on in these steps, by file."""
    lines = {path.name: path.read_text().splitlines() for path in folder.glob("*.seen")}
    visits = {name: [tuple(map(int, line.split())) for line in found] for name, found in lines.items()}
    return {name: Counter(visit for visit in found if first <= visit[0] < end) for name, found in visits.items()}


@pytest.mark.parametrize(
    ("objective", "number", "struck"),
    [("ar", signal.SIGTERM, [0]), ("refusion", signal.SIGTERM, [1]), ("fast_dllm_v2", signal.SIGKILL, [0, 1])],
    ids=["stop of rank 0", "stop of rank 1", "kill"],
)
def test_a_run_goes_on_with_two_ranks_and_with_four_and_sees_every_example_in_its_turn(
    objective: str, number: signal.Signals, struck: list[int], whole: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """One rank, stopped; two, of which one gets a signal, or both are killed as torchrun does; four to the end."""
    command = arguments(data, tmp_path / "run", objective, "loader.micro_batch_size=2")
    folders = [tmp_path / name for name in ("one", "two", "four")]
    for folder in folders:
        folder.mkdir()
    ends = []
    for ranks, step, folder in zip((1, 2, 4), (1, 4, None), folders, strict=True):
        blow = None if step is None else Blow(number if ranks == 2 else signal.SIGTERM, "training", step)
        blows = {rank: blow for rank in (struck if ranks == 2 else [0]) if blow}
        children = start_ranks(ranks, command, folder, blows=blows)
        codes = {child.wait() for child in children}
        expected = {None: 0, signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}[blow and blow.number]
        assert codes == {expected}, [child.output for child in children]
        ends.append(steps_saved(tmp_path / "run"))
    assert ends == [2, 5 if number == signal.SIGTERM else 4, STEPS]

    plan = plan_of(data)
    assert plan.epoch_size < STEPS * 8  # a second epoch begins
    for ranks, folder, first, end in zip((1, 2, 4), folders, [0, *ends], ends, strict=False):
        found = seen(folder, first=first, end=end)
        assert len(found) == ranks
        assert len({visits.total() for visits in found.values()}) == 1  # each its share
        planned = Counter((step, v.index, v.epoch) for step in range(first, end) for v in plan.step(step))
        assert sum(found.values(), Counter()) == planned

    for name, value in weights(whole(objective)).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=2e-5, rtol=1e-4)
    for one, two in zip(metrics(whole(objective)), metrics(tmp_path / "run"), strict=True):
        assert one["step"] == two["step"]
        for name in ("train/loss", "val/loss"):
            assert bool(one[name]) == bool(two[name])
            if one[name]:
                assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-3)


# With other settings


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that was killed in the seventh, saved at the sixth."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    assert begin(arguments(data, folder, "refusion"), Blow(signal.SIGKILL, "training", 6)).wait() == -signal.SIGKILL
    return folder


@pytest.fixture
def unfinished(killed: Path) -> Path:
    """The killed run at its place, as it was."""
    return as_it_was(killed)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.log_every=2"],
        ["trainer.validate_every=4"],
        ["trainer.checkpoint_every=1"],
        ["loader.num_workers=2"],
        ["loader.micro_batch_size=2"],
        ["loader.micro_batch_size=8"],
        PACKED,
        ["loader.pad_to_multiple=1"],
        ["loader.max_validation_examples=4"],
        ["trainer.loggers=[tensorboard]"],
        ["trainer.progress=lines"],
        ["backbone.gradient_checkpointing=true"],
        ["resume=force"],
    ],
    ids=" ".join,
)
def test_settings_that_change_no_step_may_change(
    changes: list[str], whole: Callable[..., Path], data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(data, unfinished, "refusion", *changes))
    assert "although" not in capsys.readouterr().out
    for name, value in weights(whole()).items():
        torch.testing.assert_close(weights(unfinished)[name], value, atol=2e-5, rtol=1e-4)


def test_a_run_may_be_made_longer(data: Path, unfinished: Path) -> None:
    run(*arguments(data, unfinished, "refusion", "trainer.max_steps=10"))
    assert checkpoint(unfinished)["global_step"] == 10


REFUSED = {
    "seed=4": "seed was 3, is 4",
    "objective=ar": "objective._target_ was 'objectives.refusion.ReFusion', is "
    "'objectives.autoregressive.Autoregressive'",
    "objective.mdm_weight=0.5": "objective.mdm_weight was 1.0, is 0.5",
    "objective.slot_sizes=[4,8]": "objective.slot_sizes was [4, 8, 16, 32], is [4, 8]",
    "optimizer.learning_rate=0.5": "optimizer.learning_rate was 0.003, is 0.5",
    "optimizer.schedule=constant": "optimizer.schedule was 'cosine', is 'constant'",
    "trainer.global_batch_size=16": "trainer.global_batch_size was 8, is 16",
    "trainer.gradient_clip=null": "trainer.gradient_clip was 1.0, is None",
    "loader.validation_fraction=0.3": "loader.validation_fraction was 0.2, is 0.3",
    "loader.max_training_examples=20": "loader.max_training_examples was None, is 20",
    "loader.mask_rates=stratified": "loader.mask_rates was 'independent', is 'stratified'",
    "++loader.mixture.files=2.0": "loader.mixture.files was None, is 2.0",
}


@pytest.mark.parametrize("change", REFUSED)
def test_settings_that_change_a_step_are_refused_with_both_values(
    change: str, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(unfinished / "checkpoints")
    assert main(arguments(data, unfinished, "refusion", change)) == 2
    message = capsys.readouterr().err
    assert f"resume: the run has changed: {REFUSED[change]}" in message
    assert message.count(" was ") == 1 or change == "objective=ar"  # which has other settings as well
    assert "choose another run folder, or go on all the same with resume=force" in message
    assert bytes_of(unfinished / "checkpoints") == before


@pytest.fixture(scope="module")
def other_data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("other"), tokenizer_folder, answer="It is {}.")


def test_other_data_are_refused(
    data: Path, other_data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (Shards(str(folder)).manifest.content_fingerprint for folder in (data, other_data))
    assert main(arguments(other_data, unfinished, "refusion")) == 2
    assert f"resume: the run has changed: data_fingerprint was '{one}', is '{two}'; choose" in capsys.readouterr().err


def test_the_same_data_may_lie_elsewhere(data: Path, unfinished: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "elsewhere")
    run(*arguments(tmp_path / "elsewhere", unfinished, "refusion"))


def test_all_that_has_changed_is_told_at_once(
    other_data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [change for change in REFUSED if change != "objective=ar"]
    assert main(arguments(other_data, unfinished, "refusion", *changes)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "the run has changed" in line]
    assert line.count(" was ") == len(changes) + 1
    assert "data_fingerprint was " in line
    for change in changes:
        assert REFUSED[change] in line


@pytest.mark.parametrize("change", REFUSED)
def test_force_goes_on_with_changed_settings_and_says_so(
    change: str, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(data, unfinished, "refusion", change, "resume=force"))
    assert f"resume=force, although {REFUSED[change]}" in capsys.readouterr().out
    assert checkpoint(unfinished)["global_step"] == STEPS


def test_what_was_forced_is_the_run_from_then_on(
    other_data: Path, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(other_data, unfinished, "refusion", "seed=4", "resume=force"))
    assert "resume=force, although data_fingerprint was " in (told := capsys.readouterr().out)
    assert "seed was 3, is 4" in told
    run(*arguments(other_data, unfinished, "refusion", "seed=4", "trainer.max_steps=10"))
    assert main(arguments(data, unfinished, "refusion")) == 2
    assert "seed was 4, is 3" in capsys.readouterr().err


@pytest.mark.parametrize("resume", ["auto", "force"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hidden_size=64", "hidden_size was 32, is 64"),
        ("num_hidden_layers=3", "num_hidden_layers was 2, is 3"),
        ("num_attention_heads=2", "num_attention_heads was 4, is 2"),
        ("model_type=llama", "model_type was 'qwen3', is 'llama'"),
        ("intermediate_size=64", "intermediate_size was 48, is 64"),
        ("num_key_value_heads=1", "num_key_value_heads was 2, is 1"),
        ("head_dim=16", "head_dim was 8, is 16"),
        ("tie_word_embeddings=false", "tie_word_embeddings was True, is False"),
    ],
)
def test_a_model_of_another_shape_is_refused_even_by_force(
    change: str, message: str, resume: str, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(unfinished / "checkpoints")
    assert main(arguments(data, unfinished, "refusion", f"++backbone.architecture.{change}", f"resume={resume}")) == 2
    told = capsys.readouterr().err
    assert "resume: the checkpoint's weights do not fit (" in told
    assert message in told
    assert bytes_of(unfinished / "checkpoints") == before


def test_a_refused_resume_leaves_the_config_of_the_run(data: Path, unfinished: Path) -> None:
    before = (unfinished / "config.json").read_bytes()
    assert main(arguments(data, unfinished, "refusion", "seed=4")) == 2
    assert (unfinished / "config.json").read_bytes() == before


def test_a_run_that_exists_is_not_started_anew(
    data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(data, unfinished, "refusion", "resume=null")) == 2
    assert "it holds a checkpoint already; continue it with resume=auto" in capsys.readouterr().err
