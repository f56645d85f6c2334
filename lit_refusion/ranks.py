"""What the processes of a run say: rank 0 speaks, all keep a log, and all must be about the same thing."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lit_refusion.errors import UserError
from lit_refusion.resume import describe, flat

LOGGER = logging.getLogger("lit_refusion")


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Keep `rank-N.log` in `folder`: start, warnings, the traceback of an error, and of a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [LOGGER, logging.getLogger("lightning.pytorch"), logging.getLogger("py.warnings")]
    for logger in loggers:
        logger.addHandler(handler)
    level, had_faulthandler = LOGGER.level, faulthandler.is_enabled()
    LOGGER.setLevel(logging.INFO)
    logging.captureWarnings(True)
    assert handler.stream is not None
    faulthandler.enable(handler.stream.fileno())
    LOGGER.info("rank %d on %s, process %d, torch %s", rank, platform.node(), os.getpid(), torch.__version__)
    try:
        yield
        LOGGER.info("end")
    except BaseException:
        LOGGER.error("%s", traceback.format_exc())
        raise
    finally:
        faulthandler.disable()
        if had_faulthandler and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        LOGGER.setLevel(level)
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def check_ranks_agree(record: Mapping[str, Any]) -> None:
    """Compare config and data of all ranks, before the first step.

    Raises:
        UserError: names the rank that differs, and in what.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()
    if len(set(_gather(digest))) == 1:
        return
    first, *others = (flat("", item) for item in _gather(record))
    for rank, other in enumerate(others, start=1):
        pairs = {name.lstrip("."): (first.get(name), other.get(name)) for name in {**first, **other}}
        found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if found:
            raise UserError(
                f"rank {rank} runs with other settings or data than rank 0: "
                f"{describe(found, 'has', f'on rank {rank}')}; start all ranks with the same command, code and data"
            )


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
