"""Data parallelism: every batch is divided over devices, simulated ones on CPU."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def provide(devices: int) -> int:
    """Simulates devices on CPU if JAX has not started yet; returns how many it has."""
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # it has started, with as many as there are
    return jax.device_count()


def mesh_of(devices: int) -> Mesh | None:
    """Returns the mesh of the first devices, or None where one works alone."""
    if devices == 1:
        return None
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def whole(devices: int) -> NamedSharding | None:
    """Returns the sharding of what every device has, or None for one device."""
    mesh = mesh_of(devices)
    return mesh and NamedSharding(mesh, PartitionSpec())


def divided(devices: int) -> NamedSharding | None:
    """Returns the sharding of a batch, or None for one device."""
    mesh = mesh_of(devices)
    return mesh and NamedSharding(mesh, PartitionSpec(AXIS))
