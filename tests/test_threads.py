"""Many sides at once on CPU: their decompositions must not wait for each other."""

import os
import subprocess
import sys

PROGRAM = """
import jax
import shampoo_optax as so

shapes = [(32, 48), (64, 96), (40, 56), (72, 80)]
params = {
    f"{shape}{i}": jax.random.normal(jax.random.key(i), shape)
    for shape in shapes
    for i in range(6)
}
tx = so.scale_by_shampoo(refresh_every=1)
step = lambda _, state: tx.update(params, state)[1]
state = jax.jit(lambda s: jax.lax.fori_loop(0, 50, step, s))(tx.init(params))
print(state.count)
"""


def test_decompositions_of_many_sides_do_not_block_each_other():
    # One device, whose pool has a thread for each core.
    environment = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "50", done.stderr
