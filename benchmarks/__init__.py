"""Training benchmarks of `shampoo_optax`: real data, Flax models, honest tables.

`python -m benchmarks.train` is the main job, `python -m benchmarks.sweep` the search
for each optimizer's best learning rate, `python -m benchmarks.compare_devices` the main
job on one device and on several.
"""

import os

# With several BLAS threads one eigendecomposition can take a hundred times as long;
# the variable is read when SciPy loads, so it is set before anything else.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
