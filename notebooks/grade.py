"""The course assignment of critkl, graded on a CPU in a few seconds.

    python notebooks/grade.py --stubs > my_solution.py     the functions to write, with what is asked
    python notebooks/grade.py my_solution.py               points per step; one small example of what is wrong
    python notebooks/grade.py assignment.ipynb             the same for the notebook, as it was last saved
    python notebooks/grade.py --json handed_in/*           several files, one line of JSON each
    python notebooks/grade.py --limit 60 my_solution.py    more time, on a slow machine
    python notebooks/grade.py --hunt 7 > hunted.py         critkl.py with five silent bugs; other numbers, other bugs
    python notebooks/grade.py hunted.py                    which steps are wrong in it (two are not in critkl.py)
    python notebooks/grade.py --notebook > notebooks/assignment.ipynb     after a change of critkl.py or steps.py

The steps and their cases are in steps.py. The stubs are made from critkl.py when asked for, so
they cannot drift from it. A step gives all of its points when every case is right, else none. The steps are
independent: while one is graded, the functions of all others are critkl's own, so an error costs the points
of its step only. They may be done in any order. They give 100 points; the open questions, which are collected
here and graded by hand, give more.

Each step runs in a process of its own with a time limit. There the student's file is imported and the
expressions of its cases are evaluated; the numbers come back as JSON text. This process compares them with
what critkl's own functions give for the same expressions, and with values worked out by hand. What the
file prints is dropped. Of a notebook only imports, definitions and assignments are run, and a cell that fails
costs no more than what it defines. The exit code is 0 whatever the points are. This guards against mistakes,
not against cheating: a file that imports its answers from critkl gets them right.
"""
import argparse
import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from steps import FUNCTIONS, HELPERS, HUNT, QUESTIONS, STEPS, Band, critkl, trained

HEADER = '''"""My solution. Points per step: python notebooks/grade.py my_solution.py"""
import math

import torch
import torch.nn.functional as F
'''
INTRODUCTION = """# Assignment

Write the functions below; together they are the core of `critkl.py`, and the last of them trains. Each step says
what is asked, then comes a stub, then a check that shows your points and, if something is wrong, one small example.
The steps are independent and may be done in any order: while one is checked, the functions of all others are
critkl's own. They give 100 points, the open questions up to 20, by hand.
[V] is Vassoyan et al., arXiv 2502.06533, [Q] is Qi et al., arXiv 2602.04879.

A check that does not end can be interrupted. `python notebooks/grade.py notebooks/assignment.ipynb` grades the
saved notebook as your instructor will, each step in a process of its own with a time limit. There only imports,
definitions and assignments are run."""
SETUP = """import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path("notebooks").resolve() if Path("notebooks").exists() else Path.cwd()))
import torch
import torch.nn.functional as F

from grade import check"""


def stub(title):
    """The functions of a step: signature and docstring from the source."""
    parts = []
    for name in STEPS[title].functions:
        source = inspect.getsource(FUNCTIONS[name])
        end = ast.parse(source).body[0].body[0].end_lineno           # of the docstring
        parts.append("\n".join(source.splitlines()[:end]) + "\n    raise NotImplementedError\n")
    return "\n\n".join(parts)


def stubs():
    """A solution file with every function to write and every question."""
    comment, ruler = lambda text: re.sub("(?m)^", "# ", text.strip()), f"# {'-' * 100}\n"
    parts = [HEADER] + [f"{ruler}# Step {title}, {step.points} points.\n{comment(step.spec)}\n\n{stub(title)}"
                        for title, step in STEPS.items()]
    return "\n\n".join(parts) + f"\n\n{ruler}# Open questions, graded by hand.\n\nANSWERS = {{}}\n" + "".join(
        f'\n{comment(question.text)}\n# Up to {question.points} points.\nANSWERS["{title}"] = """"""\n'
        for title, question in QUESTIONS.items())


