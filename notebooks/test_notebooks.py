"""Tests of the notebooks: each runs from a fresh copy of the repository, in a real kernel, without an error.

    python -m pytest notebooks/test_notebooks.py

A cell tagged "text", "image" or "html" must put out something of that type, one tagged "output" something. Other
cells need not. The notebooks run in a temporary folder, in the order of their names, and share the pretrained
model that the first one makes. Each also runs alone.
"""
import ast
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
TYPES = dict(text={"stdout", "text/plain"}, image={"image/png"}, html={"text/html"})
TYPES["output"] = set.union(*TYPES.values())


def execute(notebook, folder):
    """Run it in place, in the Python that runs the tests: without kernel_dirs no installed kernel is looked for."""
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    NotebookClient(notebook, km=manager, timeout=1800, resources=dict(metadata=dict(path=str(folder)))).execute()


def put_out(cell):
    """The types that the outputs of an executed cell have. What is blank does not count, nor do the words that stand
    for a picture where none can be shown."""
    found = set()
    for output in cell.outputs:
        bundle = {output.name: output.text} if output.output_type == "stream" else output.get("data", {})
        kinds = {kind for kind, content in bundle.items() if content.strip()}
        found |= kinds - {"text/plain"} if len(kinds) > 1 else kinds
    return found


def missing(notebook):
    """(number of the cell, tag) of all that its tags promise and its outputs do not hold."""
    return [(i, tag) for i, cell in enumerate(notebook.cells) for tag in cell.metadata.get("tags", ())
            if tag in TYPES and not put_out(cell) & TYPES[tag]]


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
    """Name to node of the functions and classes that a piece of code defines, also as name = lambda."""
    found = {node.name: node for node in ast.walk(tree)
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    return found | {target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Lambda) for target in node.targets if isinstance(target, ast.Name)}


def redefined(source):
    """Names of critkl.py's functions and classes that the source defines again, stubs aside."""
    public = {node.name for node in ast.parse((HERE.parent / "critkl.py").read_text()).body
              if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {name for name, node in defined(ast.parse(source)).items()
            if name in public and (isinstance(node, ast.Lambda) or not is_stub(node))}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What a fresh clone holds of the files that a notebook may use: sources and notebooks, no runs."""
    root = tmp_path_factory.mktemp("clone")
    for path in [*HERE.parent.glob("*.py"), *HERE.glob("*.py"), *NOTEBOOKS]:
        (root / path.relative_to(HERE.parent)).parent.mkdir(exist_ok=True)
        shutil.copy(path, root / path.relative_to(HERE.parent))
    return root


def small(*sources, tags=()):
    cells = [nbformat.v4.new_code_cell(source, metadata=dict(tags=list(tags))) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_top_to_bottom(path, clone):
    notebook = nbformat.read(path, as_version=4)
    assert any(set(cell.metadata.get("tags", ())) & set(TYPES) for cell in notebook.cells), "no cell promises an output"
    execute(notebook, clone / "notebooks")
    assert missing(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for i, cell in enumerate(notebook.cells):
        assert set(cell.metadata) <= {"tags"}, f"cell {i}: metadata of an editor"
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"cell {i}: stored with its output"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_holds_no_second_copy(path):
    for i, source in code_cells(nbformat.read(path, as_version=4)):
        assert not redefined(source), f"cell {i} defines {redefined(source)}, which critkl.py has"


@pytest.mark.parametrize("where", (".", "notebooks"))
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_finds_critkl(path, where, clone):
    """The first code cell imports, from the root of the repository as from notebooks/."""
    _, source = code_cells(nbformat.read(path, as_version=4))[0]
    subprocess.run([sys.executable, "-I", "-c", source], cwd=clone / where, check=True)


# ----------------------------------------------------------------------------------------------------
# The tests can fail.

def test_kernel_is_this_python(tmp_path):
    notebook = small("import os, sys\nprint(sys.executable, os.getcwd())")
    execute(notebook, tmp_path)
    assert notebook.cells[0].outputs[0].text.split() == [sys.executable, str(tmp_path)]


def test_an_error_is_seen(tmp_path):
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(small("1 / 0"), tmp_path)


def test_a_missing_output_is_seen(tmp_path):
    notebook = small("print(' ')", "print('x')", "1", "'x';", "None", tags=["text"])
    notebook.cells += small("print('x')", "import matplotlib.pyplot as plt\nplt.plot([0])\nplt.show()",
                            tags=["image"]).cells
    notebook.cells += small("plt.plot([0])\nplt.show()", tags=["text", "output"]).cells
    execute(notebook, tmp_path)
    assert missing(notebook) == [(0, "text"), (3, "text"), (4, "text"), (5, "image"), (7, "text")]


def test_a_copy_is_seen():
    assert redefined("def certainty(logits):\n    return 1 - logits") == {"certainty"}
    assert redefined("if True:\n    class GPT: pass") == {"GPT"}
    assert redefined("entropy = lambda logits: 0") == {"entropy"}
    assert redefined("def certainty(logits):\n    'A stub.'\n    raise NotImplementedError") == set()
    assert redefined("def certainty(logits):\n    raise NotImplementedError('yours')") == set()
    assert redefined("from critkl import certainty\ndef coloured(text): return text") == set()
