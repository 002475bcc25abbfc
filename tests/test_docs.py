"""Holds the documents to the code: docstrings, their examples, README, CHANGELOG."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import shampoo_optax as so

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "shampoo_optax" / "CHANGELOG.md").read_text()

PUBLIC = {name: getattr(so, name) for name in so.__all__}
CALLABLES = {name: value for name, value in PUBLIC.items() if callable(value)}
FUNCTIONS = {n: v for n, v in CALLABLES.items() if inspect.isfunction(v)}
RECORDS = {n: v for n, v in CALLABLES.items() if dataclasses.is_dataclass(v)}
STATES = {n: v for n, v in CALLABLES.items() if hasattr(v, "_fields")}
TRANSFORMS = {
    name: function
    for name, function in FUNCTIONS.items()
    if "GradientTransformation" in str(inspect.signature(function).return_annotation)
}
# The transforms that compute nothing a paper could describe.
PLUMBING = {"fill_absent"}
MODULES = [
    f"shampoo_optax.{info.name}"
    for info in pkgutil.walk_packages(so.__path__)
    if not info.name.startswith("__")
]


def sections(thing) -> dict[str, str]:
    """Splits a docstring into its Google sections; the text before them is ``""``."""
    found = {"": ""}
    current = ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        heading = re.fullmatch(r"([A-Z][A-Za-z]*):", line)
        if heading:
            current = heading[1]
            found[current] = ""
        else:
            found[current] += line + "\n"
    return found


def entries(section: str) -> set[str]:
    """Lists the names that a section describes: ``name: ...`` or ``a, b: ...``."""
    heads = re.findall(
        r"^([*\w][*\w, ]*?)(?: \(.*?\))?:", textwrap.dedent(section), re.M
    )
    return {name.strip(" *") for head in heads for name in head.split(",")}


def raises_itself(thing) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def test_all_is_sorted_and_complete():
    assert list(so.__all__) == sorted(so.__all__)
    assert len(set(so.__all__)) == len(so.__all__)
    assert FUNCTIONS and RECORDS and STATES and TRANSFORMS


@pytest.mark.parametrize("name", CALLABLES)
def test_docstring_starts_with_one_sentence(name):
    first, _, rest = sections(CALLABLES[name])[""].partition("\n")
    assert first.endswith(".")
    assert not rest.strip() or rest.startswith("\n")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_docstring(name):
    function = FUNCTIONS[name]
    found = sections(function)
    arguments = set(inspect.signature(function).parameters)
    assert arguments == (entries(found["Args"]) if arguments else set())
    assert found["Returns"].strip()
    assert ">>>" in found["Examples"]
    if raises_itself(function) or (name in TRANSFORMS and arguments):
        assert "ValueError" in found["Raises"]


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - PLUMBING))
def test_algorithm_cites_its_source(name):
    cited = sections(TRANSFORMS[name])["References"]
    assert re.search(r"[12]\d{3}", cited) and "https://" in cited


@pytest.mark.parametrize("name", RECORDS)
def test_record_docstring(name):
    record = RECORDS[name]
    found = sections(record)
    fields = {field.name for field in dataclasses.fields(record)}
    assert entries(found.get("Args") or found["Attributes"]) == fields
    if hasattr(record, "__post_init__"):
        assert "ValueError" in found["Raises"]


@pytest.mark.parametrize("name", STATES)
def test_state_docstring(name):
    state = STATES[name]
    found = sections(state)
    assert entries(found.get("Attributes") or found["Args"]) == set(state._fields)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert module.__doc__
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=options).failed == 0


def test_readme_code_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert blocks
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)


@pytest.mark.parametrize(
    "command",
    [
        'python -m pip install -e ".[demo]" && python -m benchmarks.train',
        'python -m pip install -e ".[test]" && python -m pytest',
    ],
)
def test_readme_names_the_commands(command):
    assert command in README


def test_readme_is_short():
    assert README.count("\n") <= 120


def test_readme_links_lead_somewhere():
    local = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_readme_table_gives_the_defaults():
    parameters = inspect.signature(so.shampoo).parameters
    shown = {}
    for names, defaults in re.findall(r"^\| (`.+?) \| (`.+?) \|", README, re.M):
        values = [eval(text, {"so": so}) for text in re.findall("`(.+?)`", defaults)]
        shown |= zip(re.findall("`(.+?)`", names), values, strict=True)
    assert len(shown) >= 10
    assert shown == {name: parameters[name].default for name in shown}


def test_changelog_top_version():
    newest = re.search(r"^## \[?(\d[^\]\s]*)", CHANGELOG, re.M)
    assert newest[1] == so.__version__
