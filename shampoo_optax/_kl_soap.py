"""KL-SOAP: SOAP in the bases of factors that the other factors have whitened."""

from collections.abc import Mapping
from typing import get_args

import optax
from jax.typing import ArrayLike

from shampoo_optax._chain import AliasDecay, descend
from shampoo_optax._checks import (
    Graft,
    Mask,
    Period,
    ScalarOrSchedule,
    check_choice,
    check_exponents,
)
from shampoo_optax._config import Axes, Blocking, Options, Storage
from shampoo_optax._eigen_methods import (
    Basis,
    Eigendecomposed,
    Eigh,
    EighBasis,
    check_basis,
)
from shampoo_optax._placement import Placement
from shampoo_optax._soap import (
    Form,
    IgnoredAxes,
    Rules,
    soap_transform,
    unrotated,
)


def scale_by_kl_soap(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    *,
    relative_eps: ArrayLike | None = None,
    exponents: Mapping[int, float] | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    graft: Graft | None = None,
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    ignored_axes: IgnoredAxes | None = None,
    form: Form = "paper",
    basis: Basis = EighBasis(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs Adam's second moment in the eigenbasis of KL-Shampoo's factors (KL-SOAP).

    As :func:`scale_by_soap`, but the gradient enters the factor of an axis whitened
    along every other axis, by the eigenvectors :math:`Q_j` and eigenvalues
    :math:`\Lambda_j` of that axis's factor at the last refresh (the identity and 1
    before the first one):

    .. math::
      L_k \leftarrow b_2 L_k + w\, H_{(k)} H_{(k)}^\top, \qquad
      H = G_t \times_{j \ne k}
        \left(\frac{\Lambda_j + \rho_j}{\bar\lambda_j}\right)^{-1/2} Q_j^\top

    with the ridge :math:`\rho_j = \varepsilon_{rel} \lambda_{max}` and the mean
    eigenvalue :math:`\bar\lambda_j`. For a matrix :math:`L \propto G R^{-1} G^\top`
    and :math:`R \propto G^\top L^{-1} G` in the mean: the factors whose product is
    nearest, in the Kullback-Leibler divergence, to the second moment of the gradient.
    Of vectors they are those of SOAP.

    The paper divides by the number of the other axes' entries where the mean
    eigenvalue stands here, and averages the eigenvalues at every step. The divergence
    leaves open how a scale is shared among factors, and bases do not depend on it;
    in units of the mean it stays where it is, for ever and for gradients of any size,
    while with that number it drifts from one factor to the other.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors and of the second moments, in [0, 1]; 1 makes
        them sums, as AdaGrad does. Default 0.99.
      eps: added to the root of the second moments, >= 0. Default 1e-8.
      relative_eps: ridge of the eigenvalues that whiten, in units of a factor's
        largest one, >= 0. Default `None`: 1e-6, or 1e-2 with bfloat16 factors.
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
        later of its first value and `statistics_every`); until then the grafted method
        alone moves the parameters, or Adam in the unrotated basis where there is none.
        Default `None`.
      bias_correction: whether second moments and filtered gradient are divided by
        the sum of their weights. Adam's grafted moments always are. Default `True`.
      drop_weighting: whether new statistics enter with weight 1 in place of 1 - b2,
        without bias correction. Default `False`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
      ignored_axes: axes that are not rotated and have no factor, by the order of a
        block, `{order: axes}`. Default `None`: none are ignored.
      form: `"official"` or `"paper"`, as in :func:`scale_by_soap`. Default `"paper"`.
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
      ...     so.scale_by_kl_soap(refresh_every=2), optax.scale_by_learning_rate(0.1)
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.16
      24.91
      23.75
      22.61

    References:
      Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler
      Minimization, 2025, https://arxiv.org/abs/2509.03378.
    """
    check_exponents(exponents, per_axis=False)
    check_choice("form", form, get_args(Form))
    check_basis(basis)
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        relative_eps=relative_eps,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        exponents=unrotated(ignored_axes),
        root=Eigendecomposed(basis, Eigh("after")),
        axes=axes,
        storage=storage,
        blocking=blocking,
        metrics=metrics,
    )

    rules = Rules(basis, form, exponents or {}, whitened=True)
    return soap_transform(options, rules, placement)


def kl_soap(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    relative_eps: ArrayLike | None = None,
    exponents: Mapping[int, float] | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    graft: Graft | None = None,
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    momentum: ArrayLike | None = None,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
    decay: AliasDecay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    max_rms: ArrayLike | None = None,
    rms: ArrayLike | None = None,
    ignored_axes: IgnoredAxes | None = None,
    form: Form = "paper",
    basis: Basis = EighBasis(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""KL-SOAP with decay, momentum and a step size.

    The chain of :func:`scale_by_kl_soap`, :func:`decay_weights` (before it for
    `"l2"`), :func:`scale_by_momentum`, the step size :math:`-\eta_t` and
    :func:`fill_absent`.

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
      relative_eps: ridge of the eigenvalues that whiten, in units of a factor's
        largest one, >= 0. Default `None`: 1e-6, or 1e-2 with bfloat16 factors.
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
        later of its first value and `statistics_every`); until then the grafted method
        alone moves the parameters, or Adam in the unrotated basis where there is none.
        Default `None`.
      bias_correction: whether second moments and filtered gradient are divided by
        the sum of their weights. Adam's grafted moments always are. Default `True`.
      drop_weighting: whether new statistics enter with weight 1 in place of 1 - b2,
        without bias correction. Default `False`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
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
      ignored_axes: axes that are not rotated and have no factor, by the order of a
        block, `{order: axes}`. Default `None`: none are ignored.
      form: `"official"` or `"paper"`, as in :func:`scale_by_soap`. Default `"paper"`.
      basis: how eigenvectors are computed, an :class:`EighBasis`,
        :class:`QRBasis` or :class:`CholeskyBasis`. Default `EighBasis()`.
      axes: which axes are rotated, an :class:`Axes`; one above `diagonal_above` is
        not, as above `skip_above`. Default `Axes()`: all.
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
      >>> tx = so.kl_soap(learning_rate=0.1, refresh_every=2)
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.16
      24.91
      23.75
      22.61

    References:
      Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler
      Minimization, 2025, https://arxiv.org/abs/2509.03378.
    """
    direction = scale_by_kl_soap(
        b1,
        b2,
        eps,
        relative_eps=relative_eps,
        exponents=exponents,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
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
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        momentum_dtype=storage.momentum,
    )
