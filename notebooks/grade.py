"""The course assignment of critkl, graded on a CPU in a few seconds.

    python notebooks/grade.py --stubs > mine.py       the functions to write, with what is asked
    python notebooks/grade.py mine.py                 points per step; an example of what is wrong
    python notebooks/grade.py assignment.ipynb        the same for the notebook, as last saved
    python notebooks/grade.py --json handed_in/*      several files, one line of JSON each
    python notebooks/grade.py --hunt 7 > hunted.py    critkl.py with five silent bugs; each number
                                                      gives others
    python notebooks/grade.py hunted.py               which steps are wrong in it
    python notebooks/grade.py --notebook > notebooks/assignment.ipynb
                                                      after a change of critkl.py or steps.py

The steps and their cases are in steps.py. The stubs are made from critkl.py when asked for, so
they cannot drift from it. A step gives all of its points when every case is right, else none. The
steps are independent: while one is graded, the functions of all others are critkl's own, so an
error costs the points of its step only. They give 100 points; the open questions, which are
collected here and graded by hand (instructors.md), give more.

A file is read once, in a process of its own, and then each step is evaluated there, on Linux in a
fork, so that no step can spoil another. Reading has a time limit (--read-limit), each step another
(--limit). If a step does not end, its process is killed and the file is read again for the rest.
The numbers come back as JSON text and are compared here with what critkl's own functions give for
the same expressions, and with values worked out by hand. What the file prints is dropped. Of a
notebook only imports, definitions and assignments are run. An error while a file is read costs no
more than what is not defined by then, in a notebook no more than what its cell defines.
The exit code is 0 whatever the points are, 2 for a mistake in the command. This guards against
mistakes, not against cheating: a file that imports its answers from critkl gets them right.
"""
import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
import types
from pathlib import Path

import numpy as np
import torch

from steps import (FUNCTIONS, HEADER, HELPERS, HUNT, INTRODUCTION, QUESTIONS, SETUP, SHORTER, STEPS,
                   Band, critkl)

HERE = Path(__file__).resolve().parent
START_LIMIT = 120                        # seconds for a process to import torch and this file


# ---- What is handed out.

def stub(title):
    """The functions of a step: signature and docstring from the source, or as SHORTER has them."""
    parts = []
    for name in STEPS[title].functions:
        source = SHORTER.get(name, "").strip() or inspect.getsource(FUNCTIONS[name])
        end_of_docstring = ast.parse(source).body[0].body[0].end_lineno
        lines = source.splitlines()[:end_of_docstring]
        parts.append("\n".join(lines) + "\n    raise NotImplementedError\n")
    return "\n\n".join(parts)


def comment(text):
    return re.sub("(?m)^", "# ", text.strip())


def stubs():
    """A solution file with every function to write and every question."""
    ruler = f"# {'-' * 98}\n"
    parts = [HEADER]
    for title, step in STEPS.items():
        heading = f"# Step {title}, {step.points} points.\n{comment(step.spec)}"
        parts.append(f"{ruler}{heading}\n\n{stub(title)}")
    questions = f"{ruler}# Open questions, graded by hand.\n\nANSWERS = {{}}\n"
    for title, question in QUESTIONS.items():
        questions += f"\n{comment(question.text)}\n# Up to {question.points} points.\n"
        questions += f'ANSWERS["{title}"] = """"""\n'
    return "\n\n".join([*parts, questions])


