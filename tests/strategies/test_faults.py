"""A rank dies, raises or loses the network: the job ends with an error that names it, and goes on exactly."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lit_refusion.run_folder import checkpoint_path, load_checkpoint
from tests.children import command, prepared_data, run, weights
from tests.conftest import REPOSITORY

STEPS = 6
BOUND = 120
"""Seconds after which a job that hangs fails its test; the process group gives up after 30."""


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("faults"), tokenizer_folder)


def arguments(data: Path, folder: Path, strategy: str = "ddp") -> list[str]:
    timeout = [] if strategy == "single" else ["strategy.timeout_minutes=0.5"]
    settings = ["loader.micro_batch_size=2", "trainer.validate_every=100", "trainer.loggers=[]", "resume=auto"]
    return command(data, folder, "refusion", f"strategy={strategy}", *timeout, f"trainer.max_steps={STEPS}", *settings)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(*arguments(data, folder, "single"))
    return folder


def torchrun(
    arguments: list[str], marker: Path, *options: str, fault: str = "none", prefix: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """A job of two ranks in the background."""
    program = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.strategies.faulty"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FAULT": fault, "MARKER": str(marker)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a restart finds the addresses of dead ranks
    return subprocess.Popen(
        [*prefix, *program, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def one_node() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]


def assert_equal(folder: Path, whole: Path) -> None:
    expected = weights(whole)
    for name, found in weights(folder).items():
        torch.testing.assert_close(found, expected[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("kill", ["rank      : 1", "Signal 9 (SIGKILL)"]), ("raise", ["rank      : 1", "the fault of this test"])],
)
def test_a_rank_that_fails_ends_the_job_which_goes_on_exactly(
    fault: str, cause: list[str], whole: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = torchrun(arguments(data, folder), tmp_path / "marker", *one_node(), fault=fault)
    output, _ = job.communicate(timeout=BOUND)
    assert job.returncode != 0
    for part in cause:
        assert part in output
    assert load_checkpoint(checkpoint_path(folder, "last"))["global_step"] == 2
    if fault == "raise":  # it had the time to write it down
        assert "the fault of this test" in (folder / "logs" / "rank-1.log").read_text()
    job = torchrun(arguments(data, folder), tmp_path / "marker", *one_node())
    output, _ = job.communicate(timeout=BOUND)
    assert job.returncode == 0, output[-3000:]
    assert_equal(folder, whole)


def test_torchrun_restarts_the_job_by_itself(whole: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = torchrun(
        arguments(data, folder),
        tmp_path / "marker",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        fault="kill",
    )
    output, _ = job.communicate(timeout=BOUND)
    assert job.returncode == 0, output[-3000:]
    assert (tmp_path / "marker").exists()
    assert_equal(folder, whole)


def test_ranks_with_other_settings_are_refused(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.sh"
    command = " ".join(f"'{text}'" for text in [sys.executable, "-m", "tests.strategies.faulty"])
    script.write_text(f'exec {command} "$@" seed=$RANK\n')
    program = [sys.executable, "-m", "torch.distributed.run", *one_node(), "--no-python", "bash", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": "none", "MARKER": ""}
    done = subprocess.run(
        [*program, *arguments(data, tmp_path / "run")],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=BOUND,
    )  # fmt: skip
    assert done.returncode != 0
    message = "rank 1 runs with other settings or data than rank 0: config.seed has 0, on rank 1 1; start all ranks"
    assert message in done.stderr


# Two nodes


@pytest.fixture
def nodes() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable; (first, second, the cable's end)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = uuid.uuid4().hex[:6]
    first, second, one, two = f"lr{tag}a", f"lr{tag}b", f"v{tag}a", f"v{tag}b"
    try:
        for name in (first, second):
            _ip("netns", "add", name)
        _ip("link", "add", one, "type", "veth", "peer", "name", two)
    except subprocess.CalledProcessError as error:
        _remove(first, second)
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    try:
        for name, cable, address in ((first, one, "10.77.0.1/24"), (second, two, "10.77.0.2/24")):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", address, "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield first, second, two
    finally:
        _remove(first, second)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _remove(*names: str) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def node_jobs(
    nodes: tuple[str, str, str], arguments: list[str], marker: Path, fault: str = "none"
) -> list[subprocess.Popen[str]]:
    return [
        torchrun(
            arguments, marker, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
            "--master-addr=10.77.0.1", "--master-port=29500",
            fault=fault, prefix=("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={nodes[2][:-1]}{'ab'[rank]}"),
        )
        for rank, name in enumerate(nodes[:2])
    ]  # fmt: skip


def test_two_nodes_equal_one_process(nodes: tuple[str, str, str], whole: Path, data: Path, tmp_path: Path) -> None:
    for job in node_jobs(nodes, arguments(data, tmp_path / "run"), tmp_path / "marker"):
        output, _ = job.communicate(timeout=BOUND)
        assert job.returncode == 0, output[-3000:]
    assert_equal(tmp_path / "run", whole)


def test_a_node_whose_network_is_cut_ends_the_job_which_goes_on_exactly(
    nodes: tuple[str, str, str], whole: Path, data: Path, tmp_path: Path
) -> None:
    """The second node pulls its own cable in the middle of a step; both ends have to notice."""
    folder = tmp_path / "run"
    jobs = node_jobs(nodes, arguments(data, folder), tmp_path / "marker", fault=f"cut {nodes[2]}")
    outputs = [job.communicate(timeout=BOUND)[0] for job in jobs]
    assert (tmp_path / "marker").exists()
    assert all(job.returncode != 0 for job in jobs), outputs
    assert load_checkpoint(checkpoint_path(folder, "last"))["global_step"] == 2
    _ip("-n", nodes[1], "link", "set", nodes[2], "up")
    for job in node_jobs(nodes, arguments(data, folder), tmp_path / "marker"):
        output, _ = job.communicate(timeout=BOUND)
        assert job.returncode == 0, output[-3000:]
    assert_equal(folder, whole)
