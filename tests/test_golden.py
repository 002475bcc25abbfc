"""Parity with the trajectories of the official package, by the public API alone."""

import collections
import contextlib

import golden
import helpers
import numpy as np
import pytest

NAMES = sorted(
    path.stem
    for path in golden.DATA.glob("*.npz")
    if path.stem != "matrix-functions"  # in test_roots.py
)

# Kind of trajectory, and how many of it there must be.
KINDS = {
    "blocking": 10,
    "classic-momentum": 4,
    "diagonal-main": 4,
    "drop-weighting": 2,
    "edge-shapes": 2,
    "eigendecomposed-eigh": 2,
    "eigendecomposed-eigh-adaptive": 2,
    "eigendecomposed-qr": 3,
    "exponent-override": 4,
    "float32-as-shipped": 2,
    "gpa": 2,
    "graft-adagrad": 2,
    "graft-adam": 2,
    "graft-drop-weighting": 1,
    "graft-rmsprop": 1,
    "graft-sgd": 1,
    "kl-eigendecomposed": 2,
    "kl-rootinv": 2,
    "masked-grads": 4,
    "root-method-coupled-newton": 2,
    "root-method-eigen-perturb-after": 1,
    "root-method-higher-order-2": 1,
    "root-method-higher-order-3": 1,
    "root-method-higher-order-4": 1,
    "root-method-higher-order-rational": 1,
    "root-method-pseudo-inverse": 2,
    "rootinv-adagrad-beta1": 2,
    "rootinv-adagrad-beta1-zero": 2,
    "rootinv-beta3": 2,
    "rootinv-default-epsilon": 1,
    "rootinv-ema": 2,
    "rootinv-freq-start": 2,
    "schedule-free": 2,
    "sign-descent": 2,
    "soap-eigh": 3,
    "soap-eigh-adaptive": 1,
    "soap-exponent-override": 1,
    "soap-ignored-dims": 1,
    "soap-qr": 2,
    "spectral-newton-schulz": 4,
    "spectral-svd": 2,
    "trace-scaling": 3,
    "two-groups": 2,
    "weight-decay-averaging": 3,
    "weight-decay-corrected": 1,
    "weight-decay-decoupled": 1,
    "weight-decay-independent": 1,
    "weight-decay-l2": 1,
}

# Some of the cases that the alias can say in one call.
BY_ALIAS = [
    "classic-momentum-dampening",
    "classic-momentum-nesterov",
    "edge-shapes-target1",
    "masked-grads-rootinv-grafted",
    "rootinv-freq-start-freq4-default-start",
    "weight-decay-averaging-decoupled-nesterov",
    "weight-decay-corrected-plain",
    "weight-decay-decoupled-plain",
    "weight-decay-independent-plain",
    "weight-decay-l2-plain",
]


def _precision(case):
    is_double = case.meta["dtype"] == "float64"
    return helpers.enable_x64() if is_double else contextlib.nullcontext()


def _assert_agrees(case, build):
    with _precision(case):
        errors = golden.replay(case, build(case))
    assert len(errors) == case.meta["num_steps"]
    first = np.argmax(np.array(errors) > case.tolerance)
    assert max(errors) <= case.tolerance, f"from step {first + 1} on: {errors}"


def test_every_kind_is_covered():
    kinds = collections.Counter(golden.load(name).meta["kind"] for name in NAMES)
    assert kinds == KINDS


@pytest.mark.parametrize("name", NAMES)
def test_chain_follows_the_reference(name):
    _assert_agrees(golden.load(name), golden.chain_of)


@pytest.mark.parametrize("name", BY_ALIAS)
def test_alias_follows_the_reference(name):
    _assert_agrees(golden.load(name), golden.alias_of)


@pytest.mark.parametrize(
    "name, change",
    [
        ("rootinv-ema-bias-correction", {"epsilon": 2e-6}),
        ("graft-adam-freq3-start5", {"start_preconditioning_step": 6}),
        ("classic-momentum-nesterov", {"betas": [0.9, 0.9899]}),
    ],
)
def test_tolerance_tells_a_small_change_of_one_argument(name, change):
    case = golden.load(name)
    case.meta["groups"][0] |= change
    with _precision(case):
        errors = golden.replay(case, golden.chain_of(case))
    assert max(errors) > 10 * case.tolerance
