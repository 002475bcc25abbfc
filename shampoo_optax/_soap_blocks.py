"""SOAP in block space: moments in the bases of factors, and when these change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_integer
from shampoo_optax._config import Options
from shampoo_optax._eigen import align, eigenbases
from shampoo_optax._factors import (
    Whiten,
    apply_axes,
    factored_memory,
    identity_bases,
    statistics_correction,
    statistics_weight,
    unit_eigenvalues,
)
from shampoo_optax._grafting import accumulate, zero_blocks
from shampoo_optax._methods import Basis
from shampoo_optax._newton import add_to_diagonal
from shampoo_optax._placement import Placement
from shampoo_optax._powers import rescaled
from shampoo_optax._preconditioning import precondition
from shampoo_optax._refresh import Batch, Derived, Fresh, Report, refresh
from shampoo_optax._stacks import (
    AxisStacks,
    Inputs,
    Stack,
    Stacks,
    cast_like,
    per_slot,
)
from shampoo_optax._step import (
    Step,
    Turned,
    begin,
    factored_fields,
    finish,
    if_due,
    refresh_if_due,
)
from shampoo_optax._transform import Method, block_transform

Form = Literal["official", "paper"]
IgnoredAxes = Mapping[int, Sequence[int]]


class ScaleBySoapState(NamedTuple):
    """State of :func:`scale_by_soap` and :func:`scale_by_kl_soap`.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis.
      bases: their eigenvectors Q in columns, the identity before the first refresh.
      eigenvalues: theirs, which whiten gradients in KL-SOAP, 1 before the first
        refresh; empty in SOAP.
      moments: second moments D of the gradient in the bases.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient, in the bases with `form="paper"`;
        empty where `b1` is 0.
      failures: how many new bases were refused, for each block.
      residuals: the largest residual of a block's bases at its last refresh.
      iterations: the most iterations of one of these; 0 where the old ones were kept.
      skipped: how many steps gave no finite direction, for each block.
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    bases: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    eigenvalues: AxisStacks  # {stack: {axis: [n, d]}}, float32 or wider
    moments: Stacks  # {stack: [n, *block]}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, as in `storage`
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    residuals: dict[str, jax.Array]  # {stack: [n]}, float32
    iterations: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


class Rules(NamedTuple):
    """What SOAP is told besides the options of all transforms."""

    basis: Basis
    form: Form
    exponents: Mapping[int, float]  # p by the order of a block, 1/2 where there is none
    whitened: bool = False  # whether factors are those of KL-Shampoo


def soap_transform(
    options: Options, rules: Rules, placement: Placement | None
) -> optax.GradientTransformationExtraArgs:
    """The transform on blocks with these arguments."""
    limits = options.axes.limits
    if limits:  # a diagonal factor has no basis to rotate into
        axes = replace(options.axes, diagonal_above=None, skip_above=min(limits))
        options = replace(options, axes=axes)
    method = Method(
        ScaleBySoapState,
        partial(_init_fields, options, rules),
        partial(_step, options, rules),
        partial(factored_memory, options),
    )
    return block_transform(method, options, placement)


def unrotated(ignored_axes: IgnoredAxes | None) -> dict[int, dict[int, float]]:
    """The ignored axes, checked, as axes with the exponent 0: without a factor."""
    ignored_axes = {} if ignored_axes is None else ignored_axes
    if not isinstance(ignored_axes, Mapping):
        raise ValueError(
            f"`ignored_axes` must be a mapping from orders, got {ignored_axes!r}."
        )
    for order, axes in ignored_axes.items():
        check_integer("ignored_axes", order)
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise ValueError(
                f"`ignored_axes` must map orders to sequences of axes, got {axes!r}."
            )
        for axis in axes:
            if isinstance(axis, bool) or axis not in range(order):
                raise ValueError(
                    f"`ignored_axes` must name axes below the order {order}, "
                    f"got {axis!r}."
                )
    return {order: dict.fromkeys(axes, 0.0) for order, axes in ignored_axes.items()}


def _init_fields(
    options: Options, rules: Rules, stacks: dict[str, Stack]
) -> dict[str, Any]:
    return dict(
        bases=identity_bases(stacks, options),
        eigenvalues=unit_eigenvalues(stacks, options) if rules.whitened else {},
        moments=zero_blocks(stacks),
        **factored_fields(stacks, options),
    )


def _whiten(inputs: Inputs, options: Options) -> Whiten:
    """Multiplies blocks by the inverse square roots of the factors of other axes.

    Eigenvalues count in units of their mean: a Kronecker product says nothing of the
    scales of its single factors, which would drift apart from step to step.
    """

    def whiten(name: str, block: jax.Array, axis: str) -> jax.Array:
        derived = {f: {name: inputs.fields[f][name]} for f in ("bases", "eigenvalues")}
        values = derived["eigenvalues"][name]
        sides = {n: s for n, s in inputs.sides.items() if n == name}
        halves = {name: dict.fromkeys(values, 1 / 2)}
        block = precondition(
            {name: block}, derived, sides, halves, options, left_out=axis, back=False
        )[name]
        for other in sorted(values.keys() - {axis}):
            mean = _own_mean(values[other], sides.get(name, {}).get(other))
            block = block * per_slot(jnp.sqrt(mean), block)
        return block

    return whiten


