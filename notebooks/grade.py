"""The course assignment of critkl, graded on a CPU in a few seconds.

    python notebooks/grade.py --stubs > my_solution.py     the functions to write: signature and docstring
    python notebooks/grade.py my_solution.py               points per step; one small example of what is wrong
    python notebooks/grade.py --json handed_in/*.py        several files, one line of JSON each
    python notebooks/grade.py --limit 60 my_solution.py    more time per step, on a slow machine

The steps and their cases are in steps.py. The stubs are made from critkl.py when asked for, so
they cannot drift from it. A step gives all of its points when every case is right, else none. The steps are
independent: while one is graded, the functions of all others are critkl's own, so an error costs the points
of its step only. They may be done in any order.

Each step runs in a process of its own with a time limit. There the student's file is imported and the
expressions of its cases are evaluated; the numbers come back as JSON text. This process compares them with
what critkl's own functions give for the same expressions, and with values worked out by hand. What the
file prints is dropped. The exit code is 0 whatever the points are. This guards against mistakes, not
against cheating: a file that imports its answers from critkl gets them right.
"""
import argparse
import ast
import importlib.machinery
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from steps import FUNCTIONS, STEPS, grad, normal

HEADER = '''"""My solution. Points per step: python notebooks/grade.py my_solution.py"""
import math

import torch
import torch.nn.functional as F
'''


def stubs():
    """A solution file with every function to write: signature and docstring from the source."""
    parts = [HEADER]
    for title, step in STEPS.items():
        parts.append(f"\n# {'-' * 100}\n# Step {title}, {step.points} points. {step.note}".rstrip())
        for name in step.functions:
            source = inspect.getsource(FUNCTIONS[name])
            end = ast.parse(source).body[0].body[0].end_lineno       # of the docstring
            parts.append("\n\n" + "\n".join(source.splitlines()[:end]) + "\n    raise NotImplementedError\n")
    return "\n".join(parts).replace("\n\n\n\n", "\n\n\n")


# ----------------------------------------------------------------------------------------------------
# In the process of one step.

def numbers(x):
    """A result as nested lists of floats."""
    if isinstance(x, torch.Tensor):
        if x.numel() > 10000:
            raise ValueError(f"returned a tensor of shape {tuple(x.shape)}")
        return x.detach().double().tolist()
    if isinstance(x, (tuple, list)) and len(x) < 10000:
        return [numbers(item) for item in x]
    if isinstance(x, (bool, int, float)):
        return float(x)
    raise TypeError(f"returned {type(x).__name__}, not a tensor")


def describe(error, path):
    """One line of plain ASCII about an exception, with the last line of the student's file it went through."""
    if isinstance(error, NotImplementedError):
        return "not done yet"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" + (f" (line {lines[-1]})" if lines else "")
    return text.encode("ascii", "backslashreplace").decode()


def work(path, title, answers):
    """Evaluate the cases of a step with the file at `path` (None: critkl's functions); write JSON lines."""
    if hasattr(os, "setsid"):
        os.setsid()                                                  # a group that can be killed as a whole
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    torch.set_num_threads(1)
    sys.dont_write_bytecode, step = True, STEPS[title]
    with open(answers, "w") as file:
        put = lambda **line: print(json.dumps(line), file=file, flush=True)
        reference, names = dict(FUNCTIONS), dict(FUNCTIONS)
        try:
            if path:
                loader = importlib.machinery.SourceFileLoader("solution", path)
                module = importlib.util.module_from_spec(importlib.util.spec_from_loader("solution", loader))
                sys.modules["solution"] = module
                loader.exec_module(module)
                for name, function in reference.items():             # other steps do not count here
                    if name not in step.functions:
                        setattr(module, name, function)

                def missing(*args, **kwargs):
                    raise NotImplementedError

                names |= {name: getattr(module, name, missing) for name in step.functions}
        except BaseException as error:
            put(error=f"the file cannot be imported: {describe(error, path)}")
            os._exit(0)
        names |= dict(torch=torch, tensor=torch.tensor, grad=grad, normal=normal)
        for expression, _, _ in step.cases:
            try:
                put(value=numbers(eval(expression, names)))
            except BaseException as error:
                put(error=describe(error, path))
    os._exit(0)


