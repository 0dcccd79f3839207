"""From a recipe to every Kubernetes object of one submission of its run."""

from __future__ import annotations

from argusrl.cluster.manifests.access import network_policy, service_account
from argusrl.cluster.manifests.document import Document
from argusrl.cluster.manifests.job import ray_job
from argusrl.cluster.manifests.recipe import PodFiles, recipe_map
from argusrl.cluster.manifests.setup import setup_of
from argusrl.cluster.manifests.storage import storage
from argusrl.config.sections import Config


def render(config: Config, submission: int = 1) -> list[Document]:
    """The objects in the order they are to be created; the RayJob is the last. Reads the user's own Python files.

    Raises ConfigError with everything that keeps this recipe from running on Kubernetes.
    """
    setup = setup_of(config, submission)
    files = PodFiles(setup.config, setup.kubernetes.volume.mount)
    return [
        service_account(setup),
        network_policy(setup),
        recipe_map(setup, files),
        *storage(setup.kubernetes.volume, setup.kubernetes.namespace, setup.run_labels),
        ray_job(setup, files),
    ]