def notebook():
    """assignment.ipynb as text: for each step what is asked, the stub and its check. Cells that print are tagged."""
    cells = [("markdown", INTRODUCTION), ("code", SETUP)]
    for title, step in STEPS.items():
        heading = title.upper() if title in ("kl", "gae") else title.capitalize()
        cells += [("markdown", f"## {heading}, {step.points} points\n\n{step.spec.strip()}"),
                  ("code", stub(title)), ("code", f'check(globals(), "{title}")', "output")]
    cells += [("markdown", "## Open questions, graded by hand"), ("code", "ANSWERS = {}")]
    for title, question in QUESTIONS.items():
        cells += [("markdown", f"**{title.capitalize()}**, up to {question.points} points. {question.text.strip()}"),
                  ("code", f'ANSWERS["{title}"] = """"""')]
    cells += [("markdown", "## Everything\n\nSave the notebook and hand in this file."),
              ("code", "check(globals())", "output")]
    kernel = dict(display_name="Python 3", language="python", name="python3")
    return json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=kernel), cells=[
        dict(cell_type=kind, id=f"cell-{i}", metadata=dict(tags=tags) if tags else {},
             source=text.strip().splitlines(keepends=True))
        | (dict(execution_count=None, outputs=[]) if kind == "code" else {})
        for i, (kind, text, *tags) in enumerate(cells)]), indent=1) + "\n"


def hunted(seed):
    """critkl.py with five bugs, each in another step."""
    rng, source = random.Random(seed), inspect.getsource(critkl)
    for title in rng.sample(list(HUNT), 5):
        source = source.replace(*rng.choice(HUNT[title]))
    return source


# ---- In the process of one step.

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
    places = [f"{''.join(re.findall('cell [0-9]+ ', frame.filename))}line {frame.lineno}"
              for frame in traceback.extract_tb(error.__traceback__) if path in frame.filename]
    try:
        text = " ".join(str(error).split())[:200]
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" + (f" ({places[-1]})" if places else "")
    return text.encode("ascii", "backslashreplace").decode()


def run_cells(path, names):
    """Run what a notebook imports, defines and assigns; returns the first error met in it, or None."""
    failed = None
    for i, cell in enumerate(json.loads(Path(path).read_bytes())["cells"], 1):
        if cell.get("cell_type") != "code":
            continue
        try:
            tree = ast.parse(re.sub("(?m)^[%!].*", "", "".join(cell["source"])), f"cell {i} of {path}")
            tree.body = [node for node in tree.body if not isinstance(node, (ast.Expr, ast.For, ast.While, ast.With))]
            exec(compile(tree, f"cell {i} of {path}", "exec"), names)
        except BaseException as error:
            failed = failed or error
    return failed


def evaluate(step, found, path, failed=None):
    """For each case of a step its value or error. `found` are the names of the file; there the functions of the
    other steps are replaced by critkl's."""
    def missing(*args, **kwargs):
        raise failed or NotImplementedError

    names = FUNCTIONS | {name: found.get(name, missing) for name in step.functions} | HELPERS
    names["trained"] = functools.cache(trained)
    found.update({name: function for name, function in FUNCTIONS.items() if name not in step.functions})
    for expression, _, _ in step.cases:
        try:
            line = dict(value=numbers(eval(expression, names)))
        except BaseException as error:
            line = dict(error=describe(error, path))
        yield line


def written(found):
    """The answers to the open questions among the names of a file."""
    try:
        return {title: str(found["ANSWERS"].get(title, "")).strip()[:10000] for title in QUESTIONS}
    except Exception:
        return {}


def work(path, title, answers):
    """Write JSON lines: the cases of a step evaluated with the file at `path` (None: with critkl's functions), or,
    without a title, the answers to the open questions."""
    if hasattr(os, "setsid"):
        os.setsid()                                                  # a group that can be killed as a whole
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    torch.set_num_threads(1)
    sys.dont_write_bytecode, step, found, failed = True, STEPS.get(title), dict(FUNCTIONS), None
    with open(answers, "w") as file:
        put = lambda **line: print(json.dumps(line), file=file, flush=True)
        try:
            if path:
                loader = importlib.machinery.SourceFileLoader("solution", path)
                module = importlib.util.module_from_spec(importlib.util.spec_from_loader("solution", loader))
                sys.modules["solution"], found = module, vars(module)
                if path.endswith(".ipynb"):
                    failed = run_cells(path, found)
                else:
                    loader.exec_module(module)
        except BaseException as error:
            put(error=f"the file cannot be imported: {describe(error, path)}")
            os._exit(0)
        if not step:
            put(answers=written(found))
        for line in evaluate(step, found, path or "critkl", failed) if step else ():
            put(**line)
    os._exit(0)


# ---- In the grader's process.

def collect(path, limit):
    """What `work` wrote for each step, as {title: (list of lines, whether it ended in time)}."""
    titles = [*STEPS, None] if path else STEPS
    context, results = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        files = {title: Path(folder, str(i)) for i, title in enumerate(titles)}
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
    if isinstance(expected, Band):
        return isinstance(got, (float, bool)) and expected.low <= got <= expected.high
    if isinstance(expected, list):
        return isinstance(got, list) and len(got) == len(expected) and all(map(same, got, expected))
    return isinstance(got, (float, bool)) and (got == expected or abs(got - expected) <= 1e-4 * max(1, abs(expected)))


