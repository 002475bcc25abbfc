"""The optimizers whose steps are timed beside those of `optax.adamw`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shampoo_optax as so
from benchmarks.optimizers import lean
from benchmarks.peers import GOOGLE, KRON, SOAP_JAX, Peer
from benchmarks.periods import ALIKE, DECAY, EACH, FIRST, LAST, PERIOD, RATE, SHORT
from benchmarks.shapes import Shapes, as_matrices

BASE = "optax.adamw"

LEAN, PACKED = lean(PERIOD), so.Storage(packed=True)
# The same steps in a period of 4: none, statistics, none, statistics and a refresh.
LEAN_SHORT, LEAN_WEIGHTS = dict(refresh_every=4, statistics_every=2), (4, 1, 4, 1)


@dataclass(frozen=True)
class Contender:
    """An optimizer and the steps of it that are timed.

    Attributes:
      make: builds it, given the largest side of a block.
      weights: for how many steps of a period each step of its short period stands.
      warm_up: steps before the first that counts, a multiple of the short period.
      peer: whose it is, if it is not optax's or ours.
    """

    make: Callable[[int], optax.GradientTransformation]
    weights: tuple[int, ...] = LAST
    warm_up: int = SHORT
    peer: Peer | None = None


@dataclass(frozen=True)
class Group:
    """Optimizers that take their steps in turns.

    Attributes:
      contenders: by name; `BASE` is among them.
      rivals: pairs of names, ours first, whose ratio is told.
      view: what is made of the shapes of a model.
    """

    contenders: dict[str, Contender]
    rivals: tuple[tuple[str, str], ...]
    view: Callable[[Shapes], Shapes] = list


def _adamw(block_size: int = 0) -> optax.GradientTransformation:
    return optax.adamw(RATE, weight_decay=DECAY)


def _google(block_size: int) -> optax.GradientTransformation:
    return GOOGLE.make(
        RATE,
        block_size=block_size,
        merge_small_dims_block_size=block_size,
        beta2=0.99,
        weight_decay=DECAY,
        start_preconditioning_step=SHORT,
        preconditioning_compute_steps=SHORT,
        graft_type=GOOGLE.module.GraftingType.RMSPROP,
        generate_training_metrics=False,
        **GOOGLE_EIGH,
    )


# On CPU the faster of its two ways, 3.5 times at a side of 512; the older release has
# the other one alone.
GOOGLE_EIGH = {} if GOOGLE.note.startswith("optax_shampoo") else {"eigh": True}


def _kron(block_size: int) -> optax.GradientTransformation:
    return KRON.make(
        RATE, weight_decay=DECAY, preconditioner_update_probability=1 / SHORT
    )


def _soap_jax(block_size: int) -> optax.GradientTransformation:
    return SOAP_JAX.make(RATE, weight_decay=DECAY, precondition_frequency=SHORT)


def _ours(
    alias: Callable[..., optax.GradientTransformation], **options: Any
) -> Callable[[int], optax.GradientTransformation]:
    options = dict(weight_decay=DECAY, refresh_every=SHORT) | options
    merge_to = options.pop("merge_to", 2)
    return lambda side: alias(RATE, blocking=so.Blocking(side, merge_to), **options)


def on_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives vectors and tables of a vocabulary to Adam, as Muon wants it."""

    def label(leaf: jax.Array) -> str:
        return "matrix" if leaf.ndim == 2 and max(leaf.shape) <= 10_000 else "rest"

    transforms = {"matrix": inner, "rest": _adamw()}
    return optax.partition(transforms, lambda params: jax.tree.map(label, params))


def _by_rules(block_size: int) -> optax.GradientTransformation:
    """AdamW for every group of the rules, as all but matrices are given to it."""
    labels = {rule.label for rule in so.RULES} | {"matrix"}
    return optax.partition(dict.fromkeys(labels, _adamw()), so.label_by(*so.RULES))


