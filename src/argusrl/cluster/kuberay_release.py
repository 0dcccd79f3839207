"""The release of KubeRay that argusrl tells people to install. Manifests are checked against the schemas of its 1.7."""

from __future__ import annotations

KUBERAY_VERSION = "1.7.1"
KUBERAY_CHARTS = "https://ray-project.github.io/kuberay-helm/"
KUBERAY_IMAGE = f"quay.io/kuberay/operator:v{KUBERAY_VERSION}"
KUBERAY_INSTALL = f"helm install kuberay-operator kuberay-operator --repo {KUBERAY_CHARTS} --version {KUBERAY_VERSION}"
