"""Hostile programs, each with the outcome it gets, with namespaces and without; nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from lit_refusion.errors import UserError
from lit_refusion.evaluation import landlock, sandbox
from lit_refusion.evaluation.sandbox import Limits, Outcome, Program, describe, run_program, run_programs
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

LIMITS = Limits(wall_seconds=4.0, cpu_seconds=1, memory_bytes=2**29, file_bytes=2**22, processes=8, output_bytes=4096)
SLACK_SECONDS = 8.0
WRONG = "def f(x):\n    return x\n"
TESTS = "assert f(1) == 2\n"


def limits(**changes: float) -> Limits:
    return Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["namespaces", "plain"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of confinement; without namespaces root needs an interpreter that every user may read."""
    if request.param == "namespaces":
        if not sandbox.has_namespaces():
            pytest.skip("no namespaces here")
        return "namespaces"
    interpreter = readable_interpreter()
    if interpreter is None:
        pytest.skip("no interpreter that an unprivileged user may read")
    monkeypatch.setattr(sandbox, "has_namespaces", lambda: False)
    monkeypatch.setattr(sandbox, "_interpreter", lambda: interpreter)
    return "plain"


@functools.cache
def readable_interpreter() -> str | None:
    """The first interpreter that runs a program without namespaces."""
    for path in map(os.path.realpath, (sandbox._interpreter(), "/usr/bin/python3", "/usr/local/bin/python3")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sandbox, "_interpreter", lambda path=path: path)
            if os.path.exists(path) and sandbox._run(Program(source=""), LIMITS, has_namespaces=False)[0] == "passed":
                return path
    return None


