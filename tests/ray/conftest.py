"""One Ray cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.ray.cluster import SHIM, Cluster


@pytest.fixture(scope="package")
def ray_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """As many CPUs as the largest engine has ranks: one that kept them would block the next."""
    pytest.importorskip("ray")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), [2], SHIM)
    yield cluster
    cluster.kill()
