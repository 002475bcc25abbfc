"""Benchmarks of `shampoo_optax`: what steps cost, and what training gains.

`python -m benchmarks` is the suite: time, memory and compilation of optimizers beside
each other, `benchmarks.floor` how far a step is from the least it can take,
`benchmarks.memory` the bytes of every configuration, `benchmarks.compare_torch` the
steps of the official PyTorch package. With real data and Flax models,
`python -m benchmarks.train` is the main job, `python -m benchmarks.sweep` the search
for each optimizer's best learning rate, `python -m benchmarks.compare_devices` the main
job on one device and on several.
"""

import os

# With several BLAS threads one eigendecomposition can take a hundred times as long;
# the variable is read when SciPy loads, so it is set before anything else.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
