"""Donated state is updated in place: no step without refresh copies its arrays.

KL-SOAP and the paper's form of SOAP are not among them: they use the old bases of a
step together with the new ones. Loops of staggered refreshes are not looked into: they
run for slots whose turn it is.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import shampoo_optax as so
from shampoo_optax._stacks import BUNDLE, bundles

SHAPES = {"w": (48, 40), "b": (56,), "v": (144, 120)}  # the last in no bundle
METHODS = {
    "shampoo": so.scale_by_shampoo,
    "kl_shampoo": so.scale_by_kl_shampoo,
    "soap": so.scale_by_soap,
    "staggered": lambda **k: so.scale_by_shampoo(stagger=True, **k),
    "bases": lambda **k: so.scale_by_shampoo(root=so.Eigendecomposed(), **k),
}


def compiled(tx):
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = tx.init(params)
    update = jax.jit(tx.update, donate_argnums=1).lower(params, state, params)
    return update.compile(), state


def computations(text):
    """The body of each computation of a compiled program, by name."""
    parts = re.split(r"\n(?=%|ENTRY )", text)
    return {part.split(" ", 1)[0].strip("%"): part for part in parts if "{" in part}


def refresh_free(bodies):
    """The bodies that run at every step: the entry's, and what it calls in any case."""
    (entry,) = (body for name, body in bodies.items() if name == "ENTRY")
    called, ahead = [], [entry]
    while ahead:
        body = ahead.pop()
        called.append(body)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", body):
            ahead.append(bodies[branches.split(",")[0].strip().strip("%")])
    return called


def copied(text, state):
    """What is copied of the state: all of its arrays but those of numbers a slot."""
    kept = {leaf.shape[1:] for leaf in jax.tree.leaves(state) if leaf.ndim > 1}
    bodies = refresh_free(computations(text))
    copies = [
        tuple(map(int, shape.split(",")[1:]))
        for body in bodies
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", body)
    ]
    return kept.intersection(copies)


@pytest.mark.parametrize("name", METHODS)
def test_all_of_the_state_is_updated_in_place(name):
    """All its bytes are those of the old state, and none of its arrays is copied."""
    program, state = compiled(METHODS[name]())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= held
    assert not copied(program.as_text(), state)


def test_small_stacks_alone_are_joined():
    sizes = dict(a=BUNDLE // 2, large=BUNDLE + 1, b=BUNDLE // 2, c=1)
    stacks = {name: jnp.zeros(size) for name, size in sizes.items()}
    assert list(bundles(stacks).values()) == [["a", "b"], ["large"], ["c"]]
    shapes = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    assert ["v"] in bundles(shapes).values()


def test_blocks_are_cut_and_pasted_by_slices():
    """Uneven blocks of parameters that share stacks: no gather, no scatter."""
    shapes = {"w": (48, 40), "v": (40, 48), "k": (3, 3, 20, 50), "b": (56,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    tx = so.scale_by_shampoo(blocking=so.Blocking(block_size=32))
    text = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    used = set(re.findall(r" (slice|concatenate|gather|scatter[\w-]*)\[", text))
    assert used == {"slice", "concatenate"}
