"""Every public transform, and what the acceptance list needs to know of each.

A newcomer adds a line to `SUBJECTS` and inherits every check of `test_acceptance.py`,
`test_acceptance_state.py` and `test_acceptance_mesh.py`. A check holds for a transform
unless its line gives a reason why it makes no sense there.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax

import shampoo_optax as so

STEPS = 4  # of a round: refreshes at the second and the last
COLUMNS = so.Blocking(block_size=None, merge_to=None)


class Subject(NamedTuple):
    """A public transform with the arguments that the checks give it."""

    make: Callable
    numbers: dict = {}  # arguments that are injected; the rate is not among them
    static: dict = {}  # the others
    rate: float = 1e-2  # solves the problems within 30,000 steps
    solving: dict = {}  # numbers in place of those above while it does
    copies: int = 0  # what its state holds as often as there are parameters
    column: bool = False  # takes matrices only: vectors become columns
    no_sense: dict = {}  # {check: reason}


CHECKS = {
    "abstract init": "`init` on shapes",
    "count": "the number of steps can be read from the state",
    "guard": "C2, C6: a gradient that is not finite leaves all else as it was",
    "flatten": "`optax.flatten`",
    "inject": "all numbers may be arrays in the state",
    "mirror": "`copies` arrays of the state mirror each parameter",
    "wide": "C21, C23: no array of less than the parameter's bits, none that is empty",
    "program": "what is checked on a compiled program, on a mesh or none",
}

WELL = dict(b2=0.9, refresh_every=2)  # and factors of full rank at a refresh
RIDGE = WELL | dict(relative_eps=1e-2)
SLOW = dict(refresh_every=100)  # the statistics of a problem hardly change
ALONE = dict(batch_size=1.0)

COUNTS_NOTHING = {"count": "counts no steps"}
UNGUARDED = {"guard": "passes on what it is given, as optax's own do"}
ENTRYWISE = UNGUARDED
FIRST_VALUES = {"abstract init": "starts from the values of the parameters"}
COUNTS_OFTEN = {"count": "so do the transforms that it is a chain of"}
OF_ALIAS = {"program": "its alias runs it, a chain of it with a step size"}

RUN = dict(steps=100)
OF_GROUPS = OF_ALIAS | COUNTS_OFTEN | {"inject": "is made of numbers, schedule and all"}

SUBJECTS = {
    # aliases
    "shampoo": Subject(so.shampoo, RIDGE, solving=SLOW),
    "soap": Subject(so.soap, WELL, solving=SLOW),
    "kl_shampoo": Subject(so.kl_shampoo, RIDGE, solving=SLOW),
    "kl_soap": Subject(so.kl_soap, RIDGE, solving=SLOW),
    "inverse_free_shampoo": Subject(
        so.inverse_free_shampoo,
        ALONE | dict(refresh_every=2),
        rate=5e-4,
        solving=dict(eps=1.0),
        copies=1,
    ),
    "root_free_rmsprop": Subject(
        so.root_free_rmsprop, ALONE, rate=1e-3, solving=dict(eps=1.0), copies=1
    ),
    # directions
    "scale_by_shampoo": Subject(so.scale_by_shampoo, RIDGE, no_sense=OF_ALIAS),
    "scale_by_soap": Subject(so.scale_by_soap, WELL, no_sense=OF_ALIAS),
    "scale_by_kl_shampoo": Subject(so.scale_by_kl_shampoo, RIDGE, no_sense=OF_ALIAS),
    "scale_by_kl_soap": Subject(so.scale_by_kl_soap, RIDGE, no_sense=OF_ALIAS),
    "scale_by_inverse_free_shampoo": Subject(
        so.scale_by_inverse_free_shampoo,
        ALONE | dict(refresh_every=2),
        no_sense=OF_ALIAS,
    ),
    "scale_by_root_free_rms": Subject(
        so.scale_by_root_free_rms, ALONE, no_sense=OF_ALIAS
    ),
    "scale_by_spectral_descent": Subject(
        so.scale_by_spectral_descent,
        dict(b1=0.9),
        # The quintic of Newton–Schulz amplifies the last bits of a singular value.
        dict(blocking=COLUMNS, method=so.Svd()),
        rate=5e-4,
        column=True,
        no_sense={"flatten": "takes matrices only, not a vector of all parameters"},
    ),
    "scale_by_sign_descent": Subject(so.scale_by_sign_descent, rate=5e-4),
    # what else stands in a chain
    "scale_by_momentum": Subject(
        so.scale_by_momentum,
        dict(momentum=0.9),
        rate=1e-3,
        copies=1,
        no_sense=UNGUARDED | COUNTS_NOTHING,
    ),
    "decay_weights": Subject(
        so.decay_weights,
        dict(weight_decay=1e-4),
        rate=1e-3,
        no_sense=UNGUARDED,
    ),
    "fill_absent": Subject(
        so.fill_absent, rate=1e-3, no_sense=UNGUARDED | COUNTS_NOTHING
    ),
    "primal_averaging": Subject(
        so.primal_averaging,
        dict(eval_coefficient=0.9, train_coefficient=0.9),
        rate=1e-3,
        copies=1,
        no_sense=UNGUARDED | FIRST_VALUES,
    ),
    "schedule_free": Subject(
        so.schedule_free, rate=1e-3, copies=1, no_sense=UNGUARDED | FIRST_VALUES
    ),
    "scale_by_row_wise_adagrad": Subject(
        so.scale_by_row_wise_adagrad,
        rate=1.0,
        no_sense=COUNTS_NOTHING
        | {"guard": "leaves a bad row, and counts none"}
        | {"mirror": "keeps one number for a row"},
    ),
    "graft": Subject(
        so.graft,
        static=dict(direction=so.scale_by_momentum(0.9), magnitude=so.cap_rms(1.0)),
        rate=1e-3,
        copies=1,
        no_sense=UNGUARDED | COUNTS_NOTHING,
    ),
    "cap_rms": Subject(
        so.cap_rms, dict(max_rms=1.0), rate=1e-3, no_sense=UNGUARDED | COUNTS_NOTHING
    ),
    "match_rms": Subject(
        so.match_rms, dict(rms=1.0), rate=5e-4, no_sense=UNGUARDED | COUNTS_NOTHING
    ),
    "multi_steps": Subject(
        so.multi_steps,
        dict(every=1),
        dict(tx=so.scale_by_momentum(0.9)),
        rate=1e-3,
        copies=2,
        no_sense=UNGUARDED
        | COUNTS_NOTHING
        | {"wide": "optax sums in float32, and for an empty parameter too"},
    ),
    # presets
    "replace_adamw": Subject(so.replace_adamw, no_sense=OF_ALIAS | COUNTS_OFTEN),
    "replace_sgd": Subject(so.replace_sgd, copies=1, no_sense=OF_ALIAS),
    "replace_adamw_by_soap": Subject(
        so.replace_adamw_by_soap, no_sense=OF_ALIAS | COUNTS_OFTEN
    ),
    "algoperf_winner": Subject(so.algoperf_winner, static=RUN, no_sense=OF_GROUPS),
    "llm_pretraining": Subject(
        so.llm_pretraining,
        static=RUN | dict(learning_rate=1.0),
        no_sense=OF_GROUPS
        | {"flatten": "one vector is left to AdamW", "mirror": "Adam's moments do"}
        | {"wide": "optax's Adam has moments like the parameters"},
    ),
}


def names(check=None):
    """The transforms for which a check makes sense."""
    return [name for name, its in SUBJECTS.items() if check not in its.no_sense]


# ---- the parameters: those of four problems, whose losses are added

STARTS = {
    "matrix": np.zeros((2, 2)),
    "mixed": {"line": np.zeros(2), "square": np.zeros((2, 2))},
    "parabola": np.array([-1.0, 10.0]),
    "rosenbrock": np.zeros(2),
}
GOALS = {
    "matrix": np.array([[3.0, -2.0], [1.0, 4.0]]),
    "mixed": {
        "line": np.array([1.0, -1.0]),
        "square": np.array([[1.0, 0.0], [-1.0, 1.0]]),
    },
    "parabola": np.array([1.0, -1.0]),
    "rosenbrock": np.ones(2),
}


def loss(params):
    """Squared distances to the goals, and Rosenbrock's function."""
    x, y = params["rosenbrock"].ravel()
    bowls = {key: part for key, part in params.items() if key != "rosenbrock"}
    goals = {key: GOALS[key] for key in bowls}
    squares = jax.tree.map(
        lambda p, g: jnp.sum((p - g.reshape(p.shape).astype(p.dtype)) ** 2),
        bowls,
        goals,
    )
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2 + sum(jax.tree.leaves(squares))