def notebook():
    """assignment.ipynb as text: for each step what is asked, the stub and its check. Cells that
    print are tagged."""
    cells = [("markdown", INTRODUCTION), ("code", SETUP)]
    for title, step in STEPS.items():
        heading = title.upper() if title in ("kl", "gae") else title.capitalize()
        cells.append(("markdown", f"## {heading}, {step.points} points\n\n{step.spec.strip()}"))
        cells.append(("code", stub(title)))
        cells.append(("code", f'check(globals(), "{title}")', "output"))
    cells.append(("markdown", "## Open questions, graded by hand"))
    cells.append(("code", "ANSWERS = {}"))
    for title, question in QUESTIONS.items():
        heading = f"**{title.capitalize()}**, up to {question.points} points."
        cells.append(("markdown", f"{heading} {question.text.strip()}"))
        cells.append(("code", f'ANSWERS["{title}"] = """"""'))
    cells.append(("markdown", "## Everything\n\nSave the notebook and hand in this file."))
    cells.append(("code", "check(globals())", "output"))

    document = []
    for i, (kind, text, *tags) in enumerate(cells):
        cell = dict(cell_type=kind, id=f"cell-{i}", metadata=dict(tags=tags) if tags else {},
                    source=text.strip().splitlines(keepends=True))
        if kind == "code":
            cell |= dict(execution_count=None, outputs=[])
        document.append(cell)
    kernel = dict(display_name="Python 3", language="python", name="python3")
    return json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=kernel),
                           cells=document), indent=1) + "\n"


def hunted(seed):
    """critkl.py with five bugs, each in another step."""
    rng, source = random.Random(seed), inspect.getsource(critkl)
    for title in rng.sample(list(HUNT), 5):
        source = source.replace(*rng.choice(HUNT[title]))
    return source


# ---- Reading a file.

class Missing(Exception):
    """A function is not there, with the reason."""


def source_text(path):
    """A file as text: UTF-8 or what its first line declares, with or without a byte-order mark, or
    UTF-16 or 32."""
    data = Path(path).read_bytes()
    encoding = json.detect_encoding(data)
    if encoding.startswith("utf-8"):
        return importlib.util.decode_source(data)
    return data.decode(encoding)


def is_hunted(path):
    """Whether the file is a copy of critkl.py. Its hints would solve the hunt."""
    try:
        return source_text(path).splitlines()[:1] == inspect.getsource(critkl).splitlines()[:1]
    except (OSError, SyntaxError, ValueError):
        return False


class NoShell:
    """In place of IPython's shell: its commands do nothing, `x = !command` gives an empty list."""

    def getoutput(self, *args):
        return []

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def as_jupyter(source):
    """A cell as Python, the way Jupyter reads it; without IPython as near to it as lines go."""
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        return re.sub(r"(?m)^([ \t]*)([%!?].*|.*\?)$", r"\1pass", source)
    return TransformerManager().transform_cell(source)


def parse_cell(source, name):
    """A notebook cell as a syntax tree. What is not Python is read as Jupyter reads it; a cell that
    is Python is left alone, so a line of text may begin with % or !."""
    try:
        return ast.parse(source, name)
    except SyntaxError:
        pass
    timed = re.match(r"\s*%%(?:time|capture|prun)\b.*\n", source)     # these run their cell
    source = source[timed.end():] if timed else source
    tree = ast.parse(as_jupyter(source), name)
    for i, node in enumerate(tree.body):                             # %time x = f() assigns x
        text = ast.unparse(node)
        if text.startswith("get_ipython().run_line_magic('time', "):
            tree.body[i:i + 1] = ast.parse(node.value.args[1].value, name).body
    return tree


def run_cells(path, names):
    """Run what a notebook imports, defines and assigns; returns the first error in it, or None."""
    failed = None
    names["get_ipython"] = NoShell
    for i, cell in enumerate(json.loads(source_text(path))["cells"], 1):
        if cell.get("cell_type") != "code":
            continue
        name = f"cell {i} of {path}"
        try:
            tree = parse_cell("".join(cell["source"]), name)
            skipped = (ast.Expr, ast.For, ast.While, ast.With)
            tree.body = [node for node in tree.body if not isinstance(node, skipped)]
            exec(compile(tree, name, "exec"), names)
        except BaseException as error:
            failed = failed or error
    return failed


def read(path):
    """The names that a file defines, as a dictionary, and the first error in it, or None."""
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    try:
        if path.lower().endswith(".ipynb"):
            return vars(module), run_cells(path, vars(module))
        exec(compile(source_text(path), path, "exec"), vars(module))
    except BaseException as error:
        return vars(module), error
    return vars(module), None


def written(found):
    """The answers to the open questions among the names of a file."""
    try:
        return {title: str(found["ANSWERS"].get(title, "")).strip()[:10000] for title in QUESTIONS}
    except Exception:
        return {}


