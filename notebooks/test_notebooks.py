"""Tests of the notebooks: each runs from a fresh copy of the repository, in a real kernel.

    python -m pytest notebooks/test_notebooks.py

A cell tagged "text", "image" or "html" must put out something of that type, one tagged "output"
something. Cells tagged "bounds" assert what the text says of the numbers. The notebooks run in a
temporary folder and share the pretrained model that the first one makes; with pytest -n the
processes share it too. Each also runs alone. The assignment is stored empty, the others with their
outputs.
"""
import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
STORIES = [path for path in NOTEBOOKS if path.stem != "assignment"]
TYPES = dict(text={"stdout", "text/plain"}, image={"image/png"}, html={"text/html"})
TYPES["output"] = set.union(*TYPES.values())


def name_of(path):
    return path.name


def tags_of(cell):
    return set(cell.metadata.get("tags", ()))


def execute(notebook, folder):
    """Run it in place, in the Python that runs the tests: no installed kernel is looked for."""
    kernels = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    NotebookClient(notebook, km=manager, timeout=1800,
                   resources=dict(metadata=dict(path=str(folder)))).execute()


def put_out(cell):
    """The types that the outputs of an executed cell have. What is blank does not count, nor do the
    words that stand for a picture where none can be shown."""
    found = set()
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            bundle = {output.name: output.text}
        else:
            bundle = output.get("data", {})
        kinds = {kind for kind, content in bundle.items() if content.strip()}
        found |= kinds - {"text/plain"} if len(kinds) > 1 else kinds
    return found


def missing(notebook):
    """(number of the cell, tag) of all that its tags promise and its outputs do not hold."""
    return [(i, tag) for i, cell in enumerate(notebook.cells)
            for tag in sorted(tags_of(cell)) if tag in TYPES and not put_out(cell) & TYPES[tag]]