def as_parameters(tree, column, dtype=jnp.float32):
    def leaf(x):
        return jnp.asarray(x.reshape(-1, 1) if column and x.ndim < 2 else x, dtype)

    return jax.tree.map(leaf, tree)


def starts(name, dtype=jnp.float32):
    return as_parameters(STARTS, SUBJECTS[name].column, dtype)


def gradients(name, seed=0, steps=STEPS, dtype=jnp.float32):
    """A list of random gradients, well-conditioned, with means far from 0."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        return rng.standard_normal(x.shape) + 3 * (np.eye(2) if x.ndim == 2 else 1)

    trees = [jax.tree.map(leaf, STARTS) for _ in range(steps)]
    return [as_parameters(tree, SUBJECTS[name].column, dtype) for tree in trees]


# ---- the transforms


def takes(name, argument):
    return argument in inspect.signature(SUBJECTS[name].make).parameters


def needs(name, argument):
    """Whether it takes an argument without a default."""
    parameter = inspect.signature(SUBJECTS[name].make).parameters.get(argument)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _arguments(name, kind, others):
    subject = SUBJECTS[name]
    given = subject.numbers | subject.static
    if needs(name, "learning_rate"):
        given = dict(learning_rate=1.0) | given
    if kind and takes(name, "placement"):
        given = given | dict(placement=helpers.placement_of(8, kind=kind))
    return given | others


def build(name, kind=None, **others):
    """The transform with its arguments, on 8 devices where a kind of mesh is given."""
    return SUBJECTS[name].make(**_arguments(name, kind, others))


def inject(name, kind=None, **others):
    """The same with all numbers in the state; no argument is said to be static."""
    given = _arguments(name, kind, others)
    return optax.inject_hyperparams(SUBJECTS[name].make)(**given)


def optimizer(name, kind=None):
    """One that descends, with all numbers in the state."""
    if needs(name, "learning_rate"):
        return inject(name, kind)
    rate = optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=1.0)
    return optax.chain(inject(name, kind), rate)


def with_numbers(state, **numbers):
    """The state with other hyperparameters."""

    def is_injected(node):
        return hasattr(node, "hyperparams")

    def change(node):
        if not is_injected(node):
            return node
        held = node.hyperparams
        new = {k: jnp.full_like(held[k], numbers[k]) for k in held if k in numbers}
        return node._replace(hyperparams=held | new)

    return jax.tree.map(change, state, is_leaf=is_injected)


@functools.lru_cache
def program(name, kind=None):
    """Rounds of steps in one compiled program, and what they start from.

    The function takes the number of rounds, a weight of each problem's gradient, what
    is added to it and whether the step is taken (for the steps of a round, stacked),
    parameters, and state. It gives the last two, and the parameters at every step of
    the last round. The buffers of both are donated.
    """
    tx = optimizer(name, kind)

    @functools.partial(helpers.quick_jit, donate_argnums=(4, 5))
    def run(rounds, weights, pushes, taken, params, state):
        def weigh(weight, slopes, pushes):
            return jax.tree.map(lambda g, p: weight * g + p, slopes, pushes)

        def step(carry, this):
            push, taken = this
            params, state = carry

            def update():
                slopes = jax.grad(loss)(params)
                grads = {k: weigh(weights[k], slopes[k], push[k]) for k in slopes}
                updates, after = tx.update(grads, state, params, unknown=weights)
                return optax.apply_updates(params, updates), after

            carry = jax.lax.cond(taken, update, lambda: carry)
            return carry, carry[0]

        def one_round(_, carry):
            return jax.lax.scan(step, carry[0], (pushes, taken))

        trail = helpers.zeros_like(pushes)
        carry = jax.lax.fori_loop(0, rounds, one_round, ((params, state), trail))
        return *carry[0], carry[1]

    def start(**numbers):
        params = helpers.replicate(starts(name), mesh_of(kind))
        return params, strong(with_numbers(first_state(name, kind, params), **numbers))

    return run, start


def first_state(name, kind, params):
    """Placed as after a step: on a mesh, what is in no placement is for us to place."""
    tx = optimizer(name, kind)
    if kind is None or not takes(name, "placement"):
        return helpers.replicate(tx.init(params), mesh_of(kind))
    return jax.jit(tx.init)(params)


def strong(state):
    """What a file gives back: optax injects whole numbers as weakly typed arrays."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)


def mesh_of(kind):
    return None if kind is None else helpers.mesh_of(8, kind=kind)


def rounds(name, kind, params, state, *, count=1, solve=(), pushes=None, taken=None):
    """Calls the program; `pushes` are 0 and all steps taken where nothing is said."""
    run, _ = program(name, kind)
    pushes = [helpers.zeros_like(starts(name))] * STEPS if pushes is None else pushes
    stacked = jax.tree.map(lambda *x: np.stack(x), *pushes)
    stacked = helpers.replicate(stacked, mesh_of(kind))
    taken = np.ones(STEPS, bool) if taken is None else np.asarray(taken)
    weights = {problem: np.float32(problem in solve) for problem in GOALS}
    return run(np.int32(count), weights, stacked, taken, params, state)


def one_round(name, kind=None, pushes=None, taken=None, **numbers):
    """Parameters and state after one round, and the parameters at each of its steps."""
    _, start = program(name, kind)
    return rounds(name, kind, *start(**numbers), pushes=pushes, taken=taken)