def _own_mean(values: jax.Array, sides: jax.Array | None) -> jax.Array:
    """The means `[n]` of the first `sides` of the values `[n, d]`, or of all."""
    if sides is None:
        return jnp.mean(values, axis=1)
    inside = jnp.arange(values.shape[1])[None] < jnp.asarray(sides)[:, None]
    total = jnp.sum(jnp.where(inside, values, 0), axis=1)
    return total / jnp.asarray(sides, values.dtype)


def _refresh_bases(
    derived: Derived,
    report: Report,
    *,
    step: Step,
    options: Options,
    basis: Basis,
    ridge: ArrayLike,
) -> tuple[Derived, Report]:
    """New bases, each column in the place of the old one that it is."""
    inputs = step.inputs
    correction = statistics_correction(options, inputs.count)

    def compute(batch: Batch) -> Fresh:
        matrices = rescaled(batch.factors, correction, options)
        added = jnp.full(len(matrices), ridge, matrices.dtype)
        old = batch.derived["bases"]
        bases, values, *about = eigenbases(
            add_to_diagonal(matrices, added), old, basis, batch.padding
        )
        bases, values = align(old, bases, values)
        found = {"bases": bases, "eigenvalues": values}
        return Fresh({field: found[field] for field in batch.derived}, *about)

    return refresh(
        step.factors,
        derived,
        report,
        step.usable,
        inputs.sides,
        compute,
        basis.max_residual,
    )


def _update_moments(
    moments: Stacks, step: Step, turned: Stacks, options: Options
) -> Stacks:
    """Accumulates the squares of the gradient in the bases."""
    weight = statistics_weight(options)
    return {
        name: accumulate(moment, turned[name], step.usable[name], options.b2, weight)
        for name, moment in moments.items()
    }


def _divide(
    turned: Stacks,
    moments: Stacks,
    correction: jax.Array,
    exponents: Mapping[int, float],
    eps: ArrayLike,
) -> Stacks:
    """Divides by the corrected moments to the power p, plus eps."""

    def divide(name: str, block: jax.Array) -> jax.Array:
        moment = moments[name] / correction.astype(block.dtype)
        scale = moment ** exponents.get(block.ndim - 1, 0.5)
        scale += jnp.asarray(eps, block.dtype)
        return block / jnp.where(scale > 0, scale, 1)

    return {name: divide(name, block) for name, block in turned.items()}


def _moved(
    filtered: Stacks, before: AxisStacks, after: AxisStacks, usable: dict
) -> Stacks:
    """The moving average in the new bases; that of an absent gradient stays."""
    wide = {
        name: block.astype(jnp.promote_types(block.dtype, jnp.float32))
        for name, block in filtered.items()
    }
    moved = cast_like(
        apply_axes(after, apply_axes(before, wide), transpose=True), filtered
    )
    return {
        name: jnp.where(per_slot(usable[name], old), moved[name], old)
        for name, old in filtered.items()
    }


def _step(
    options: Options, rules: Rules, inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    # KL-SOAP adds `eps` to second moments alone.
    ridge = 0.0 if rules.whitened else options.eps
    whiten = _whiten(inputs, replace(options, eps=ridge)) if rules.whitened else None
    step = begin(inputs, options, whiten)
    recompute = partial(
        _refresh_bases, step=step, options=options, basis=rules.basis, ridge=ridge
    )
    renew = partial(refresh_if_due, step, recompute, ("bases", "eigenvalues"))
    if rules.form == "official":
        derived = renew()
        directions, fields = _direct(step, options, rules, derived["bases"])
        return directions, dict(fields, factors=step.factors, **derived)
    before = inputs.fields["bases"]
    directions, fields = _direct(step, options, rules, before)
    derived = renew()
    if fields["filtered"]:

        def move(filtered: Stacks) -> tuple[Stacks]:
            return (_moved(filtered, before, derived["bases"], step.usable),)

        (fields["filtered"],) = if_due(step, move, fields["filtered"])
    return directions, dict(fields, factors=step.factors, **derived)


def _direct(
    step: Step, options: Options, rules: Rules, bases: AxisStacks
) -> tuple[Stacks, dict[str, Any]]:
    """The directions with these bases, and the fields but for those of a refresh."""
    turn = partial(apply_axes, bases, transpose=True)
    back = partial(apply_axes, bases)
    turned = turn(step.blocks)
    moments = _update_moments(step.inputs.fields["moments"], step, turned, options)
    correction = statistics_correction(options, step.inputs.count)
    in_bases = rules.form == "paper"

    def direct(used: Stacks) -> Stacks:
        used = used if in_bases else turn(used)
        divided = _divide(used, moments, correction, rules.exponents, options.eps)
        return back(divided)

    kept = Turned(turned, back) if in_bases else None
    directions, fields = finish(step, options, direct, kept)
    return directions, dict(fields, moments=moments)
