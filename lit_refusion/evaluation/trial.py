"""What runs inside: the program, then its setup and tests, then the word that they ended.

`sandbox.py` hands this text to an interpreter of its own, confined, with the job on its standard input. It imports
only what the interpreter has loaded anyway: every import here would be one that the program finds done.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
import types
from typing import Any

LONGEST_MESSAGE = 300
PARTS = {"<program>": "program", "<setup>": "setup", "<tests>": "tests"}


def run(job: dict[str, Any]) -> None:
    """Execute the parts in one namespace, write nonce, status and message to the pipe, and end the process.

    The program may have replaced whatever it can name, so what is used after it is taken before it. Built-in names
    and tracing are set back before the tests. With an entry point the tests see a copy of the namespace in which
    built-in names are Python's own, since what they compare with is not the program's to define.
    """
    write, leave, execute, tell = os.write, os._exit, exec, describe
    trace, profile, failures, dictionary = sys.settrace, sys.setprofile, (BaseException,), dict
    names_of_python, python = vars(builtins), builtins
    originals = dictionary(names_of_python)
    sys.modules["program"] = sys.modules["__main__"] = module = types.ModuleType("program")
    names = vars(module)
    status, message = "passed", ""
    try:
        program, setup, tests = (compile(job[part], name, "exec", dont_inherit=True) for name, part in PARTS.items())
        execute(program, names)
        trace(None)
        profile(None)
        names_of_python.clear()
        names_of_python.update(originals)
        names["__builtins__"] = python
        execute(setup, names)
        if job["entry_point"]:
            names = {
                name: value for name, value in names.items() if name == job["entry_point"] or name not in originals
            }
            names["__builtins__"] = python
        execute(tests, names)
    except failures as error:
        status, message = tell(error)
    write(job["report"], b"\n".join((job["nonce"], status.encode(), message.encode("utf-8", "replace"))))
    leave(0)


def describe(error: BaseException) -> tuple[str, str]:
    """Status and message of what a part raised, with the line where it did."""
    if isinstance(error, MemoryError):
        return "memory", ""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        text = next((line for line in text.splitlines() if line.strip()), "")
        file, number = getattr(error, "filename", ""), getattr(error, "lineno", 0)
        step = None if isinstance(error, SyntaxError) else error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename in PARTS:
                file, number = step.tb_frame.f_code.co_filename, step.tb_lineno
            step = step.tb_next
        place = f" (line {number} of the {PARTS[file]})" if file in PARTS else ""
        message = f"{type(error).__name__}{': ' * bool(text)}{text[:LONGEST_MESSAGE]}{place}"
    except BaseException:
        message = type(error).__name__
    return ("exited" if isinstance(error, SystemExit) else "failed"), message


if __name__ == "__main__":
    given = marshal.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run(given)
