"""The process in which the tests run: 8 simulated devices, strict promotion."""

import os

# Both are read once, when the libraries start: before the first import of jax.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Flags that are set already win. Nearly all the time goes into compiling programs that
# run for a few steps, so their code is hardly optimised.
FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
}
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{key}={value}" for key, value in FLAGS.items() if key not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()

import helpers  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Runs the test with 64-bit arrays."""
    with helpers.enable_x64():
        yield
