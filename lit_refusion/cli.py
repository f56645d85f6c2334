"""The command line: `lit-refusion COMMAND group=choice key=value ...`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from lit_refusion.config import choices, config_folder
from lit_refusion.errors import UserError

COMMANDS = {
    "prepare": "turn raw records into shards of tokens",
    "preview": "show what an objective trains on: roles, weights, attention mask",
    "train": "train a backbone with an objective",
    "generate": "decode a prompt with an exported model",
    "evaluate": "decode and score a task with an exported model",
    "ablate": "train, evaluate and compare the arms of an experiment, everything else equal",
    "compare": "report on runs: scores, speed, cost, and whether the comparison is controlled",
    "analyze": "study an exported model: dependency (of masked tokens on each other)",
    "likelihood": "measure how likely an exported model finds the responses of prepared data",
    "export": "write a run's model as a Hugging Face folder",
    "doctor": "check versions, devices, limits, communication and disk of this machine",
    "demo": "prepare, train, decode and compare on the embedded data",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 2 bad input, 130 interrupted)."""
    parser = _parser()
    # Settings may stand on both sides of an option; argparse takes only the first run of them.
    arguments, rest = parser.parse_known_args(argv)
    if options := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {options[0]}; see lit-refusion {arguments.command} --help")
    arguments.overrides += rest
    if not arguments.debug:
        _quiet_libraries()
    command = importlib.import_module(f"lit_refusion.commands.{arguments.command}")
    try:
        return command.run(arguments)
    except (UserError, OSError) as error:
        if arguments.debug:
            raise
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"lit-refusion {arguments.command}: error{rank}: {error}", file=sys.stderr)
        _tell_torchrun(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _tell_torchrun(error: Exception) -> None:
    """Leave the reason for torchrun's own report, which otherwise knows the exit code only."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _quiet_libraries() -> None:
    """Only warnings from the libraries: their banners and weight-loading bars drown our own lines."""
    from lightning.pytorch import _logger  # sets its own level when it is imported, so import it first
    from transformers.utils.logging import disable_progress_bar

    _logger.setLevel(logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()


def _parser() -> argparse.ArgumentParser:
    groups = [
        f"  {path.name}: {', '.join(choices(path.name))}" for path in sorted(config_folder().iterdir()) if path.is_dir()
    ]
    parser = argparse.ArgumentParser(
        prog="lit-refusion",
        description="Train and decode parallel language models with pluggable objectives.",
        epilog="config groups and their choices:\n" + "\n".join(groups),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("overrides", nargs="*", metavar="key=value", help=_positional(name))
        sub.add_argument("--config-dir", help="folder of your own YAML groups, laid out like conf/")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.add_argument("--show-config", action="store_true", help="print the resolved settings and stop")
        if name == "generate":
            sub.add_argument("--show-steps", action="store_true", help="print what every forward pass committed")
            sub.add_argument("--chat", action="store_true", help="talk with the model, line by line")
            sub.add_argument("--stream", action="store_true", help="print the answer while it is decoded")
            sub.add_argument("--html", metavar="FILE", help="write a page that replays the decoding")
    return parser


def _positional(command: str) -> str:
    return "settings, in Hydra's override grammar" + ("; words without '=' are runs" if command == "compare" else "")


if __name__ == "__main__":
    sys.exit(main())