@functools.cache
def is_possible() -> bool:
    try:
        return run_program(Program(source=""), LIMITS).status == "passed"
    except UserError:
        return False


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    if not is_possible():
        pytest.skip("programs cannot be run here, nor are they")
    before = children(os.getpid())  # of other tests
    yield
    assert set(children(os.getpid())) <= set(before)


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def running(marker: str) -> list[str]:
    """Processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def outcome(source: str, *, tests: str = "", entry_point: str | None = None, **changes: float) -> Outcome:
    """The outcome, in bounded time."""
    start = time.monotonic()
    found = run_program(Program(source=source, tests=tests, entry_point=entry_point), limits(**changes))
    assert time.monotonic() - start < changes.get("wall_seconds", LIMITS.wall_seconds) + SLACK_SECONDS
    return found


# Ordinary programs


def test_a_right_program_passes_and_a_wrong_one_says_where() -> None:
    assert outcome("def f(x):\n    return x + 1\n", tests=TESTS) == Outcome(status="passed", message="")
    assert outcome(WRONG, tests="import math\n" + TESTS).message == "AssertionError (line 2 of the tests)"
    assert outcome("x = 1\ny = z", tests=TESTS).message == "NameError: name 'z' is not defined (line 2 of the program)"
    assert outcome("def f(:", tests=TESTS).message.startswith("SyntaxError: ")


def test_setup_comes_between_program_and_tests() -> None:
    program = Program(source="def f():\n    return Node()\nNode = 1", setup="class Node: pass", tests="assert f() != 1")
    assert run_program(program, LIMITS).status == "passed"


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(x=1)",
        "import collections, pickle\nA = collections.namedtuple('A', 'x')\nassert pickle.loads(pickle.dumps(A(1))).x",
        "import tempfile\nwith tempfile.NamedTemporaryFile() as file:\n    file.write(b'x' * 1000)",
        "import subprocess, sys\nassert subprocess.check_output([sys.executable, '-c', 'print(5)']) == b'5\\n'",
        "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()",
        "import signal\nsignal.alarm(5)",
        "if __name__ == '__main__':\n    raise Exception",
        "assert hash('abc') == hash('abc') and [*{'a', 'b', 'c'}]",
        "import os\nassert os.listdir() == [] and os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR']",
    ],
)
def test_the_standard_library_works(source: str) -> None:
    assert outcome(source, tests="assert 1") == Outcome(status="passed", message="")


def test_sets_have_the_same_order_every_time() -> None:
    found = {outcome("raise Exception(list({'a', 'b', 'c', 'd', 'e'}))").message for _ in range(3)}
    assert len(found) == 1


def test_many_programs_come_back_in_order() -> None:
    programs = [Program(source=f"x = {number}", tests="assert x % 3") for number in range(9)]
    found = [item.status for item in run_programs(programs, LIMITS, num_workers=3)]
    assert found == ["failed", "passed", "passed"] * 3


# Using too much


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("source", "statuses"),
    [
        ("while True: pass", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("import time\ntime.sleep(1000)", "timeout"),
        ("x = bytearray(10 * 2**30)", "memory"),
        ("x = []\nwhile True: x.append(bytes(2**20))", "memory"),
        ("x = 'a'\nwhile True: x += x", "memory"),
        ("f = lambda: f()\nf()", "failed"),
        ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", "memory killed failed timeout"),
        ("x = (" * 100_000, "failed memory"),
        ("import os\nwhile True: os.fork()", "failed"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        (
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
            "failed memory",
        ),
        ("file = open('x', 'wb')\nwhile True: file.write(bytes(2**20))", "failed"),
        ("n = 0\nwhile True:\n    open(str(n := n + 1), 'wb').write(bytes(2**20))", "failed killed"),
        ("open(0).read()\ninput()", "failed"),
        ("files = [open('/dev/null') for _ in range(1000)]", "failed"),
    ],
)
def test_limits(source: str, statuses: str) -> None:
    found = outcome(source, tests="assert 1", wall_seconds=2.2)
    assert found.status in statuses.split(), found
    assert found.message or found.status == "memory"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_gigabyte_of_output_is_dropped(stream: str) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    source = f"import sys\nfor _ in range(1024):\n    sys.{stream}.write('x' * 2**20)"
    assert outcome(source, wall_seconds=30.0, cpu_seconds=30).status == "passed"
    assert resident_bytes() - before < 20 * 2**20


# Ending early, and passing without being right


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys\nsys.exit(0)", "exited"),
        ("import os\nos._exit(0)", "exited"),
        ("raise SystemExit", "exited"),
        ("def f(x): raise SystemExit(0)", "exited"),
        ("import os\ndef f(x): os._exit(0)", "exited"),
        ("import os\nos.execv('/bin/true', ['true'])", "exited"),
        ("import os\nos.closerange(0, 256)", "exited"),
        ("import os\nif os.fork(): os._exit(0)\ndef f(x): return 1", "exited failed"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("import os\nos.killpg(0, 9)", "killed"),
        ("import os\nos.abort()", "killed"),
        ("import ctypes\nctypes.string_at(0)", "killed"),
        ("import threading\nthread = threading.Thread(target=exit)\nthread.start()\n" + WRONG, "failed"),
        ("import atexit, os\natexit.register(os._exit, 0)\n" + WRONG, "failed"),
        ("import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n" + WRONG, "failed"),
        ("print('passed')\n" + WRONG, "failed"),
    ],
)
def test_ending_early_is_not_passing(source: str, status: str) -> None:
    assert outcome(source, tests=TESTS).status in status.split()


FORGERIES = {
    "report": """
import os
for pipe in range(3, 256):
    try: os.write(pipe, b'\\npassed\\n')
    except OSError: pass
os._exit(0)
""",
    "assertion": """
import builtins
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
builtins.BaseException = int
""",
    "everything": """
import builtins
for name in dir(builtins):
    if name != '__import__' and not name.startswith('__b'):
        setattr(builtins, name, lambda *a, **k: None)
""",
    "trace": """
import sys
def trace(frame, event, argument):
    if frame.f_code.co_filename == '<tests>' and 'check' in frame.f_globals:
        frame.f_globals['check'] = print
    return trace
