"""SOAP: second moments in the eigenbasis of Shampoo's factors."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft, check_exponents
from shampoo_optax._config import Axes, Blocking, Options, Storage
from shampoo_optax._eigen import eigenbases
from shampoo_optax._factors import (
    apply_axes,
    factored_memory,
    identity_bases,
    statistics_correction,
    statistics_weight,
)
from shampoo_optax._grafting import accumulate, zero_blocks
from shampoo_optax._methods import Basis, EighBasis, check_basis
from shampoo_optax._newton import add_to_diagonal
from shampoo_optax._placement import Placement
from shampoo_optax._powers import rescaled
from shampoo_optax._refresh import Batch, Derived, Fresh, Report, refresh
from shampoo_optax._stacks import AxisStacks, Inputs, Stack, Stacks
from shampoo_optax._step import Step, begin, factored_fields, finish, refresh_if_due
from shampoo_optax._transform import Method, block_transform


class ScaleBySoapState(NamedTuple):
    """State of :func:`scale_by_soap`.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis.
      bases: their eigenvectors Q in columns, the identity before the first refresh.
      moments: second moments D of the gradient in the bases.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      failures: how many new bases were refused, for each block.
      residuals: the largest residual of a block's bases at its last refresh.
      iterations: the most iterations of one of these; 0 where the old ones were kept.
      skipped: how many steps gave no finite direction, for each block.
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    bases: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    moments: Stacks  # {stack: [n, *block]}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    residuals: dict[str, jax.Array]  # {stack: [n]}, float32
    iterations: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _refresh_bases(
    factors: AxisStacks,
    derived: Derived,
    report: Report,
    *,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    correction: jax.Array,
    basis: Basis,
    options: Options,
) -> tuple[Derived, Report]:
    def compute(batch: Batch) -> Fresh:
        matrices = rescaled(batch.factors, correction, options)
        ridge = jnp.full(len(matrices), options.eps, matrices.dtype)
        old = batch.derived["bases"]
        bases, _, *about = eigenbases(
            add_to_diagonal(matrices, ridge), old, basis, batch.padding
        )
        return Fresh({"bases": bases}, *about)

    return refresh(factors, derived, report, usable, sides, compute, basis.max_residual)


def _update_moments(
    moments: Stacks, step: Step, bases: AxisStacks, options: Options
) -> Stacks:
    """Accumulates the squares of the gradient in the bases."""
    rotated = apply_axes(bases, step.blocks, transpose=True)
    weight = statistics_weight(options)
    return {
        name: accumulate(moment, rotated[name], step.usable[name], options.b2, weight)
        for name, moment in moments.items()
    }


def _divide_in_bases(
    used: Stacks,
    bases: AxisStacks,
    moments: Stacks,
    correction: jax.Array,
    exponents: Mapping[int, float],
    eps: ArrayLike,
) -> Stacks:
    """Rotates, divides by the corrected moments to the power p plus eps, and back."""

    def divide(name: str, block: jax.Array) -> jax.Array:
        moment = moments[name] / correction.astype(block.dtype)
        scale = moment ** exponents.get(block.ndim - 1, 0.5)
        scale += jnp.asarray(eps, block.dtype)
        return block / jnp.where(scale > 0, scale, 1)

    rotated = apply_axes(bases, used, transpose=True)
    divided = {name: divide(name, block) for name, block in rotated.items()}
    return apply_axes(bases, divided)


def _step(
    options: Options, basis: Basis, exponents: Mapping[int, float], inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    step = begin(inputs, options)
    correction = statistics_correction(options, inputs.count)
    recompute = partial(
        _refresh_bases,
        step.factors,
        usable=step.usable,
        sides=inputs.sides,
        correction=correction,
        basis=basis,
        options=options,
    )
    derived = refresh_if_due(step, recompute, ("bases",))
    bases = derived["bases"]
    moments = _update_moments(inputs.fields["moments"], step, bases, options)
    direct = partial(
        _divide_in_bases,
        bases=bases,
        moments=moments,
        correction=correction,
        exponents=exponents,
        eps=options.eps,
    )
    directions, fields = finish(step, options, direct)
    return directions, dict(fields, factors=step.factors, moments=moments, **derived)


def scale_by_soap(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    *,
    exponents: Mapping[int, float] | None = None,
    b3: ArrayLike | None = None,
    refresh_every: ArrayLike = 10,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    graft: Graft | None = None,
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    basis: Basis = EighBasis(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs Adam's second moment in the eigenbasis of Shampoo's factors (SOAP).

    With the factors :math:`L_k`, the filtered gradient :math:`\hat G`, the weight w
    and the correction c of :func:`scale_by_shampoo`, and the eigenvectors
    :math:`Q_k` of the factors, taken at a refresh,

    .. math::
      D &\leftarrow b_2 D + w\, (G_t \times_1 Q_1^\top \times_2 \cdots)^2 \\
      P &= \frac{\hat G \times_1 Q_1^\top \times_2 \cdots}
        {(D / c)^p + \varepsilon} \times_1 Q_1 \times_2 \cdots

    in the form of the official PyTorch package: the filtered gradient is kept in
    the parameter's own coordinates, and D stays as it is when the bases change.
    Precision, guards and absent gradients are those of :func:`scale_by_shampoo`.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors and of the second moments, in [0, 1]; 1 makes
        them sums, as AdaGrad does. Default 0.99.
      eps: added to the root of the second moments, >= 0. Default 1e-8.
      exponents: overrides of p by the order of a block, `{order: p}` with p >= 0.
        Default `None`: 1/2.
      b3: weight of the old average in the gradient used now, in [0, 1); `b1 * b1`
        looks ahead as NAdam does, `None` stands for `b1`. Default `None`.
      refresh_every: steps from one refresh to the next, an integer >= 1. Default 10.
      start: step of the first refresh, an integer >= `refresh_every`, which `None`
        stands for; until then the grafted method alone moves the parameters, or
        Adam in the unrotated basis where there is none. Default `None`.
      bias_correction: whether second moments and filtered gradient are divided by
        the sum of their weights. Adam's grafted moments always are. Default `True`.
      drop_weighting: whether new statistics enter with weight 1 in place of 1 - b2,
        without bias correction. Default `False`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: `drop_weighting` for the grafted second moments. Default
        `False`.
      basis: how eigenvectors are computed, an :class:`EighBasis` or
        :class:`QRBasis`. Default `EighBasis()`.
      axes: which axes are rotated, an :class:`Axes`; a diagonal one is not. Default
        `Axes()`: all.
      storage: in what form the state is kept, a :class:`Storage`; bases are never
        packed. Default `Storage()`: float32 or wider.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      placement: the devices that statistics, bases and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleBySoapState`. Updates have the shapes and dtypes of the gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_soap(refresh_every=2), optax.scale_by_learning_rate(0.1)
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.81
      25.66
      24.57
      23.52

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024,
      https://arxiv.org/abs/2409.11321.

      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497.
    """
    check_exponents(exponents, per_axis=False)
    check_basis(basis)
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        b3=b3,
        refresh_every=refresh_every,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        axes=axes,
        storage=storage,
        blocking=blocking,
    )

    def init_fields(stacks: dict[str, Stack]) -> dict[str, Any]:
        return dict(
            bases=identity_bases(stacks, options),
            moments=zero_blocks(stacks),
            **factored_fields(stacks, options),
        )

    method = Method(
        ScaleBySoapState,
        init_fields,
        partial(_step, options, basis, exponents or {}),
        partial(factored_memory, options),
    )
    return block_transform(method, options, placement)
