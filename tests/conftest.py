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

# Files whose comparisons have tolerances: what is compiled less is compiled sooner. The
# others run what users run.
QUICK = """
accumulation algoperf axes batch_axes benchmarks_suite diagnose eigen errors golden
graft groups guards kl methods metrics newton numerics oracle periods plots polar
portable presets recipes rms robustness root_free roots row_wise soap soap_runs stagger
storage
"""


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request):
    """Leaves most of the compiler's work out for the files of `QUICK`."""
    quick = request.module.__name__.removeprefix("test_") in QUICK.split()
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture
def x64():
    """Runs the test with 64-bit arrays."""
    with helpers.enable_x64():
        yield
