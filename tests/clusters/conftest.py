"""What the cluster tests share: hosts, a job token, and the environment that ranks are started with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import ROOT, Cluster, rank_environment

sys.path.insert(0, str(ROOT / "examples" / "demo"))
sys.path.append(str(ROOT / "tests" / "interop"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts and the hub. Nothing that a test starts on them outlives the module."""
    with Cluster(2, tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of ranks on several hosts."""
    return rank_environment(tmp_path_factory.mktemp("token"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is one of the group."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clusters)
