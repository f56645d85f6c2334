"""How many processes there are, on how many machines: from the launcher's environment or from the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lit_refusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class World:
    """Devices per machine, and machines."""

    devices: int
    num_nodes: int

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.devices * self.num_nodes


def find_world(
    devices: int | str, num_nodes: int | str, *, on_cuda: bool, environment: Mapping[str, str] = os.environ
) -> World:
    """The world of the settings; what they leave "auto" is the launcher's, torchrun's or Slurm's, or this machine's.

    Raises:
        UserError: settings and launcher contradict each other.
    """
    launched = _torchrun(environment) or _slurm(environment)
    if launched is None:
        here = (torch.cuda.device_count() if on_cuda else 1) if devices == "auto" else int(devices)
        return World(devices=here, num_nodes=1 if num_nodes == "auto" else int(num_nodes))
    for name, given, found in (
        ("devices", devices, launched.devices),
        ("num_nodes", num_nodes, launched.num_nodes),
    ):
        if given not in ("auto", found):
            raise UserError(
                f"trainer.{name}={given}: the launcher started {launched.num_nodes} x {launched.devices} processes; "
                f"give trainer.{name}={found} or auto"
            )
    return launched


def _torchrun(environment: Mapping[str, str]) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    local = int(environment["LOCAL_WORLD_SIZE"])
    return World(devices=local, num_nodes=int(environment["WORLD_SIZE"]) // local)


def _slurm(environment: Mapping[str, str]) -> World | None:
    """A job step that `srun` started; an interactive shell has no tasks of its own."""
    if "SLURM_NTASKS" not in environment or environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    nodes, tasks = int(environment.get("SLURM_NNODES", 1)), int(environment["SLURM_NTASKS"])
    if tasks % nodes:
        raise UserError(f"SLURM_NTASKS={tasks}: they do not spread evenly over {nodes} nodes; use --ntasks-per-node")
    return World(devices=tasks // nodes, num_nodes=nodes)
