"""Public names say what they take and give: defaults, shapes, examples, sources."""

import dataclasses
import inspect
import re
import textwrap

import pytest
from test_docs import CALLABLES, FUNCTIONS, RECORDS, STATES, entries, sections

import shampoo_optax as so

TAKE_ARGUMENTS = FUNCTIONS | {
    name: record for name, record in RECORDS.items() if "Args" in sections(record)
}
# The records that take none of the places of a root, a basis or an orthogonalisation.
OTHERS = {"Axes", "Batch", "Blocking", "Description", "Diagnosis", "Groups"}
OTHERS |= {"Placement", "Rule", "Storage", "WarmupCosine"}
METHODS = sorted(set(RECORDS) - OTHERS)


def said_of(thing, argument: str) -> str:
    """What the section `Args` says of an argument, on one line."""
    text = textwrap.dedent(sections(thing)["Args"])
    parts = re.split(r"^(?=\S)", text, flags=re.M)
    (part,) = (part for part in parts if argument in entries(part))
    return " ".join(part.split())


def stated_default(text: str):
    """The value of the last `default`: code in backticks, a number, or `none`."""
    stated = r"[Dd]efault:? (?:`([^`]+)`|(none|[-+.\de]*\d))(?=[^\w]|$)"
    *_, (code, number) = re.findall(stated, text)
    return None if number == "none" else eval(code or number, dict(vars(so)))


def test_what_is_stated_is_read():
    assert stated_default("a default exponent of x. Default `None`: none.") is None
    assert stated_default("r > 0, default 1e-2.") == 0.01
    assert (
        stated_default("Default `Blocking(block_size=None)`: whole.").block_size is None
    )
    assert stated_default("Default: none.") is None


@pytest.mark.parametrize("name", TAKE_ARGUMENTS)
def test_defaults_are_those_stated(name):
    thing = TAKE_ARGUMENTS[name]
    for argument, parameter in inspect.signature(thing).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert stated_default(said_of(thing, argument)) == parameter.default


@pytest.mark.parametrize("name", CALLABLES)
def test_there_is_an_example(name):
    assert ">>> " in sections(CALLABLES[name])["Examples"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_its_source(name):
    assert dataclasses.fields(RECORDS[name])
    cited = sections(RECORDS[name])["References"]
    assert re.search(r"[12]\d{3}", cited) and "https://" in cited


@pytest.mark.parametrize("name", STATES)
def test_fields_of_a_state_have_shapes_and_dtypes(name):
    source = inspect.getsource(STATES[name])
    for field in STATES[name]._fields:
        (comment,) = re.findall(rf"^    {field}: [^#\n]*#(.*)", source, re.M)
        assert re.search(r"\[.*\]|shapes of|as that transform", comment), field


# What an argument may be, in words: arrays and trees by shape or dtype, numbers by
# range, others by name or type.
KINDS = r"""(?x)
    shape|dtype|tree|array|state|parameters|\[\]   # what holds numbers
    |>=|>\ 0|\bin\ \[|\bin\ \(|integer|number|above|powers?\b|rate|units|schedule
    |whether|`"|function|maps|:class:|mapping|mesh|axes|path|name|transform|label|axis
"""


@pytest.mark.parametrize("name", TAKE_ARGUMENTS)
def test_arguments_say_what_they_are(name):
    thing = TAKE_ARGUMENTS[name]
    for argument in inspect.signature(thing).parameters:
        _, _, text = said_of(thing, argument).partition(":")
        assert re.search(KINDS, text), (argument, text)