# ---- Evaluating a step.

def numbers(x):
    """A result as nested lists of floats."""
    if isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
        x = torch.as_tensor(x)
        if x.numel() > 10000:
            raise ValueError(f"returned a tensor of shape {tuple(x.shape)}")
        return x.detach().double().tolist()
    if isinstance(x, (tuple, list)) and len(x) < 10000:
        return [numbers(item) for item in x]
    if isinstance(x, (bool, int, float)):
        return float(x)
    raise TypeError(f"returned {type(x).__name__}, not a tensor")


def describe(error, path):
    """One line of ASCII about an exception, with the last line of the file that it went through."""
    places = [f"{''.join(re.findall('cell [0-9]+ ', frame.filename))}line {frame.lineno}"
              for frame in traceback.extract_tb(error.__traceback__) if path in frame.filename]
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" + (f" ({places[-1]})" if places else "")
    return text.encode("ascii", "backslashreplace").decode()


def guarded(function):
    """The function, with an error if it writes into a tensor that it was given."""
    def call(*args, **kwargs):
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        before = [x.detach().clone() for x in given]
        result = function(*args, **kwargs)
        for x, old in zip(given, before):
            if x.shape != old.shape or not torch.equal(x.nan_to_num(), old.nan_to_num()):
                raise ValueError("writes into its arguments")
        return result
    return call


@contextlib.contextmanager
def standing_in(step, found):
    """Meanwhile the functions of all other steps in `found` are critkl's. Torch's defaults and its
    random numbers may change meanwhile."""
    kept = {name: found[name] for name in FUNCTIONS if name in found}
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    found.update({name: f for name, f in FUNCTIONS.items() if name not in step.functions})
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)
        for name in FUNCTIONS:
            found.pop(name, None)
        found.update(kept)


def evaluate(step, found, path, failed=None):
    """For each case of a step its value or error. `found` are the names of the file, `failed` is
    the error met when it was read."""
    def missing(*args, **kwargs):
        if failed is None:
            raise Missing("not done yet")
        raise Missing(f"the file cannot be imported: {describe(failed, path)}")

    own = {name: guarded(found[name]) if name in found else missing for name in step.functions}
    names = FUNCTIONS | own | HELPERS
    for runs in ("short", "trained"):                                # several cases look at one run
        names[runs] = functools.cache(HELPERS[runs])
    with standing_in(step, found):
        for expression, _, _ in step.cases:
            torch.set_default_dtype(torch.float32)                   # whatever the file has set
            if torch.get_default_device().type != "cpu":
                torch.set_default_device(None)
            torch.manual_seed(0)
            try:
                line = dict(value=numbers(eval(expression, names)))
            except (Missing, NotImplementedError) as error:
                yield dict(missing=str(error) if isinstance(error, Missing) else "not done yet")
                return                                               # the other cases are no better
            except BaseException as error:
                line = dict(error=describe(error, path))
            yield line


def work(path, titles, connection, fork):
    """In a process of its own: read the file at `path` (None: take critkl's functions), evaluate
    some steps and send, as JSON, dict(reading=), dict(answers=), for each step dict(step=) and its
    lines, and dict(done=)."""
    if hasattr(os, "setsid"):
        os.setsid()                                      # a group that can be killed as a whole
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ["MPLBACKEND"] = "agg"
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    steps = {title: STEPS[title] for title in titles}    # whatever the file does to STEPS

    def send(**line):
        connection.send_bytes(json.dumps(line).encode())

    try:
        send(reading=path)
        found, failed = read(path) if path else (dict(FUNCTIONS), None)
        torch.set_num_threads(1)                                     # a fork has no other thread
        send(answers=written(found))
        for title, step in steps.items():
            send(step=title)
            apart = fork and any(name in found for name in step.functions)
            child = os.fork() if apart else 0
            if child:
                os.waitpid(child, 0)
                continue
            for line in evaluate(step, found, path or "critkl", failed):
                send(**line)
            if apart:
                os._exit(0)
        send(done=True)
    finally:
        os._exit(0)


