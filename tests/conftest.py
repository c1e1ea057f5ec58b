"""Settings of the whole suite, made before anything imports JAX: CPU, with eight devices for the sharding tests.

And the engine and the servers that tests of the front doors share, one of each a module.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


@pytest.fixture(scope="module")
def engine():
    """The tiny engine of `http_harness`."""
    from http_harness import tiny_engine

    engine = tiny_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def running(engine):
    """Where servers over `engine` run."""
    from http_harness import servers

    with servers() as running:
        yield running
