"""The optimizers that are compared, each with its documented learning rate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shampoo_optax as so
from benchmarks.mesh import mesh_of

WARMUP = 0.05
WIRES = ("float32", "bfloat16", "float16")
RATES = {
    "images": dict(
        shampoo=2e-3,
        shampoo_lean=2e-3,
        soap=2e-3,
        kl_shampoo=8e-3,
        muon=2e-3,
        adamw=8e-3,
    ),
    "text": dict(
        shampoo=8e-3,
        shampoo_lean=8e-3,
        soap=8e-3,
        kl_shampoo=1.6e-2,
        muon=1.6e-2,
        adamw=4e-3,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What an optimizer is built from, besides its name and schedule.

    Attributes:
      weight_decay: decoupled, on matrices only.
      block_size: the largest side of a block, for Shampoo and SOAP.
      refresh_every: steps between two computations of the roots or bases.
      clip: the largest norm of the whole gradient, or None.
      devices: how many divide the batch and, for Shampoo and SOAP, the state.
      wire: the dtype in which directions travel between them, one of `WIRES`; None
        stands for float32.
    """

    weight_decay: float
    block_size: int
    refresh_every: int
    clip: float | None
    devices: int = 1
    wire: str | None = None


def warmup_cosine(rate: float, steps: int) -> optax.Schedule:
    """Rises linearly over the first twentieth of the steps, then falls to zero."""
    warmup = max(1, round(WARMUP * steps))
    return optax.warmup_cosine_decay_schedule(
        rate / warmup, rate, warmup_steps=warmup, decay_steps=max(steps, warmup + 1)
    )


def make_optimizer(
    name: str, schedule: optax.Schedule, settings: Settings
) -> optax.GradientTransformation:
    """Builds an optimizer of `OPTIMIZERS` by name, with clipping where it is set."""
    optimizer = OPTIMIZERS[name](schedule, settings)
    if settings.clip is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(settings.clip), optimizer)


def _matrices(params: Any) -> Any:
    """Marks the parameters that decay: those of two dimensions or more."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _placement(settings: Settings) -> so.Placement | None:
    mesh = mesh_of(settings.devices)
    return mesh and so.Placement(mesh, dtype=settings.wire)


def _adamw(
    schedule: optax.Schedule, settings: Settings
) -> optax.GradientTransformation:
    return optax.adamw(
        schedule, b2=0.99, weight_decay=settings.weight_decay, mask=_matrices
    )


def _shared(settings: Settings) -> dict[str, Any]:
    """Returns what Shampoo, KL-Shampoo and SOAP take alike."""
    return dict(
        b1=0.9,
        b2=0.99,
        weight_decay=settings.weight_decay,
        mask=_matrices,
        refresh_every=settings.refresh_every,
        blocking=so.Blocking(block_size=settings.block_size),
        placement=_placement(settings),
    )


def _shampoo(
    schedule: optax.Schedule, settings: Settings
) -> optax.GradientTransformation:
    return so.shampoo(schedule, graft="adam", **_shared(settings))


def lean(refresh_every: int) -> dict[str, Any]:
    """Options that cost less: no factors of vectors, each fifth gradient's statistics.

    With a `b2` to that power their mean reaches back over as many steps.
    """
    every = min(5, refresh_every)
    axes = so.Axes(min_order=2)
    return dict(b2=0.99**every, graft_b2=0.99, statistics_every=every, axes=axes)


def _shampoo_lean(
    schedule: optax.Schedule, settings: Settings
) -> optax.GradientTransformation:
    less = lean(settings.refresh_every)
    return so.shampoo(schedule, graft="adam", **_shared(settings) | less)


def _kl_shampoo(
    schedule: optax.Schedule, settings: Settings
) -> optax.GradientTransformation:
    return so.kl_shampoo(schedule, graft="adam", **_shared(settings))


def _soap(schedule: optax.Schedule, settings: Settings) -> optax.GradientTransformation:
    return so.soap(schedule, **_shared(settings))


def _size_of_adamw(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Gives an orthogonal matrix entries as large as AdamW's are seen to be."""
    return 0.2 * jnp.sqrt(jnp.maximum(rows, columns))


def _muon(schedule: optax.Schedule, settings: Settings) -> optax.GradientTransformation:
    """Muon for hidden matrices, AdamW for all else."""
    direction = so.scale_by_spectral_descent(
        method=so.NewtonSchulz(scale=_size_of_adamw), placement=_placement(settings)
    )
    muon = optax.chain(
        direction,
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    rest = dict.fromkeys((rule.label for rule in so.RULES), _adamw(schedule, settings))
    return optax.partition(rest | {"matrix": muon}, so.label_by(*so.RULES))


OPTIMIZERS: dict[
    str, Callable[[optax.Schedule, Settings], optax.GradientTransformation]
] = {
    "shampoo": _shampoo,
    "shampoo_lean": _shampoo_lean,
    "adamw": _adamw,
    "soap": _soap,
    "kl_shampoo": _kl_shampoo,
    "muon": _muon,
}
