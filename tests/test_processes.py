"""Several processes on one mesh train as one process does."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from helpers import assert_equal
from process_worker import OPTIMIZERS, PARTS, train

DEVICES, PROCESSES, SECONDS = 8, 2, 240
WORKER = Path(__file__).with_name("process_worker.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(process, port, folder):
    """Starts a process that has its share of the devices and writes to the folder."""
    count = f"--xla_force_host_platform_device_count={DEVICES // PROCESSES}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {count}",  # the last one counts
    }
    arguments = map(str, (WORKER, port, PROCESSES, process, folder))
    with (folder / f"{process}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def exit_codes(workers):
    """Waits until all have ended, or one has failed, or for too long."""
    end = time.monotonic() + SECONDS
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes) or time.monotonic() > end:
            return codes
        time.sleep(0.1)


def run_together(folder):
    workers, port = [], free_port()
    try:
        for process in range(PROCESSES):
            workers.append(start(process, port, folder))
        codes = exit_codes(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    said = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
    assert codes == [0] * PROCESSES, f"exit codes {codes}\n{said}"


def seen_by(folder, process, name):
    for part in PARTS:
        with np.load(folder / f"{name}-{part}-{process}.npz") as arrays:
            yield dict(arrays)


def test_two_processes_give_the_trajectory_of_one(tmp_path):
    assert jax.process_count() == 1 and jax.device_count() == DEVICES
    run_together(tmp_path)
    for name in OPTIMIZERS:
        curve, *states, portable, again = train(name)
        assert_equal(again, portable)
        (one_curve, *ones, one, one_again), (two_curve, *twos, two, two_again) = (
            seen_by(tmp_path, process, name) for process in range(PROCESSES)
        )
        assert_equal(one_curve, {key: copies[:, :4] for key, copies in curve.items()})
        assert_equal(two_curve, {key: copies[:, 4:] for key, copies in curve.items()})
        for theirs in (one, one_again, two, two_again):
            assert_equal(theirs, portable)
        for copies in curve.values():  # [steps, devices, *shape]
            np.testing.assert_array_equal(copies, copies[:, :1].repeat(DEVICES, 1))
        for whole, one, two in zip(states, ones, twos, strict=True):
            check_shares(whole, one, two)


def check_shares(whole, one, two):
    """Each process holds half of every stack, and both hold the scalars."""
    scalars = {key for key in whole if key.endswith("from all")}
    assert scalars and len(one) == len(two) == (len(whole) + len(scalars)) / 2
    assert one.keys() & two.keys() == scalars
    assert_equal(one | two, whole)
