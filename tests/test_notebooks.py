"""Runs every notebook in a kernel of its own, and reads what is committed of it.

As a program it writes the outputs that are committed:

    python tests/test_notebooks.py notebooks/*.ipynb
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}

# Put before and after the cells of a notebook: sees to the axes of all its figures.
KEEP_FIGURES = """
from matplotlib.figure import Figure

figures, initialize = [], Figure.__init__


def keep(figure, *args, **kwargs):
    initialize(figure, *args, **kwargs)
    figures.append(figure)


Figure.__init__ = keep
"""
READ_LABELS = """
for figure in figures:
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            numbers = [text for text in axis.get_ticklabels() if text.get_visible()]
            if any(text.get_text() for text in numbers):
                assert axis.get_label_text(), f"an axis of {axes} has no label"
print("figures:", len(figures))
"""


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_figure(cell):
    outputs = cell.get("outputs", ())
    return any("image/png" in output.get("data", {}) for output in outputs)


def texts(node):
    """Yields all strings of a notebook's outputs or metadata, but no pictures."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for child in node:
            yield from texts(child)
    elif isinstance(node, dict):
        for key, child in node.items():
            if key != "image/png":
                yield from texts(child)


def environment(folder):
    """What a user's shell has: nothing of these tests, no settings of IPython."""
    ours = re.compile("JAX_|XLA_|OPENBLAS_|OMP_|MPL|PYTEST|IPYTHON|JUPYTER")
    kept = {key: value for key, value in os.environ.items() if not ours.match(key)}
    return kept | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)}


def execute(notebook, folder, **variables):
    """Runs all cells, in the folder of the notebooks; the outputs are put in place."""
    # A port that is free now may be another kernel's by the time it is bound.
    sockets = {"transport": "ipc", "ip": f"{folder}/socket"}
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
        config=Config(KernelManager=sockets),
    )
    client.execute(env=environment(folder) | variables)
    notebook.metadata = METADATA


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


# The libraries of Jupyter warn of each other; the kernel has warnings of its own.
@pytest.mark.filterwarnings("default")
def test_notebook_runs(path, tmp_path):
    notebook = read(path)
    before, after = map(nbformat.v4.new_code_cell, (KEEP_FIGURES, READ_LABELS))
    notebook.cells = [before, *notebook.cells, after]
    # What is compiled less is compiled sooner; what is committed is compiled in full.
    execute(notebook, tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    drawn = int(after.outputs[-1].text.split()[-1])
    assert drawn >= sum(map(has_figure, code_cells(notebook)))


def test_outputs_are_those_of_one_run(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_nothing_of_the_machine_is_committed(path):
    notebook = read(path)
    found = [notebook.metadata, [cell.metadata for cell in notebook.cells]]
    found += [cell.outputs for cell in code_cells(notebook)]
    text = "\n".join(texts(found))
    folders = r"(?<![\w.])/(tmp|home|root|Users|work|opt|usr|var|mnt)/|\b[A-Z]:\\"
    assert not re.search(folders, text)
    assert notebook.metadata == METADATA
    assert not any(cell.metadata for cell in notebook.cells)


def test_a_sentence_reads_each_figure(path):
    cells = read(path).cells
    following = zip(cells, [*cells[1:], nbformat.v4.new_raw_cell()], strict=True)
    after = [cell for figure, cell in following if has_figure(figure)]
    assert all(cell.cell_type == "markdown" for cell in after)
    assert all(cell.source.startswith("Reading: ") for cell in after)


def test_notebook_is_small(path):
    assert path.stat().st_size < 600_000
    assert len(code_cells(read(path))) < 15


if __name__ == "__main__":
    for name in sys.argv[1:]:
        written = read(name)
        with tempfile.TemporaryDirectory() as folder:
            execute(written, folder)
        nbformat.write(written, name)
