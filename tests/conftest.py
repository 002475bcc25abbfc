"""The process in which the tests run: 8 simulated devices, no rank promotion."""

import os

# Both are read once, when the libraries start: before the first import of jax.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
devices = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()

import helpers  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Runs the test with 64-bit arrays."""
    with helpers.enable_x64():
        yield