# ---- In the grader's process.

def follow(path, titles, limit, read_limit, fork):
    """What `work` sends. If it does not end well, dict(error=) comes last. Leaves no process."""
    context = multiprocessing.get_context("fork" if fork else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(path, titles, sender, fork))
    worker.start()
    sender.close()
    deadline = time.monotonic() + START_LIMIT
    try:
        while True:
            if not receiver.poll(max(0, deadline - time.monotonic())):
                yield dict(error="out of time")
                return
            try:
                line = json.loads(receiver.recv_bytes())
            except (EOFError, OSError):
                yield dict(error="the process died")
                return
            if "done" in line:
                return
            if "reading" in line or "step" in line:
                deadline = time.monotonic() + (limit if "step" in line else read_limit)
            yield line
    finally:
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):                       # nothing of it is left
                os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()
        worker.join()
        receiver.close()


def collect(path, limit, read_limit, fork):
    """The answers to the open questions, and for each step the lines of its cases."""
    answers, results, left = {}, {}, list(STEPS)
    while left:
        step = None
        for line in follow(path, left, limit, read_limit, fork):
            if "answers" in line:
                answers = line["answers"]
            elif "step" in line:
                step = line["step"]
                results[step] = []
                left = [title for title in left if title != step]
            elif step:
                results[step].append(line)
            elif "error" in line:
                text = f"{line['error']} while the file was read"
                return {}, {title: [dict(missing=text)] for title in STEPS}
    return answers, results


def same(got, expected):
    """Equal in shape and, up to rounding, in value; nan equals nothing."""
    number = isinstance(got, (float, bool))
    if isinstance(expected, Band):
        return number and expected.low <= got <= expected.high
    if isinstance(expected, list):
        return (isinstance(got, list) and len(got) == len(expected)
                and all(map(same, got, expected)))
    if not number or abs(expected) == torch.inf:
        return number and got == expected
    return abs(got - expected) <= 1e-4 * max(1, abs(expected))


def show(value):
    """Nested lists as text with four decimals."""
    if isinstance(value, Band):
        return f"{value.low} to {value.high}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value[:8])) + (", ..." if len(value) > 8 else "") + "]"
    if isinstance(value, (int, float)):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return str(value)


def judge(step, lines, references):
    """None if all cases of a step are right, else what is wrong with the first that is not."""
    lines = iter(lines)
    for (expression, by_hand, hint), reference in zip(step.cases, references):
        line = next(lines, dict(error="the process died"))
        expected = reference["value"] if by_hand is None else by_hand
        right = [expected] if isinstance(expected, Band) else [expected, reference["value"]]
        if "missing" in line:
            return dict(error=line["missing"])
        if "error" in line:
            return dict(input=expression, got=line["error"][:300], expected=show(expected))
        if not all(same(line["value"], value) for value in right):
            return dict(input=expression, got=show(line["value"]), expected=show(expected),
                        hint=hint)
    return None


def rubrics():
    """{question: rubric} from instructors.md; empty where students have no such file."""
    try:
        text = (HERE / "instructors.md").read_text(encoding="utf-8")
    except OSError:
        return {}
    sections = re.findall(r"(?ms)^### (.*?)\n(.*?)(?=^#|\Z)", text)
    return {title: " ".join(rubric.split()) for title, rubric in sections}


def report(file, wrong, answers):
    """All about one file as a dictionary ready for JSON, from {step: what is wrong} and the answers
    to questions."""
    rows = []
    for title, mistake in wrong.items():
        of = STEPS[title].points
        rows.append(dict(step=title, points=0 if mistake else of, of=of, wrong=mistake))
    by_hand = rubrics()
    questions = [dict(question=title, of=question.points, rubric=by_hand.get(title, ""),
                      answer=answers.get(title, "")) for title, question in QUESTIONS.items()]
    return dict(file=file, total=sum(row["points"] for row in rows),
                of=sum(row["of"] for row in rows), steps=rows, questions=questions)