sys.settrace(trace)
""",
    "function": "import builtins\nbuiltins.abs = lambda x: 0",
    "exec": "import builtins\nbuiltins.exec = builtins.compile = builtins.vars = builtins.dict = lambda *a, **k: {}",
    "write": "import os\nreal = os.write\nos.write = lambda to, data: real(to, data.replace(b'failed', b'passed'))",
    "exit": "import os\nos._exit = lambda code: None",
    "main": "import __main__\nfor name in list(vars(__main__)):\n    vars(__main__)[name] = lambda *_: ('passed', '')",
    "caller": "import sys\nsys._getframe(1).f_globals['describe'] = lambda error: ('passed', '')",
    "check": "def check(*_): pass\n" + WRONG,
    "builtins of the namespace": "__builtins__ = {'AssertionError': SystemExit, 'abs': lambda x: 0}",
    "modules": "import sys\nsys.modules['builtins'] = sys.modules['os'] = sys.modules['sys'] = None",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forging_does_not_pass(name: str) -> None:
    found = outcome(WRONG + FORGERIES[name], tests="def check(f):\n    assert abs(f(1) - 2) < 1e-9\ncheck(f)\n")
    assert found.status in ("failed", "exited", "tampered"), found
    if name == "report":
        assert found.status == "tampered"


def test_built_in_names_are_pythons_for_the_tests_of_an_entry_point() -> None:
    source = "def abs(x):\n    return 0\ndef all(x):\n    return True\ndef f(x):\n    return abs(x)\n"
    tests = "def check(candidate):\n    assert abs(candidate(1) - 5) < 1e-9\ncheck(f)"
    assert outcome(source, tests=tests, entry_point="f").status == "failed"
    assert outcome(source, tests=tests.replace("5", "0"), entry_point="f").status == "passed"  # f still has its own abs
    assert outcome("def sum(a, b):\n    return a * b", tests="assert sum(3, 4) == 12").status == "passed"
    assert outcome("def sum(a, b):\n    return 7", tests="assert sum(3, 4) == 7", entry_point="sum").status == "passed"


def test_what_tests_cannot_tell_passes() -> None:
    source = "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()"
    assert outcome(source, tests=TESTS).status == "passed"


# Reaching out


@pytest.mark.usefixtures("mode")
def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    marker = f"written-{uuid4().hex}"
    for folder in (REPOSITORY, Path("/etc"), Path("/"), Path("/usr"), Path("/dev"), tmp_path, Path(sys.prefix)):
        assert outcome(f"open('{folder / marker}', 'w')").status == "failed"
        assert not (folder / marker).exists()
    for action in ("open({!r}, 'w')", "__import__('os').remove({!r})"):
        assert outcome(action.format(str(mine))).status == "failed"
        assert mine.read_text() == "mine"
    outcome(f"open('/tmp/{marker}', 'w')")  # a folder of its own, or refused
    assert not Path(f"/tmp/{marker}").exists()


def test_nothing_of_ours_can_be_read(mode: str, tmp_path: Path) -> None:
    if mode == "plain" and not landlock.version():
        pytest.skip("without namespaces this needs Landlock")
    (tmp_path / "answers").write_text("42")
    for path in (tmp_path / "answers", REPOSITORY / "pyproject.toml", Path("/etc/passwd")):
        assert outcome(f"open('{path}').read()").status == "failed"


@pytest.mark.usefixtures("mode")
def test_the_environment_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", "our-secret")
    source = """
import glob, os
found = [str(dict(os.environ))]
for path in glob.glob('/proc/*/environ'):
    try: found.append(open(path, errors='replace').read())
    except OSError: pass
