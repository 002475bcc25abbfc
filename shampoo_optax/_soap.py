"""SOAP: second moments in the eigenbasis of Shampoo's factors."""

from collections.abc import Mapping
from typing import get_args

import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft, check_choice, check_exponents
from shampoo_optax._config import Axes, Blocking, Options, Storage
from shampoo_optax._methods import Basis, EighBasis, check_basis
from shampoo_optax._placement import Placement
from shampoo_optax._soap_blocks import (
    Form,
    IgnoredAxes,
    Rules,
    soap_transform,
    unrotated,
)


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
    ignored_axes: IgnoredAxes | None = None,
    form: Form = "official",
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

    D stays as it is when the bases change, but a column that is an old one, up to
    its sign, takes the old one's place, so that no moment is left behind where
    eigenvalues only change their order. Precision, guards and absent gradients are
    those of :func:`scale_by_shampoo`.

    The two forms differ in the order of a step. In the official PyTorch package the
    refresh comes first, from factors that hold this step's gradient, and D and the
    direction are taken in the new bases. In the paper the direction comes first, in
    the bases of before, which are refreshed afterwards and act from the next step on.
    As in the code of the paper, the average of the gradient is then kept in the bases
    and turned with them, :math:`\tilde G \leftarrow \tilde G \times_1 Q_1'^\top Q_1
    \times_2 \cdots`: the same numbers as in the parameter's coordinates, for one
    rotation less at each step. Where bases do not change the forms agree. That code
    also spends the first step on its first bases, without an update; here the first
    updates are Adam's.

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
      ignored_axes: axes that are not rotated and have no factor, by the order of a
        block, `{order: axes}`. Default `None`: none are ignored.
      form: `"official"` or `"paper"`. Default `"official"`.
      basis: how eigenvectors are computed, an :class:`EighBasis` or
        :class:`QRBasis`. Default `EighBasis()`.
      axes: which axes are rotated, an :class:`Axes`; one above `diagonal_above` is
        not, as above `skip_above`. Default `Axes()`: all.
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
    check_choice("form", form, get_args(Form))
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
        exponents=unrotated(ignored_axes),
        axes=axes,
        storage=storage,
        blocking=blocking,
    )

    rules = Rules(basis, form, exponents or {})
    return soap_transform(options, rules, placement)
