"""Ready root-free optimizers: chains of the transforms and nothing else."""

import optax
from jax.typing import ArrayLike

from shampoo_optax._chain import AliasDecay, descend
from shampoo_optax._checks import Graft, Mask, Period, ScalarOrSchedule
from shampoo_optax._config import Blocking
from shampoo_optax._inverse_free import (
    Computed,
    Structure,
    scale_by_inverse_free_shampoo,
)
from shampoo_optax._placement import Placement
from shampoo_optax._root_free import scale_by_root_free_rms


def inverse_free_shampoo(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.0,
    b2: ArrayLike = 0.8,
    eps: ArrayLike = 1e-4,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    root_momentum: ArrayLike = 0.5,
    batch_size: ArrayLike = 128,
    b3: ArrayLike | None = None,
    refresh_every: Period = 1,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    momentum: ArrayLike | None = 0.9,
    decay: AliasDecay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    max_rms: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    structure: Structure = "dense",
    dtype: Computed | None = None,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Inverse-free Shampoo with decay, momentum and a step size.

    The chain of :func:`scale_by_inverse_free_shampoo`, :func:`decay_weights` (before
    it for `"l2"`), :func:`scale_by_momentum`, the step size :math:`-\eta_t` and
    :func:`fill_absent`. Start from a learning rate of 1e-3 to 4e-3 and tell it the
    `batch_size`. The buffer of `momentum` is kept in float32; for a smaller one take
    `b1=0.9, momentum=None`, `dtype="bfloat16"` and ten times the learning rate.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.
      b2: decay rate of the factors that the roots follow, in (0, 1]. Default 0.8.
      eps: damping, > 0, in units of the squared gradient times `batch_size`. Default
        1e-4.
      weight_decay: the lambda of the decay, >= 0; `update` needs `params` unless it is
        a Python 0. Default 0.
      mask: which parameters decay: a tree of booleans like the parameters, or a prefix
        of one, or a function from parameters to one. Default `None`: all.
      root_momentum: decay rate of the velocities of the roots, in [0, 1); 0 stores
        none. Default 0.5.
      batch_size: the number of examples of which the gradient is the mean, > 0.
        Default 128.
      b3: weight of the old average in the gradient used now, in [0, 1); `None` stands
        for `b1`. Default `None`.
      refresh_every: steps from one move of the roots to the next, an integer >= 1, or a
        schedule that maps the number of steps taken to one, which
        `optax.inject_hyperparams` needs in its `static_args`. Default 1.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      momentum: the mu of :func:`scale_by_momentum`, in [0, 1]; `None` keeps no
        buffer. Default 0.9.
      decay: `"decoupled"`, `"corrected"` or `"independent"`, as in
        :func:`decay_weights`, or `"l2"`, which adds to the gradient. Default
        `"decoupled"`.
      peak_learning_rate: the largest learning rate, > 0, for corrected and independent
        decay; `None` stands for `learning_rate` where that is a Python number. Default
        `None`.
      max_rms: largest root mean square of a parameter's direction, > 0, as in
        :func:`cap_rms`, before decay and momentum, which makes it at most 1 / (1 -
        `momentum`) times larger. Default `None`: any.
      rms: what that of every parameter is made, > 0, as in :func:`match_rms`, before
        decay, momentum and `max_rms`. Default `None`: it is left as it is.
      structure: of the roots, `"dense"` or `"diagonal"`. Default `"dense"`.
      dtype: `"float32"` or `"bfloat16"`, in which roots, their momenta and the
        filtered gradient are kept and matrix products are computed. Default `None`:
        float32, or float64 for float64 parameters.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      placement: the devices that roots and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates have the shapes and dtypes of
      the gradients, or of the parameters where those are absent.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters,
        or weight decay is asked for without `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = so.inverse_free_shampoo(learning_rate=0.1, batch_size=1)
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      25.26
      19.79
      14.98
      11.11
      8.09

    References:
      Lin et al., Can We Remove the Square-Root in Adaptive Gradient Methods? A
      Second-Order Perspective, 2024, https://arxiv.org/abs/2402.03496.
    """
    direction = scale_by_inverse_free_shampoo(
        b1,
        b2,
        eps,
        root_momentum=root_momentum,
        batch_size=batch_size,
        b3=b3,
        refresh_every=refresh_every,
        bias_correction=bias_correction,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        structure=structure,
        dtype=dtype,
        blocking=blocking,
        placement=placement,
    )
    return descend(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        mask=mask,
        decay=decay,
        peak_learning_rate=peak_learning_rate,
        max_rms=max_rms,
        rms=rms,
        placement=placement,
        momentum=momentum,
    )


def root_free_rmsprop(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.0,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-4,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    batch_size: ArrayLike = 128,
    b3: ArrayLike | None = None,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    momentum: ArrayLike | None = 0.9,
    decay: AliasDecay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    max_rms: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Root-free RMSProp with decay, momentum and a step size.

    The chain of :func:`scale_by_root_free_rms`, :func:`decay_weights` (before it for
    `"l2"`), :func:`scale_by_momentum`, the step size :math:`-\eta_t` and
    :func:`fill_absent`. Start from a learning rate between 1e-3 and 1e-2 and tell it
    the `batch_size`.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.
      b2: decay rate of the second moments, in [0, 1]; 1 makes them sums, as AdaGrad
        does. Default 0.95.
      eps: damping, >= 0, in units of the squared gradient times `batch_size`. Default
        1e-4.
      weight_decay: the lambda of the decay, >= 0; `update` needs `params` unless it is
        a Python 0. Default 0.
      mask: which parameters decay: a tree of booleans like the parameters, or a prefix
        of one, or a function from parameters to one. Default `None`: all.
      batch_size: the number of examples of which the gradient is the mean, > 0.
        Default 128.
      b3: weight of the old average in the gradient used now, in [0, 1); `None` stands
        for `b1`. Default `None`.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      momentum: the mu of :func:`scale_by_momentum`, in [0, 1]; `None` keeps no
        buffer. Default 0.9.
      decay: `"decoupled"`, `"corrected"` or `"independent"`, as in
        :func:`decay_weights`, or `"l2"`, which adds to the gradient. Default
        `"decoupled"`.
      peak_learning_rate: the largest learning rate, > 0, for corrected and independent
        decay; `None` stands for `learning_rate` where that is a Python number. Default
        `None`.
      max_rms: largest root mean square of a parameter's direction, > 0, as in
        :func:`cap_rms`, before decay and momentum, which makes it at most 1 / (1 -
        `momentum`) times larger. Default `None`: any.
      rms: what that of every parameter is made, > 0, as in :func:`match_rms`, before
        decay, momentum and `max_rms`. Default `None`: it is left as it is.
      blocking: how parameters are merged and cut, a :class:`Blocking`; felt through
        guards and grafting alone. Default `Blocking()`.
      placement: the devices that moments and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates have the shapes and dtypes of
      the gradients, or of the parameters where those are absent.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters,
        or weight decay is asked for without `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = so.root_free_rmsprop(learning_rate=0.1, batch_size=1)
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      26.05
      20.70
      15.39
      10.95
      7.65

    References:
      Lin et al., Can We Remove the Square-Root in Adaptive Gradient Methods? A
      Second-Order Perspective, 2024, https://arxiv.org/abs/2402.03496.
    """
    direction = scale_by_root_free_rms(
        b1,
        b2,
        eps,
        batch_size=batch_size,
        b3=b3,
        bias_correction=bias_correction,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        blocking=blocking,
        placement=placement,
    )
    return descend(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        mask=mask,
        decay=decay,
        peak_learning_rate=peak_learning_rate,
        max_rms=max_rms,
        rms=rms,
        placement=placement,
        momentum=momentum,
    )
