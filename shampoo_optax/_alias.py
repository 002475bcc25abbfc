"""Ready optimizers: chains of the transforms and nothing else."""

from collections.abc import Mapping

import optax
from jax.typing import ArrayLike

from shampoo_optax._chain import AliasDecay, descend
from shampoo_optax._checks import Exponents, Graft, Mask, Period, ScalarOrSchedule
from shampoo_optax._config import Axes, Blocking, Root, Storage
from shampoo_optax._eigen_methods import Basis, Eigh, EighBasis
from shampoo_optax._placement import Placement
from shampoo_optax._shampoo import scale_by_shampoo
from shampoo_optax._soap import Form, IgnoredAxes, scale_by_soap


def shampoo(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 0.0,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    relative_eps: ArrayLike | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    exponents: Exponents | None = None,
    graft: Graft | None = "adam",
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    momentum: ArrayLike | None = None,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
    decay: AliasDecay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    max_rms: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    trace_scaling: ArrayLike = 0.0,
    root: Root = Eigh(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Distributed Shampoo with grafting, decay, momentum and a step size.

    The chain of :func:`scale_by_shampoo`, :func:`decay_weights` (before it for
    `"l2"`), :func:`scale_by_momentum`, the step size :math:`-\eta_t` and
    :func:`fill_absent`. A model that trains with `optax.adamw` trains with its
    learning rate, `b1` and `weight_decay` by this name: the default grafting gives
    every block Adam's step size. AdamW's `eps` is `graft_eps` here, where `eps` is a
    ridge on the factors; :func:`replace_adamw` translates all of them.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors, in [0, 1]; 1 makes them sums, as AdaGrad does.
        Default 0.99.
      eps: ridge added to the eigenvalues of a factor, >= 0, in units of the squared
        gradient. Default 0.
      weight_decay: the lambda of the decay, >= 0; `update` needs `params` unless it is
        a Python 0. Default 0.
      mask: which parameters decay: a tree of booleans like the parameters, or a prefix
        of one, or a function from parameters to one. Default `None`: all.
      relative_eps: ridge in units of a factor's largest eigenvalue, >= 0; the larger
        ridge counts. Default `None`: 1e-6, or 1e-5 with an iteration
        (`CoupledNewton`, `HigherOrderNewton`, `NewtonDB`), 1e-2 with bfloat16 factors,
        0 with `PseudoInverse`.
      b3: weight of the old average in the gradient used now, in [0, 1); `b1 * b1`
        looks ahead as NAdam does, `None` stands for `b1`. Default `None`.
      refresh_every: steps from one refresh to the next, an integer >= 1, or a schedule
        that maps the number of steps taken to one, which `optax.inject_hyperparams`
        needs in its `static_args`. Default 10.
      statistics_every: steps from one update of the factors to the next, an integer
        from 1 to `refresh_every`. Default 1.
      stagger: whether blocks take turns, so that every step refreshes some of them, in
        place of all at once. Default `False`.
      start: step of the first refresh, an integer >= `refresh_every`, which `None`
        stands for (with `stagger` plus `statistics_every` - 1, and with a schedule the
        later of its first value and `statistics_every`); until then the grafted method
        alone moves the parameters, or the plain gradient where there is none. Default
        `None`.
      bias_correction: whether factors and filtered gradient are divided by the sum of
        their weights. Adam's grafted moments always are. Default `True`.
      exponents: overrides of e by the order of a block, `{order: e}` or
        `{order: {axis: e}}` with e >= 0; an axis with 0 has no factor and is left
        alone. Default `None`: 1 / (2 * order).
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `"adam"`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      momentum: the mu of :func:`scale_by_momentum`, in [0, 1]; `None` keeps no
        buffer. Default `None`.
      dampening: the delta of :func:`scale_by_momentum`, in [0, 1]. Default 0.
      nesterov: whether momentum looks ahead. Default `False`.
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
      trace_scaling: the a >= 0 of :math:`L_k / c` times :math:`\mathrm{tr}(L_k /
        c)^{-a}`, which takes its place in the root. Default 0.
      root: how inverse roots are computed, an :class:`Eigh`, :class:`PseudoInverse`,
        :class:`CoupledNewton`, :class:`HigherOrderNewton`, :class:`NewtonDB` or
        :class:`Eigendecomposed`. Default `Eigh()`.
      axes: which axes have a factor, or a diagonal one, an :class:`Axes`. Default
        `Axes()`: all have a whole one.
      storage: in what form the state is kept, momentum included, a :class:`Storage`.
        Default `Storage()`: float32 or wider.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      metrics: whether the state has metrics of every block, for :func:`diagnose`.
        Default `False`.
      placement: the devices that statistics, roots and work are divided over, a
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
      >>> tx = so.shampoo(learning_rate=0.1, refresh_every=2)
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.48
      24.92
      23.44
      21.88

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497.
    """
    direction = scale_by_shampoo(
        b1,
        b2,
        eps,
        relative_eps=relative_eps,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        exponents=exponents,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        trace_scaling=trace_scaling,
        root=root,
        axes=axes,
        storage=storage,
        blocking=blocking,
        metrics=metrics,
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
        dampening=dampening,
        nesterov=nesterov,
        momentum_dtype=storage.momentum,
    )


def soap(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    exponents: Mapping[int, float] | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    decay: AliasDecay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    max_rms: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    ignored_axes: IgnoredAxes | None = None,
    form: Form = "official",
    basis: Basis = EighBasis(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SOAP with decay and a step size.

    The chain of :func:`scale_by_soap`, :func:`decay_weights` (before it for `"l2"`),
    the step size :math:`-\eta_t` and :func:`fill_absent`.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors and of the second moments, in [0, 1]; 1 makes
        them sums, as AdaGrad does. Default 0.99.
      eps: added to the root of the second moments, >= 0. Default 1e-8.
      weight_decay: the lambda of the decay, >= 0; `update` needs `params` unless it is
        a Python 0. Default 0.
      mask: which parameters decay: a tree of booleans like the parameters, or a prefix
        of one, or a function from parameters to one. Default `None`: all.
      exponents: overrides of p by the order of a block, `{order: p}` with p >= 0.
        Default `None`: 1/2.
      b3: weight of the old average in the gradient used now, in [0, 1); `b1 * b1`
        looks ahead as NAdam does, `None` stands for `b1`. Default `None`.
      refresh_every: steps from one refresh to the next, an integer >= 1, or a schedule
        that maps the number of steps taken to one, which `optax.inject_hyperparams`
        needs in its `static_args`. Default 10.
      statistics_every: steps from one update of the factors to the next, an integer
        from 1 to `refresh_every`. Default 1.
      stagger: whether blocks take turns, so that every step refreshes some of them, in
        place of all at once. Default `False`.
      start: step of the first refresh, an integer >= `refresh_every`, which `None`
        stands for (with `stagger` plus `statistics_every` - 1, and with a schedule the
        later of its first value and `statistics_every`); until then the method is Adam.
        Default `None`.
      bias_correction: whether second moments and filtered gradient are divided by
        the sum of their weights. Default `True`.
      decay: `"decoupled"`, `"corrected"` or `"independent"`, as in
        :func:`decay_weights`, or `"l2"`, which adds to the gradient. Default
        `"decoupled"`.
      peak_learning_rate: the largest learning rate, > 0, for corrected and independent
        decay; `None` stands for `learning_rate` where that is a Python number. Default
        `None`.
      max_rms: largest root mean square of a parameter's direction, > 0, as in
        :func:`cap_rms`. Default `None`: any.
      rms: what that of every parameter is made, > 0, as in :func:`match_rms`, before
        decay and `max_rms`. Default `None`: it is left as it is.
      ignored_axes: axes that are not rotated and have no factor, by the order of a
        block, `{order: axes}`. Default `None`: none are ignored.
      form: `"official"` or `"paper"`, as in :func:`scale_by_soap`. Default
        `"official"`.
      basis: how eigenvectors are computed, an :class:`EighBasis`,
        :class:`QRBasis` or :class:`CholeskyBasis`. Default `EighBasis()`.
      axes: which axes are rotated, an :class:`Axes`; one above `diagonal_above` is
        not, as above `skip_above`. Default `Axes()`: all.
      storage: in what form the state is kept, a :class:`Storage`; bases are never
        packed. Default `Storage()`: float32 or wider.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      metrics: whether the state has metrics of every block, for :func:`diagnose`.
        Default `False`.
      placement: the devices that statistics, roots and work are divided over, a
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
      >>> tx = so.soap(learning_rate=0.1, refresh_every=2)
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
    """
    direction = scale_by_soap(
        b1,
        b2,
        eps,
        exponents=exponents,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        ignored_axes=ignored_axes,
        form=form,
        basis=basis,
        axes=axes,
        storage=storage,
        blocking=blocking,
        metrics=metrics,
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
    )
