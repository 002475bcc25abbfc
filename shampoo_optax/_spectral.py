"""Spectral descent: the gradient without its singular values, as in Muon."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft, check_integer, check_number
from shampoo_optax._config import Blocking, Options
from shampoo_optax._placement import Placement
from shampoo_optax._polar import NewtonSchulz, Polar, orthogonalize
from shampoo_optax._stacks import Inputs, Stack, Stacks
from shampoo_optax._step import begin, finish, plain_fields
from shampoo_optax._transform import Method, block_transform


class ScaleBySpectralDescentState(NamedTuple):
    """State of :func:`scale_by_spectral_descent`.

    Attributes:
      count: the number of steps taken, t.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      skipped: how many steps gave no finite direction, for each block.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_spectral_descent()
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.filtered["4x3"].shape
      (1, 4, 3)
    """

    count: jax.Array  # [], int32
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _check_matrices(stacks: dict[str, Stack]) -> None:
    for stack in stacks.values():
        if len(stack.block) != 2:
            raise ValueError(
                "`params` must have blocks that are matrices, got one of shape "
                f"{stack.block}; merge long kernels by `Blocking(block_size=None)`, "
                "keep sides of 1 by `merge_to=None`, and give other parameters to "
                "another transform by `optax.partition`."
            )


def _sides(inputs: Inputs, name: str) -> tuple[jax.Array, jax.Array]:
    """The rows and columns of a stack's blocks before padding, `[n]` each."""
    size, *block = inputs.blocks[name].shape
    known = inputs.sides.get(name, {})
    rows, columns = (
        known.get(str(axis), jnp.full(size, side)) for axis, side in enumerate(block)
    )
    return rows, columns


def _step(
    options: Options, method: Polar, inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    def direct(used: Stacks) -> Stacks:
        return {
            name: orthogonalize(
                block, *_sides(inputs, name), method, options.graft is not None
            )
            for name, block in used.items()
        }

    options = replace(options, **inputs.numbers)
    return finish(begin(inputs, options), options, direct)


def scale_by_spectral_descent(
    b1: ArrayLike = 0.95,
    *,
    b3: ArrayLike | None = None,
    method: Polar = NewtonSchulz(),
    start: ArrayLike = 1,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    blocking: Blocking = Blocking(block_size=None),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the singular values of gradients by 1, as Muon does.

    For each block, a matrix with the filtered gradient :math:`\hat G = U \Sigma
    V^\top` of :func:`scale_by_shampoo`,

    .. math::
      P = s(m, n)\, \nu\, U V^\top, \qquad
      P \leftarrow P\, \|P_{graft}\| / (\|P\| + 10^{-16})

    up to the precision of `method`, which also has the scale s and the factor
    :math:`\nu`, 1 or the nuclear norm :math:`\sum_i \sigma_i` of the filtered
    gradient, and with the second step only where `graft` says so; there the sign of s
    counts alone. Blocks are orthogonalized each on its own; by default they are whole
    matrices. No factors are kept.

    Blocks are divided by their norm first, so that directions do not depend on the
    size of gradients; where that is 0, the direction is 0.

    Every block must be a matrix, once sides of 1 are dropped (`Blocking.merge_to`).
    Leave vectors and scalars to another transform, with `optax.partition`; `init`
    refuses them, as the official package does.

    The whole of it runs in float32, or float64 for float64 parameters, with products
    at the highest precision, but those that `method` lowers. Guards and absent
    gradients are those of :func:`scale_by_shampoo`.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.95.
      b3: weight of the old average in the gradient used now, in [0, 1); `b1 * b1`
        is Muon's Nesterov momentum, `None` stands for `b1`. Default `None`.
      method: how matrices are orthogonalized and scaled, a :class:`NewtonSchulz` or
        :class:`Svd`. Default `NewtonSchulz()`.
      start: the first step that is not left to the grafted method alone, an integer
        >= 1; without effect where there is none. Default 1.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights, which is felt through grafting, nuclear scaling and `eps` of the
        method alone. Adam's grafted moments always are. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking(block_size=None)`: matrices stay whole.
      placement: the devices that averages and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleBySpectralDescentState`. Updates have the shapes and dtypes of the
      gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a block is not a matrix, a leaf is not a real floating-point
        array, or the gradients' paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_spectral_descent(method=so.Svd()),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.85
      27.75
      26.68
      25.66
      24.67

    References:
      Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
      https://kellerjordan.github.io/posts/muon/.

      Carlson et al., Preconditioned Spectral Descent for Deep Learning, 2015,
      https://papers.nips.cc/paper/2015/hash/f50a6c02a3fc5a3a5d4d9391f05f3efc-Abstract.html.

      Bernstein and Newhouse, Old Optimizer, New Norm: An Anthology, 2024,
      https://arxiv.org/abs/2409.20325.
    """
    if not isinstance(method, Polar):
        raise ValueError(
            f"`method` must be a NewtonSchulz or an Svd record, got {method!r}."
        )
    check_integer("start", start)
    check_number("graft_b2", graft_b2, high=1.0)
    # Where rows are told from columns, blocks must keep their axes.
    axes = {0: 0.0, 1: 0.0}
    options = Options(
        b1=b1,
        b3=b3,
        start=start,
        bias_correction=bias_correction,
        exponents={2: 0.0 if method.scale is None else axes},
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        blocking=blocking,
    )

    def init_fields(stacks: dict[str, Stack]) -> dict[str, Any]:
        _check_matrices(stacks)
        return plain_fields(stacks, options)

    step = partial(_step, options, method)
    return block_transform(
        Method(ScaleBySpectralDescentState, init_fields, step), options, placement
    )
