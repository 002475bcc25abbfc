"""Steps of an optimizer in JAX: `python -m benchmarks.jax_worker MODEL KIND SIDE`.

It is called as `benchmarks.torch_worker`, whose last arguments are ignored here.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks.contenders import BESIDE_TORCH
from benchmarks.shapes import SMALL, SUITE, draw
from benchmarks.timing import build
from benchmarks.worker import serve


def holding_parameters(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Writes the parameters in its state, as a step of torch does; gives no updates."""

    def init(params: Any) -> tuple[Any, Any]:
        return params, inner.init(params)

    def update(
        grads: Any, state: tuple[Any, Any], params: Any = None
    ) -> tuple[tuple[()], tuple[Any, Any]]:
        del params  # those in the state are the newer ones
        held, inner_state = state
        updates, inner_state = inner.update(grads, inner_state, held)
        return (), (optax.apply_updates(held, updates), inner_state)

    return optax.GradientTransformation(init, update)


def main() -> None:
    """Takes the steps that it is told to."""
    model, kind, block_size = sys.argv[1:4]
    shapes = (SUITE | SMALL)[model]
    params = jax.device_put(draw(shapes, seed=0))
    program = build(
        holding_parameters(BESIDE_TORCH[kind].make(int(block_size))), params
    )

    def prepare(turn: int) -> Callable[[], object]:
        grads = jax.block_until_ready(jax.device_put(draw(shapes, seed=turn)))
        return functools.partial(program.step, grads)

    serve(prepare)


if __name__ == "__main__":
    main()
