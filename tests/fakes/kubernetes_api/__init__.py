"""A Kubernetes API server for tests.

`Store` holds objects and the rules by which a real server changes them; `MemoryKube` is a port on a store without any
network; `ApiServer` speaks HTTP, so that the real client can be used.
"""

from fakes.kubernetes_api.errors import ApiError
from fakes.kubernetes_api.memory import MemoryKube
from fakes.kubernetes_api.schemas import Schemas
from fakes.kubernetes_api.server import ApiServer, Rule
from fakes.kubernetes_api.store import Store

__all__ = ["ApiError", "ApiServer", "MemoryKube", "Rule", "Schemas", "Store"]
