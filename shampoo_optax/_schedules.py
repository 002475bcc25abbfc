"""Learning rates that print."""

from dataclasses import dataclass

import jax
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_integer, check_number


@dataclass(frozen=True)
class WarmupCosine:
    r"""A learning rate that rises linearly, falls as a cosine, and prints.

    That of `optax.warmup_cosine_decay_schedule` from 0,

    .. math::
      \eta_t = \eta \,(e + (1 - e) \tfrac12 (1 + \cos(\pi (t - w) / (n - w))))

    after :math:`w` steps of warm-up.

    Args:
      peak: the largest rate :math:`\eta \ge 0`.
      warmup_steps: w >= 0.
      steps: n > w, after which the rate stays.
      end: the last rate e, in units of the largest, in [0, 1]. Default 0.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> schedule = so.WarmupCosine(0.1, warmup_steps=2, steps=10)
      >>> [round(float(schedule(t)), 3) for t in (0, 1, 2, 6, 10)]
      [0.0, 0.05, 0.1, 0.05, 0.0]
    """

    peak: float
    warmup_steps: int
    steps: int
    end: float = 0.0

    def __post_init__(self):
        check_number("peak", self.peak)
        check_integer("warmup_steps", self.warmup_steps, low=0)
        check_integer("steps", self.steps)
        check_number("end", self.end, high=1.0)
        if self.steps <= self.warmup_steps:
            raise ValueError(
                f"`steps` must be above the {self.warmup_steps} steps of warm-up, "
                f"got {self.steps}."
            )

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The rate after so many steps."""
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup_steps, self.steps, self.end * self.peak
        )
        return rate(count)
