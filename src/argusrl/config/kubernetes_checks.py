"""Rules between the values of `cluster.kubernetes` and the rest of a recipe, as far as no instance table is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from argusrl.config.cluster_sections import KubernetesSection, VolumeSection
from argusrl.config.secrets import SECRET_NAME, is_secret_reference
from argusrl.config.sections import Config

_TAKEN_FOLDERS = ("/etc/argusrl", "/dev/shm", "/tmp/ray", "/var/argusrl", "/nvme")
_RAY_PORTS = {6379: "Ray's head", 8080: "Ray's metrics", 8265: "Ray's dashboard"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_OUR_LABELS = ("argusrl.io/", "ray.io/", "app.kubernetes.io/", "kueue.x-k8s.io/")
_OUR_VARIABLES = ("POD_NAME", "POD_IP", "POD_NAMESPACE", "NODE_NAME", "HOST_IP", "HYPERPOD_JMA_HOST", "HOME", "USER")
_ROLE = re.compile(r"arn:aws[-a-z]*:iam::\d{12}:role/.+")
_TOPIC = re.compile(r"arn:aws[-a-z]*:sns:[-a-z0-9]+:\d{12}:.+")


def kubernetes_problems(config: Config) -> Iterator[str]:
    """Every broken rule. Touches no file."""
    yield from _notify(config)
    kubernetes = config.cluster.kubernetes
    if kubernetes is None:
        return
    if config.cluster.address != "auto":
        yield (
            f"cluster.address {config.cluster.address}: the run of a Kubernetes job joins the Ray cluster around it; "
            "set auto, or leave cluster.kubernetes out (null)"
        )
    yield from _folders(config, kubernetes)
    yield from unseen_paths(config, kubernetes.volume.mount)
    yield from _volume(kubernetes.volume)
    yield from _secrets(config, kubernetes)
    yield from _labels(kubernetes)
    if (port := config.observe.prometheus_port) in _RAY_PORTS:
        yield f"observe.prometheus_port: {port} is {_RAY_PORTS[port]} in the same pod; choose another, 9400 say"
    if kubernetes.role_arn is not None and not _ROLE.fullmatch(kubernetes.role_arn):
        yield f"cluster.kubernetes.role_arn: an IAM role is arn:aws:iam::ACCOUNT:role/NAME, got {kubernetes.role_arn}"
    if re.search(r"\s", kubernetes.image) or not kubernetes.image:
        yield f"cluster.kubernetes.image: must be registry/name:tag, got '{kubernetes.image}'"


def _folders(config: Config, kubernetes: KubernetesSection) -> Iterator[str]:
    mount, root = kubernetes.volume.mount, config.run.root
    if not mount.is_absolute() or mount == Path("/") or ".." in mount.parts:
        yield f"cluster.kubernetes.volume.mount: must be an absolute folder of its own, got {mount}"
        return
    for folder in map(Path, _TAKEN_FOLDERS):
        if mount.is_relative_to(folder) or folder.is_relative_to(mount):
            yield f"cluster.kubernetes.volume.mount: {mount} meets {folder}, which pods use otherwise; choose another"
    if not root.is_relative_to(mount) or ".." in root.parts:
        yield f"run.root: pods share {mount} only (cluster.kubernetes.volume.mount), and {root} is not below it"
    if kubernetes.nvme is not None and not kubernetes.nvme.is_absolute():
        yield f"cluster.kubernetes.nvme: must be an absolute folder of the host, got {kubernetes.nvme}"


def unseen_paths(config: Config, mount: Path) -> Iterator[str]:
    """Models, adapters and data that are not on the pods' file system, and too large to travel with the recipe."""
    model, data = config.model.path, config.data
    paths = {
        "model.path": model if model.startswith(("/", ".", "~")) else None,
        "adapter.initial": config.adapter.initial,
        "data.train": data.train if data.kind == "files" else None,
        "data.heldout": data.heldout if data.kind == "files" else None,
    }
    for key, path in paths.items():
        if path is not None and not Path(path).is_relative_to(mount):
            yield f"{key}: pods do not see {path}; put it below {mount}"


def _volume(volume: VolumeSection) -> Iterator[str]:
    at = "cluster.kubernetes.volume"
    if volume.file_system_id is not None:
        if volume.storage_class is not None:
            yield f"{at}: file_system_id is a volume that exists, storage_class makes one; give one of them"
        for name in ("dns_name", "mount_name"):
            if getattr(volume, name) is None:
                yield f"{at}.{name}: file_system_id needs it (aws fsx describe-file-systems shows it)"
        if volume.dns_name is not None and not volume.dns_name.startswith(f"{volume.file_system_id}."):
            yield f"{at}.dns_name: {volume.dns_name} is of another file system than {volume.file_system_id}"
    else:
        for name in ("dns_name", "mount_name"):
            if getattr(volume, name) is not None:
                yield f"{at}.{name}: only with file_system_id; without it the claim is taken as it is"
    for name in ("uid", "gid"):
        if getattr(volume, name) == 0:
            yield f"{at}.{name} 0: pods do not run as root; name an ordinary user that may write below run.root"


def _secrets(config: Config, kubernetes: KubernetesSection) -> Iterator[str]:
    for name in kubernetes.secrets:
        if not _VARIABLE.fullmatch(name) or name in _OUR_VARIABLES:
            yield f"cluster.kubernetes.secrets.{name}: not a variable that can be set; choose another name"
    references = {f"cluster.environment.{name}": value for name, value in config.cluster.environment.items()}
    references |= {f"rewards.{index}.token": reward.token or "" for index, reward in enumerate(config.rewards)}
    for key, reference in references.items():
        kind, _, rest = reference.partition(":")
        if not is_secret_reference(reference):
            continue
        if kind == "env" and rest not in kubernetes.secrets:
            yield (
                f"{key}: {reference} is not set in pods; add cluster.kubernetes.secrets: {{{rest}: secret-name/key}} "
                "(kubectl create secret generic makes the secret)"
            )
        if kind == "file" and not Path(rest).is_relative_to(kubernetes.volume.mount):
            yield f"{key}: pods do not see {rest}; use a Kubernetes secret and env:NAME"


def _labels(kubernetes: KubernetesSection) -> Iterator[str]:
    for group in ("head", "workers"):
        section = getattr(kubernetes, group)
        for field in ("labels", "selector"):
            for key, value in getattr(section, field).items():
                at = f"cluster.kubernetes.{group}.{field}"
                if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                    yield f"{at}: {key}={value} is no label of Kubernetes"
                elif field == "labels" and key.startswith(_OUR_LABELS):
                    yield f"{at}: {key} belongs to argusrl, Ray or Kueue; choose another name"


def _notify(config: Config) -> Iterator[str]:
    notify = config.cluster.notify
    if notify.webhook is not None and not is_secret_reference(notify.webhook):
        parts = urlsplit(notify.webhook)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield "cluster.notify.webhook: must be https://…, env:NAME or file:PATH"
        elif parts.password or any(SECRET_NAME.search(name) for name, _ in parse_qsl(parts.query)):
            yield "cluster.notify.webhook: holds a secret in clear text; write env:NAME or file:PATH"
    if notify.sns_topic is not None and not _TOPIC.fullmatch(notify.sns_topic):
        yield f"cluster.notify.sns_topic: a topic is arn:aws:sns:REGION:ACCOUNT:NAME, got {notify.sns_topic}"
