"""The kinds of Kubernetes objects that argusrl reads or writes, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from argusrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    name: str  # "RayJob"
    api_version: str  # "ray.io/v1"
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """Path of the collection, an object or a subresource; an empty namespace is all of them."""
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        return "/" + "/".join([*parts, self.plural, *filter(None, [name, sub])])


POD = Kind("Pod", "v1", "pods")
NODE = Kind("Node", "v1", "nodes", namespaced=False)
EVENT = Kind("Event", "v1", "events")
SERVICE = Kind("Service", "v1", "services")
SECRET = Kind("Secret", "v1", "secrets")
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
NAMESPACE = Kind("Namespace", "v1", "namespaces", namespaced=False)
SERVICE_ACCOUNT = Kind("ServiceAccount", "v1", "serviceaccounts")
VOLUME = Kind("PersistentVolume", "v1", "persistentvolumes", namespaced=False)
CLAIM = Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims")
DEPLOYMENT = Kind("Deployment", "apps/v1", "deployments")
DAEMON_SET = Kind("DaemonSet", "apps/v1", "daemonsets")
JOB = Kind("Job", "batch/v1", "jobs")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
ROLE = Kind("Role", "rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDING = Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings")
CLUSTER_ROLE = Kind("ClusterRole", "rbac.authorization.k8s.io/v1", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind(
    "ClusterRoleBinding", "rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False
)
STORAGE_CLASS = Kind("StorageClass", "storage.k8s.io/v1", "storageclasses", namespaced=False)
PRIORITY_CLASS = Kind("PriorityClass", "scheduling.k8s.io/v1", "priorityclasses", namespaced=False)
DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")
CRD = Kind("CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
ACCESS_REVIEW = Kind("SelfSubjectAccessReview", "authorization.k8s.io/v1", "selfsubjectaccessreviews", namespaced=False)
RAY_JOB = Kind("RayJob", "ray.io/v1", "rayjobs")
RAY_CLUSTER = Kind("RayCluster", "ray.io/v1", "rayclusters")
WORKLOAD = Kind("Workload", "kueue.x-k8s.io/v1beta1", "workloads")
LOCAL_QUEUE = Kind("LocalQueue", "kueue.x-k8s.io/v1beta1", "localqueues")

KINDS = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}
"""Every kind by its name."""


def kind_of(document: dict[str, object]) -> Kind:
    """The kind of a manifest document. Raises ConfigError."""
    kind = KINDS.get(str(document.get("kind")))
    if kind is None or kind.api_version != document.get("apiVersion"):
        raise ConfigError(
            f"argusrl does not create {document.get('kind')} of {document.get('apiVersion')}", "use kubectl for it"
        )
    return kind
