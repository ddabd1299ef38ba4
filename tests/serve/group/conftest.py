"""What tests of groups share with those of clusters."""

from tests.serve.cluster.conftest import certificate

__all__ = ["certificate"]