# ----------------------------------------------------------------------------------------------------
# In the grader's process.

def collect(path, limit):
    """What `work` wrote for each step, as {title: (list of lines, whether it ended in time)}."""
    context, results = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        files = {title: Path(folder, str(i)) for i, title in enumerate(STEPS)}
        workers = {t: context.Process(target=work, args=(path, t, str(file))) for t, file in files.items()}
        deadline = time.monotonic() + limit
        try:
            for worker in workers.values():
                worker.start()
            for title, worker in workers.items():
                worker.join(max(0, deadline - time.monotonic()))
                results[title] = [], worker.exitcode is not None
        finally:
            for worker in workers.values():
                if hasattr(os, "killpg") and worker.pid:
                    try:
                        os.killpg(worker.pid, signal.SIGKILL)
                    except OSError:                                  # nothing of it is left
                        pass
                if worker.pid:
                    worker.kill()
                    worker.join()
        for title, file in files.items():
            for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
                try:
                    results[title][0].append(dict(json.loads(line, parse_int=float)))
                except (ValueError, TypeError, RecursionError):
                    break
    return results


def same(got, expected):
    """Equal in shape and, up to rounding, in value; nan equals nothing."""
    if isinstance(expected, list):
        return isinstance(got, list) and len(got) == len(expected) and all(map(same, got, expected))
    return isinstance(got, (float, bool)) and (got == expected or abs(got - expected) <= 1e-4 * max(1, abs(expected)))


def show(value):
    """Nested lists as text with four decimals."""
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value[:20])) + (", ..." if len(value) > 20 else "") + "]"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else str(value)


def judge(step, lines, ended, answers):
    """None if all cases of a step are right, else what is wrong with the first that is not."""
    for i, (expression, by_hand, hint) in enumerate(step.cases):
        line = lines[i] if i < len(lines) else dict(error="the process died" if ended else "out of time")
        reference = answers[i]["value"]
        expected = reference if by_hand is None else by_hand
        if "value" in line and same(line["value"], expected) and same(line["value"], reference):
            continue
        got = str(line["error"]) if "error" in line else show(line.get("value"))
        if got == "not done yet" or got.startswith("the file cannot"):
            return dict(error=got)
        return dict(input=expression, got=got[:300], expected=show(expected), hint=hint)


def grade(path, answers, limit):
    """The points of one file as a dictionary ready for JSON."""
    rows = []
    for title, (lines, ended) in collect(str(path), limit).items():
        step = STEPS[title]
        wrong = judge(step, lines, ended, answers[title])
        rows.append(dict(step=title, points=0 if wrong else step.points, of=step.points, wrong=wrong))
    return dict(file=str(path), total=sum(r["points"] for r in rows), of=sum(r["of"] for r in rows), steps=rows)


def print_report(report):
    print(report["file"])
    for row in report["steps"]:
        wrong = row["wrong"] or {}
        print(f"  {row['step']:20} {row['points']:3} of {row['of']:3}  {wrong.get('error', '')}")
        for key in ("input", "got", "expected", "hint"):
            if key in wrong:
                print(f"      {key:9} {wrong[key]}")
    print(f"  {'total':20} {report['total']:3} of {report['of']:3}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, help="solutions")
    parser.add_argument("--stubs", action="store_true", help="print the functions to write")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each file")
    parser.add_argument("--limit", type=float, default=20, help="seconds for each step (default: 20)")
    args = parser.parse_args()
    if args.stubs:
        print(stubs(), end="")
    elif not args.files:
        parser.error("a solution file or --stubs")
    answers = {title: lines for title, (lines, _) in collect(None, 60).items()} if args.files else {}
    for title, lines in answers.items():
        if sum("value" in line for line in lines) != len(STEPS[title].cases):
            sys.exit(f"grade.py: critkl itself fails at step {title}: {lines[-1:]}")
    for path in args.files:
        report = grade(path, answers, args.limit)
        print(json.dumps(report)) if args.json else print_report(report)


if __name__ == "__main__":
    main()