def code_cells(notebook):
    """(number, source as plain Python, without the %, ! and ? of IPython) of the code cells."""
    return [(i, TransformerManager().transform_cell(cell.source))
            for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def is_stub(node):
    """A function with nothing in it but a docstring and `raise NotImplementedError`."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    raised = body[0].exc if len(body) == 1 and isinstance(body[0], ast.Raise) else None
    return getattr(getattr(raised, "func", raised), "id", "") == "NotImplementedError"


def defined(tree):
    """Name to node of what a piece of code defines: functions, classes, and name = lambda."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
    return found


def redefined(source):
    """Names of critkl.py's functions and classes that the source defines again, stubs aside."""
    public = {node.name for node in ast.parse((HERE.parent / "critkl.py").read_text()).body
              if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {name for name, node in defined(ast.parse(source)).items()
            if name in public and (isinstance(node, ast.Lambda) or not is_stub(node))}


def unstored(notebook):
    """What is wrong with the outputs that a notebook is stored with, as (number of the cell, text).
    """
    wrong = [(i, f"no {tag}") for i, tag in missing(notebook)]
    code = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for count, (i, cell) in enumerate(code, 1):
        if cell.execution_count != count:
            wrong.append((i, "not run from top to bottom"))
        for output in cell.outputs:
            text = nbformat.v4.writes(nbformat.v4.new_notebook(
                cells=[nbformat.v4.new_code_cell(outputs=[output])]))
            if output.output_type == "error" or output.get("name") == "stderr":
                wrong.append((i, "an error or a warning"))
            if re.search(r"/(home|root|tmp|work|Users)/", text):
                wrong.append((i, "a path of the machine it was run on"))
            if len(output.get("data", {}).get("image/png", "")) * 3 / 4 > 100_000:
                wrong.append((i, "a large image"))
    return wrong


@contextlib.contextmanager
def alone(path):
    """Only one process at a time; the others wait."""
    with open(path, "w") as file:
        try:
            import fcntl                                             # Windows has none
            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:
            pass
        yield


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """What a fresh clone holds of the files that a notebook may use: sources and notebooks, no
    runs. One for all processes of pytest -n."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / "clone"
    (root / "notebooks").mkdir(parents=True, exist_ok=True)
    with alone(root / "copying.lock"):
        for path in [*HERE.parent.glob("*.py"), *HERE.glob("*.py"), *NOTEBOOKS]:
            copy = root / path.relative_to(HERE.parent)
            if not copy.exists():
                shutil.copy(path, copy)
    return root


def executed(path, clone):
    """The notebook after a run in the clone. Each runs once for all processes, the first one before
    all others that use its model."""
    if path in STORIES[1:]:
        executed(STORIES[0], clone)
    done = clone / f"executed-{path.name}"
    with alone(clone / f"{path.name}.lock"):
        if not done.exists():
            notebook = nbformat.read(path, as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs, cell.execution_count = [], None
            execute(notebook, clone / "notebooks")
            nbformat.write(notebook, done)
    return nbformat.read(done, as_version=4)


def small(*sources, tags=()):
    cells = [nbformat.v4.new_code_cell(source, metadata=dict(tags=list(tags)))
             for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_runs_top_to_bottom(path, clone):
    """Without an error, so all bounds hold, and with what its tags promise."""
    notebook = executed(path, clone)
    assert any(tags_of(cell) & set(TYPES) for cell in notebook.cells), "no cell promises an output"
    assert missing(notebook) == []


@pytest.mark.parametrize("path", STORIES, ids=name_of)
def test_stored_with_outputs(path, clone):
    """Those of a whole run, of the same types as a fresh run puts out."""
    notebook = nbformat.read(path, as_version=4)
    assert unstored(notebook) == []
    fresh = executed(path, clone)
    assert [put_out(cell) for cell in notebook.cells] == [put_out(cell) for cell in fresh.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}, "metadata of an editor"
    for i, cell in enumerate(notebook.cells):
        assert set(cell.metadata) <= {"tags"}, f"cell {i}: metadata of an editor"
        width = max(map(len, cell.source.split("\n")))
        assert width <= 100 or path not in STORIES, f"cell {i}: a line over 100 columns"
        if cell.cell_type == "code" and path not in STORIES:
            assert not cell.outputs and cell.execution_count is None, f"cell {i}: has an output"
    assert path.stat().st_size < 600_000


@pytest.mark.parametrize("path", STORIES, ids=name_of)
def test_text_has_bounds(path):
    """Cells tagged "bounds" assert, and only they do."""
    notebook = nbformat.read(path, as_version=4)
    assert sum("bounds" in tags_of(cell) for cell in notebook.cells) >= 2
    for i, source in code_cells(notebook):
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source)))
        assert asserts == ("bounds" in tags_of(notebook.cells[i])), f"cell {i}"


def test_one_pretrained_model():
    """The cells tagged "settings" are alike, so that the notebooks find each other's model."""
    settings = []
    for path in STORIES:
        notebook = nbformat.read(path, as_version=4)
        found = [cell.source for cell in notebook.cells if "settings" in tags_of(cell)]
        assert len(found) == 1, path.name
        settings.append(found[0].partition("critkl.start(cfg)")[0])
    assert len(set(settings)) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_holds_no_second_copy(path):
    for i, source in code_cells(nbformat.read(path, as_version=4)):
        assert not redefined(source), f"cell {i} defines {redefined(source)}, which critkl.py has"


def test_finds_critkl_from_the_root(clone):
    """The first code cell imports there too; the runs begin in notebooks/."""
    program = "import sys\n"
    for path in NOTEBOOKS:
        _, source = code_cells(nbformat.read(path, as_version=4))[0]
        program += (f"before = list(sys.path)\nexec({source!r}, {{}})\nsys.path[:] = before\n"
                    "for name in ('critkl', 'grade', 'steps'):\n    sys.modules.pop(name, None)\n")
    subprocess.run([sys.executable, "-I", "-c", program], cwd=clone, check=True)


# --------------------------------------------------------------------------------------------------
# The tests can fail.

def test_an_error_is_seen(tmp_path):
    with pytest.raises(Exception, match="AssertionError"):
        execute(small("assert 1 > 2"), tmp_path)


def test_outputs_are_seen(tmp_path):
    """Missing ones and those that must not be stored; and the kernel is this Python."""
    picture = "import matplotlib.pyplot as plt\nplt.plot([0])\nplt.show()"
    notebook = small("import os, sys\nprint(sys.executable, os.getcwd())",
                     "print(' ')", "print('x')", "1", "'x';", "None", tags=["text"])
    notebook.cells += small("print('x')", picture, tags=["image"]).cells
    notebook.cells += small(picture, tags=["text", "output"]).cells
    notebook.cells += small("print('/home/somebody/x')", "print('x', file=sys.stderr)").cells
    notebook.cells += small("from IPython.display import display\n"
                            "display({'image/png': 'A' * 200_000}, raw=True)").cells
    execute(notebook, tmp_path)
    assert notebook.cells[0].outputs[0].text.split() == [sys.executable, str(tmp_path)]
    nothing = [(1, "text"), (4, "text"), (5, "text"), (6, "image"), (8, "text")]
    assert missing(notebook) == nothing
    wrong = unstored(notebook)
    assert {(i, f"no {tag}") for i, tag in nothing} <= set(wrong)
    assert (9, "a path of the machine it was run on") in wrong
    assert (10, "an error or a warning") in wrong
    assert (11, "a large image") in wrong
    notebook.cells[2].execution_count = 9
    assert (2, "not run from top to bottom") in unstored(notebook)


def test_a_copy_is_seen():
    assert redefined("def certainty(logits):\n    return 1 - logits") == {"certainty"}
    assert redefined("if True:\n    class GPT: pass") == {"GPT"}
    assert redefined("entropy = lambda logits: 0") == {"entropy"}
    stub = "def certainty(logits):\n    'A stub.'\n    raise NotImplementedError"
    assert redefined(stub) == set()
    assert redefined("def certainty(logits):\n    raise NotImplementedError('yours')") == set()
    assert redefined("from critkl import certainty\ndef coloured(text): return text") == set()