def muon(block_size: int, b: float = 0.95) -> optax.GradientTransformation:
    """The README's recipe, whose updates are those of `optax.contrib.muon`."""

    def b3(t: jax.Array) -> jax.Array:
        ratio = (1 - b ** (t + 2)) / (1 - b ** (t + 1))
        return b * b / (b * b + (1 - b) * (b + ratio))

    method = so.NewtonSchulz(scale=lambda m, n: jnp.sqrt(jnp.maximum(1, n / m)))
    nesterov = optax.inject_hyperparams(so.scale_by_spectral_descent)(
        b, b3=b3, method=method, blocking=so.Blocking(None, None)
    )
    return on_matrices(optax.chain(nesterov, optax.scale_by_learning_rate(RATE)))


_BASE = {BASE: Contender(_adamw, ALIKE, warm_up=1)}
_STAGGERED = _ours(so.shampoo, refresh_every=PERIOD, stagger=True)


def _lean(**options: Any) -> Contender:
    make = _ours(so.shampoo, **LEAN | LEAN_SHORT | options)
    return Contender(make, LEAN_WEIGHTS, warm_up=len(LEAN_WEIGHTS))


# What SOAP_JAX does: the paper's form and one iteration on columns in descending order,
# no factors of vectors.
PAPER = dict(
    form="paper",
    axes=so.Axes(min_order=2),
    basis=so.CholeskyBasis(),
)


def _lean_soap() -> Contender:
    make = _ours(so.soap, **PAPER | LEAN_SHORT)
    return Contender(make, LEAN_WEIGHTS, warm_up=len(LEAN_WEIGHTS))


GROUPS = {
    "shampoo": Group(
        _BASE
        | {
            "shampoo": Contender(_ours(so.shampoo)),
            "Google's Shampoo": Contender(_google, FIRST, peer=GOOGLE),
            "PSGD Kron": Contender(_kron, peer=KRON),
        },
        rivals=(("shampoo", "Google's Shampoo"), ("shampoo", "PSGD Kron")),
    ),
    "staggered": Group(
        _BASE
        | {
            "shampoo": Contender(_ours(so.shampoo)),
            "shampoo, staggered": Contender(_STAGGERED, EACH, warm_up=PERIOD),
        },
        rivals=(("shampoo, staggered", "shampoo"),),
    ),
    "lean": Group(
        _BASE
        | {
            "shampoo, lean": _lean(),
            "shampoo, lean, packed": _lean(storage=PACKED),
        },
        rivals=(("shampoo, lean, packed", "shampoo, lean"),),
    ),
    "soap": Group(
        _BASE
        | {
            "soap": Contender(_ours(so.soap)),
            "soap, as theirs": Contender(_ours(so.soap, **PAPER)),
            "soap, lean": _lean_soap(),
            "kl_shampoo": Contender(_ours(so.kl_shampoo)),
            "SOAP_JAX": Contender(_soap_jax, peer=SOAP_JAX),
        },
        rivals=tuple(
            (f"soap{kind}", "SOAP_JAX") for kind in ("", ", as theirs", ", lean")
        ),
    ),
    "plain": Group(
        _BASE
        | {
            "adamw, by rules": Contender(_by_rules, ALIKE, warm_up=1),
            "left to grafting": Contender(
                _ours(so.shampoo, axes=so.Axes(min_order=9)), ALIKE
            ),
        },
        rivals=(("adamw, by rules", BASE), ("left to grafting", BASE)),
    ),
    "muon": Group(
        _BASE
        | {
            "muon": Contender(muon, ALIKE),
            "optax.contrib.muon": Contender(
                lambda _: on_matrices(optax.contrib.muon(RATE)), ALIKE
            ),
        },
        rivals=(("muon", "optax.contrib.muon"),),
        view=as_matrices,
    ),
}

# What is compared with the official PyTorch package, which keeps triangles too.
BESIDE_TORCH = _BASE | {
    "ours, like for like": Contender(_ours(so.shampoo, storage=PACKED, merge_to=1)),
    "ours, unpacked": Contender(_ours(so.shampoo, merge_to=1)),
    "ours, lean": _lean(),
}