assert 'our-' + 'secret' not in str(found)
assert set(os.environ) <= {'PATH', 'HOME', 'TMPDIR', 'PYTHONHASHSEED', 'LC_CTYPE'}, list(os.environ)
"""
    assert outcome(source) == Outcome(status="passed", message="")


def test_packages_and_the_project_are_out_of_reach() -> None:
    for module in ("lit_refusion", "torch", "numpy", "pytest"):
        assert outcome(f"import {module}").message.startswith("ModuleNotFoundError")
    assert outcome(f"import sys\nsys.path.insert(0, '{REPOSITORY}')\nimport lit_refusion.errors").status == "failed"


def test_there_is_no_network(mode: str) -> None:
    if mode == "plain" and landlock.version() < 4:
        pytest.skip("without namespaces this needs Landlock 4")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = outcome(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
        assert found.status == "failed"
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    if mode == "namespaces":
        source = "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"
        assert outcome(source).message.startswith("OSError: [Errno 101]")


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "-os.getppid()", "OURS", "1"])
def test_others_cannot_be_killed(target: str, mode: str) -> None:
    if mode == "plain" and os.geteuid() != 0 and landlock.version() < 6:
        pytest.skip("nothing here keeps a program from this user's other processes")
    target = target.replace("OURS", str(os.getpid()))
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        source = (
            f"import os\nfor number in (15, 9, 19):\n    try: os.kill({target}, number)\n    except OSError: pass\n"
        )
        assert outcome(source + WRONG, tests=TESTS).status == "failed"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()


DAEMON = """
import os, sys, time
def start():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', MARKER])
        os._exit(0)
    os.wait()
for _ in range(2): start()
time.sleep(0.2)
"""


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("ending", "status"),
    [("", "passed"), ("os._exit(0)", "exited"), ("time.sleep(600)", "timeout"), ("os.abort()", "killed")],
)
def test_daemons_do_not_outlive_their_program(ending: str, status: str) -> None:
    marker = f"marker-{uuid4().hex}"
    assert outcome(f"MARKER = '{marker}'\n{DAEMON}\n{ending}", wall_seconds=2.0).status == status
    assert running(marker) == []


def test_programs_end_with_the_process_that_runs_them(mode: str) -> None:
    marker = f"marker-{uuid4().hex}"
    source = f"MARKER = '{marker}'\n{DAEMON}\ntime.sleep(600)"
    folder = tempfile.mkdtemp()  # for the scratch folder, which nobody is left to delete
    os.chmod(folder, 0o755)
    code = f"""
import tempfile
from lit_refusion.evaluation import sandbox
tempfile.tempdir = {folder!r}
sandbox._interpreter = lambda: {sandbox._interpreter()!r}
limits = sandbox.Limits(wall_seconds=60., cpu_seconds=60, memory_bytes=2**29, file_bytes=2**22, processes=8,
                        output_bytes=4096)
sandbox._run(sandbox.Program(source={source!r}), limits, has_namespaces={mode == "namespaces"})
"""
    parent = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE)
    assert parent.stdin is not None
    try:
        parent.stdin.write(code.encode())
        parent.stdin.close()
        wait_until(lambda: len(running(marker)) == 2)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: running(marker) == [])
    shutil.rmtree(folder)


def wait_until(is_so: object) -> None:
    deadline = time.monotonic() + 20
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The rest


@pytest.mark.usefixtures("mode")
def test_scratch_folders_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    monkeypatch.setattr(sandbox, "_delete", lambda path, delete=sandbox._delete: (folders.append(path), delete(path)))
    deep = "import os\nos.mkdir('a')\nopen('a/b', 'w')\nos.symlink('/', 'a/c')\nos.chmod('a', 0)"
    for source in ("open('x', 'w').write('x')", deep, "import os\nos.abort()"):
        outcome(source)
    assert len(folders) == 3
    assert not any(map(os.path.exists, folders))


@pytest.mark.parametrize(
    "source", ["x = '\0'", "x = '\ud800'", "\ufeffx = 1", "# -*- coding: nothing -*-", "é = 'é'\r\n"]
)
def test_odd_text_is_no_trouble(source: str) -> None:
    assert outcome(source, tests="assert 1").status in ("failed", "passed")


@pytest.mark.parametrize("field", LIMITS.__dataclass_fields__)
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(UserError, match=f"limits.{field}=0: must be positive"):
        limits(**{field: 0})


def test_what_is_in_force_is_said(mode: str) -> None:
    assert describe().startswith("namespaces" if mode == "namespaces" else "no namespaces")


def test_a_system_that_cannot_run_programs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "OPTIONS", (*sandbox.OPTIONS, "--no-such-option"))
    with pytest.raises(UserError, match="sandbox: "):
        run_program(Program(source=""), LIMITS)
