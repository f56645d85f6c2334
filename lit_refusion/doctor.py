"""Whether this machine can do what the project asks of it: one check a line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from lit_refusion.evaluation.sandbox import describe

MIN_OPEN_FILES = 1024
MIN_SHARED_MEMORY = 2**28
PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "hydra-core", "omegaconf", "webdataset")


@dataclass(frozen=True)
class Finding:
    """One line; a problem makes `doctor` exit with 1, what is only missing does not."""

    name: str
    text: str
    is_problem: bool = False

    def __str__(self) -> str:
        return f"{'FAIL' if self.is_problem else 'ok':4}  {self.name}: {self.text}"


def examine(run: Path) -> list[Finding]:
    """All checks; `run` is where runs will be written."""
    checks: list[Callable[[], Finding]] = [
        versions,
        devices,
        lambda: optional("deepspeed", "strategy=deepspeed_...", "deepspeed"),
        lambda: optional("flash_attn", "backbone.attention=flash_attention_2", "flash"),
        lambda: optional("liger_kernel", "backbone.cross_entropy=liger", "liger"),
        flex_attention,
        compiler,
        lambda: Finding("sandbox", f"programs that a model writes run with: {describe()}"),
        shared_memory,
        open_files,
        all_reduce,
        lambda: writable(run),
    ]
    return [check() for check in checks]


def versions() -> Finding:
    """Python and the packages that everything stands on."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return Finding("versions", f"Python {sys.version.split()[0]}, {', '.join(found)}")


def devices() -> Finding:
    """GPUs, or cores."""
    if not torch.cuda.is_available():
        return Finding("devices", f"no CUDA device; {os.cpu_count()} CPU cores")
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    text = ", ".join(f"{item.name} ({item.total_memory / 2**30:.0f} GiB)" for item in names)
    return Finding("devices", f"{text}; bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}")


def optional(module: str, use: str, extra: str) -> Finding:
    """A package that only some settings need."""
    if importlib.util.find_spec(module) is None:
        return Finding(module, f"not installed; {use} needs pip install 'lit-refusion[{extra}]'")
    return Finding(module, f"{importlib.metadata.version(module.replace('_', '-'))}, for {use}")


def flex_attention() -> Finding:
    """FlexAttention trains on CUDA only."""
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return Finding("flex_attention", "not in this torch; use backbone.attention=sdpa")
    where = "trains here" if torch.cuda.is_available() else "no backward pass without CUDA; sdpa is used here"
    return Finding("flex_attention", where)


def compiler() -> Finding:
    """torch.compile needs a C++ compiler on the CPU."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return Finding("compiler", found or "none; backbone.compile=true needs one on the CPU")


def shared_memory() -> Finding:
    """Loader processes hand batches over through /dev/shm."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm on this system")
    free = shutil.disk_usage(path).free
    text = f"{free / 2**20:,.0f} MiB free in {path}"
    if free >= MIN_SHARED_MEMORY:
        return Finding("shared memory", text)
    remedy = "loader.num_workers > 0 may be killed; enlarge it (docker run --shm-size=8g)"
    return Finding("shared memory", f"{text}; {remedy}", is_problem=True)


def open_files() -> Finding:
    """Shards, loader processes and sockets all count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} (at most {hard:,})"
    if soft >= MIN_OPEN_FILES:
        return Finding("open files", text)
    return Finding("open files", f"{text}; ulimit -n {min(hard, 65536)}", is_problem=True)


def all_reduce() -> Finding:
    """Two processes that add their ranks over gloo, within a minute."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:  # they meet in a file: a free port might be taken meanwhile
        store = f"file://{folder}/store"
        processes = [context.Process(target=_reduce, args=(rank, store), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    if codes == [0, 0]:
        return Finding("all-reduce", "two processes over gloo")
    text = f"two processes over gloo failed (exit codes {codes}); look at firewall and GLOO_SOCKET_IFNAME"
    return Finding("all-reduce", text, is_problem=True)


def _reduce(rank: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    value = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(value)
    torch.distributed.destroy_process_group()  # its threads abort a process that ends with them
    sys.exit(0 if value.item() == 3 else 1)


def writable(run: Path) -> Finding:
    """Whether runs can be written, and how much fits."""
    parent = next(path for path in (run, *run.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=parent) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("run folder", f"{parent}: cannot write there: {error.strerror}", is_problem=True)
    free = shutil.disk_usage(parent).free
    return Finding("run folder", f"{parent}: writable, {free / 2**30:,.0f} GiB free")
