"""`lit-refusion train` under torchrun, with a fault on one rank the first time: `python -m tests.strategies.faulty`.

FAULT: "kill" (SIGKILL), "raise" (an exception), "cut CABLE" (of this node's network) or "none"; MARKER: a file that
says that the fault has happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lit_refusion.cli import main
from lit_refusion.module import TrainingModule

RANK, STEP = "1", 3


def arm(fault: str, marker: Path) -> None:
    """Strike in the middle of step STEP (from 0) of rank RANK."""
    original = TrainingModule.training_step

    def training_step(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        if self.global_step == STEP and not marker.exists():
            marker.touch()
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise RuntimeError("the fault of this test")
            subprocess.run(["ip", "link", "set", fault.removeprefix("cut "), "down"], check=True)
        return original(self, batch, batch_idx)

    TrainingModule.training_step = training_step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == RANK and os.environ["FAULT"] != "none":
        arm(os.environ["FAULT"], Path(os.environ["MARKER"]))
    sys.exit(main(sys.argv[1:]))
