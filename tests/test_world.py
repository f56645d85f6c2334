"""How many processes there are: launchers' variables, settings, and what happens where they contradict each other."""

from __future__ import annotations

import re

import pytest
import torch

from lit_refusion.errors import UserError
from lit_refusion.world import World, find_world

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32"}
SLURM = {"SLURM_NTASKS": "32", "SLURM_NNODES": "4", "SLURM_JOB_NAME": "refusion"}


def world(devices: int | str, num_nodes: int | str, environment: dict[str, str], *, on_cuda: bool = False) -> World:
    return find_world(devices, num_nodes, on_cuda=on_cuda, environment=environment)


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
@pytest.mark.parametrize(("devices", "num_nodes"), [("auto", "auto"), (8, "auto"), ("auto", 4), (8, 4)])
def test_the_launcher_decides_and_settings_may_agree(
    environment: dict[str, str], devices: int | str, num_nodes: int | str
) -> None:
    found = world(devices, num_nodes, environment)
    assert found == World(devices=8, num_nodes=4)
    assert found.size == 32


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
@pytest.mark.parametrize(
    ("devices", "num_nodes", "key", "remedy"),
    [
        (4, "auto", "trainer.devices=4", "trainer.devices=8 or auto"),
        ("auto", 1, "trainer.num_nodes=1", "trainer.num_nodes=4 or auto"),
        (32, 1, "trainer.devices=32", "trainer.devices=8 or auto"),
    ],
)
def test_a_contradiction_names_the_setting_the_launcher_and_the_remedy(
    environment: dict[str, str], devices: int | str, num_nodes: int | str, key: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=re.escape(key)) as caught:
        world(devices, num_nodes, environment)
    assert "started 4 x 8 processes" in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_an_interactive_slurm_shell_is_no_launcher(name: str) -> None:
    assert world(2, 1, {**SLURM, "SLURM_JOB_NAME": name}) == World(devices=2, num_nodes=1)
    assert world("auto", "auto", {**SLURM, "SLURM_JOB_NAME": name}) == World(devices=1, num_nodes=1)


def test_a_slurm_job_without_a_number_of_nodes_has_one() -> None:
    assert world("auto", "auto", {"SLURM_NTASKS": "2"}) == World(devices=2, num_nodes=1)


def test_a_slurm_allocation_without_tasks_is_no_launcher() -> None:
    assert world("auto", "auto", {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}) == World(devices=1, num_nodes=1)


def test_torchrun_inside_slurm_counts_its_own_processes() -> None:
    one_task_a_node = {**SLURM, "SLURM_NTASKS": "4"}
    assert world("auto", "auto", {**one_task_a_node, **TORCHRUN}) == World(devices=8, num_nodes=4)


def test_auto_on_the_cpu_is_one_process() -> None:
    assert world("auto", "auto", {}) == World(devices=1, num_nodes=1)


def test_auto_on_cuda_is_every_device_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert world("auto", 2, {}, on_cuda=True) == World(devices=5, num_nodes=2)


@pytest.mark.parametrize(("devices", "num_nodes"), [(1, 1), (8, 1), (8, 16)])
def test_without_a_launcher_the_settings_decide(devices: int, num_nodes: int) -> None:
    found = world(devices, num_nodes, {})
    assert found == World(devices=devices, num_nodes=num_nodes)
    assert found.size == devices * num_nodes


def test_the_environment_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert find_world("auto", "auto", on_cuda=False) == World(devices=8, num_nodes=4)


@pytest.mark.parametrize(("tasks", "nodes"), [(3, 2), (1, 2)])
def test_tasks_that_do_not_spread_evenly_are_refused(tasks: int, nodes: int) -> None:
    with pytest.raises(UserError):
        world("auto", "auto", {"SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes)})