def show(value):
    """Nested lists as text with four decimals."""
    if isinstance(value, Band):
        return f"{value.low} to {value.high}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value[:20])) + (", ..." if len(value) > 20 else "") + "]"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else str(value)


def judge(step, lines, ended, references):
    """None if all cases of a step are right, else what is wrong with the first that is not."""
    lines = iter(lines)
    for (expression, by_hand, hint), reference in zip(step.cases, references):
        line = next(lines, dict(error="the process died" if ended else "out of time"))
        expected = reference["value"] if by_hand is None else by_hand
        right = [expected] if isinstance(expected, Band) else [expected, reference["value"]]
        if "value" in line and all(same(line["value"], value) for value in right):
            continue
        got = str(line["error"]) if "error" in line else show(line.get("value"))
        if got == "not done yet" or got.startswith("the file cannot"):
            return dict(error=got)
        return dict(input=expression, got=got[:300], expected=show(expected), hint=hint)


def report(file, wrong, answers):
    """All about one file as a dictionary ready for JSON, from {step: what is wrong} and the answers to questions."""
    rows = [dict(step=title, points=0 if w else STEPS[title].points, of=STEPS[title].points, wrong=w)
            for title, w in wrong.items()]
    questions = [dict(question=title, of=question.points, rubric=" ".join(question.rubric.split()),
                      answer=answers.get(title, "")) for title, question in QUESTIONS.items()]
    return dict(file=file, total=sum(r["points"] for r in rows), of=sum(r["of"] for r in rows), steps=rows,
                questions=questions)


def grade(path, references, limit):
    results = collect(str(path), limit)
    lines, _ = results.pop(None)
    return report(str(path), {title: judge(STEPS[title], *results[title], references[title]) for title in results},
                  lines[0].get("answers", {}) if lines else {})


def print_report(result, whole=True):
    if whole:
        print(result["file"])
    for row in result["steps"]:
        wrong = row["wrong"] or {}
        print(f"  {row['step']:20} {row['points']:3} of {row['of']:3}  {wrong.get('error', '')}")
        for key in ("input", "got", "expected", "hint"):
            if key in wrong:
                print(f"      {key:9} {wrong[key]}")
    if whole:
        print(f"  {'total':20} {result['total']:3} of {result['of']:3}")
    for row in result["questions"] if whole else ():
        print(f"  {row['question']:20} 0 to {row['of']:2}  by hand: {'' if row['answer'] else 'not '}answered")
        if row["answer"]:
            print(f"      rubric    {row['rubric']}")


def check(names, *titles):
    """For a notebook: print the points of steps (default: of everything) for `names`, its globals()."""
    wrong, kept = {}, {name: names[name] for name in FUNCTIONS if name in names}
    for title in titles or STEPS:
        reference = list(evaluate(STEPS[title], dict(FUNCTIONS), "critkl"))
        try:
            wrong[title] = judge(STEPS[title], evaluate(STEPS[title], names, "ipykernel"), True, reference)
        finally:
            for name in FUNCTIONS:
                names.pop(name, None)
            names.update(kept)
    print_report(report("this notebook", wrong, written(names)), whole=not titles)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, help="solutions, .py or .ipynb")
    parser.add_argument("--stubs", action="store_true", help="print the functions to write")
    parser.add_argument("--notebook", action="store_true", help="print the assignment as a notebook")
    parser.add_argument("--hunt", type=int, metavar="SEED", help="print critkl.py with five silent bugs")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each file")
    parser.add_argument("--limit", type=float, default=20, help="seconds for each file (default: 20)")
    args = parser.parse_args()
    if args.stubs or args.notebook or args.hunt is not None:
        print(stubs() if args.stubs else notebook() if args.notebook else hunted(args.hunt), end="")
    elif not args.files:
        parser.error("a solution file, --stubs, --notebook or --hunt SEED")
    torch.optim.Adam([torch.zeros(1)])                               # imports much: once, before the processes fork
    references = {title: lines for title, (lines, _) in collect(None, 60).items()} if args.files else {}
    for title, lines in references.items():
        if sum("value" in line for line in lines) != len(STEPS[title].cases):
            sys.exit(f"grade.py: critkl itself fails at step {title}: {lines[-1:]}")
    for path in args.files:
        result = grade(path, references, args.limit)
        print(json.dumps(result)) if args.json else print_report(result)


if __name__ == "__main__":
    main()