def can_fork():
    """Elsewhere than on Linux a fork is not safe, nor with the threads that serve a GPU."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def grade(path, references, limit=20, read_limit=120, fork=None):
    """The report of one file."""
    fork = can_fork() if fork is None else fork
    answers, results = collect(str(path), limit, read_limit, fork)
    wrong = {title: judge(step, results[title], references[title]) for title, step in STEPS.items()}
    if is_hunted(path):
        for row in wrong.values():
            (row or {}).pop("hint", None)
    return report(str(path), wrong, answers)


def print_report(result, whole=True):
    """For students: points, and one example for each wrong step; no rubrics."""
    if whole:
        print(result["file"])
    for row in result["steps"]:
        wrong = row["wrong"] or {}
        print(f"  {row['step']:20} {row['points']:3} of {row['of']:3}  {wrong.get('error', '')}")
        for key in ("input", "got", "expected", "hint"):
            if key in wrong:
                print(f"      {key:9} {wrong[key]}")
    if not whole:
        return
    print(f"  {'total':20} {result['total']:3} of {result['of']:3}")
    for row in result["questions"]:
        state = "answered" if row["answer"] else "not answered"
        print(f"  {row['question']:20} 0 to {row['of']:2}  by hand: {state}")


def check(names, *titles):
    """For a notebook: print the points of steps (default: all) for `names`, its globals()."""
    wrong = {}
    for title in titles or STEPS:
        step = STEPS[title]
        with contextlib.closing(evaluate(step, dict(FUNCTIONS), "critkl")) as references, \
                contextlib.closing(evaluate(step, names, "ipykernel")) as lines:
            wrong[title] = judge(step, lines, references)
    print_report(report("this notebook", wrong, written(names)), whole=not titles)


def critkl_lines():
    """{step: lines of its cases} for critkl's own functions."""
    _, references = collect(None, 120, 120, can_fork())
    for title, lines in references.items():
        if sum("value" in line for line in lines) != len(STEPS[title].cases):
            sys.exit(f"grade.py: error: critkl itself fails at step {title}: {lines[-1:]}")
    return references


class Parser(argparse.ArgumentParser):
    def error(self, message):                                        # one line, without the usage
        self.exit(2, f"grade.py: error: {message}\n")


def main(argv=None):
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, help="solutions, .py or .ipynb")
    parser.add_argument("--stubs", action="store_true", help="print the functions to write")
    parser.add_argument("--notebook", action="store_true", help="print the assignment notebook")
    parser.add_argument("--hunt", type=int, metavar="SEED", help="print critkl.py with five bugs")
    parser.add_argument("--json", action="store_true", help="a line of JSON per file, with rubrics")
    parser.add_argument("--limit", type=float, default=20, help="seconds per step (default: 20)")
    parser.add_argument("--read-limit", type=float, default=120,
                        help="seconds for reading a file, what it computes included (default: 120)")
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")                # names may be anything
    sys.stderr.reconfigure(errors="backslashreplace")
    if args.stubs or args.notebook or args.hunt is not None:
        print(stubs() if args.stubs else notebook() if args.notebook else hunted(args.hunt), end="")
        return
    if not args.files:
        parser.error("a solution file, --stubs, --notebook or --hunt SEED is needed")
    if not (args.limit > 0 and args.read_limit > 0):
        parser.error("--limit and --read-limit are seconds above 0")
    files = []
    for path in args.files:
        if not path.exists():
            parser.error(f"no such file: {path}")
        if path.is_file() and path.suffix.lower() in (".py", ".ipynb"):
            files.append(path)
        else:
            print(f"grade.py: skipped {path}: neither .py nor .ipynb", file=sys.stderr)
    if not files:
        parser.error("none of the files is a .py or .ipynb")

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])               # imports much: once, before the processes fork
    if any(path.suffix.lower() == ".ipynb" for path in files):
        as_jupyter("")                               # the same
    references = critkl_lines()
    for i, path in enumerate(files, 1):
        if len(files) > 1:
            print(f"{i} of {len(files)}: {path}", file=sys.stderr)
        result = grade(path, references, args.limit, args.read_limit)
        print(json.dumps(result)) if args.json else print_report(result)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
