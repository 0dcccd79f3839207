from __future__ import annotations

import pytest

from argusrl.config.checks import problems
from argusrl.config.load import load_config
from argusrl.errors import ConfigError
from fakes.kubernetes_recipe import RECIPE, kubernetes_config


def test_the_reference_recipe_is_sound() -> None:
    assert problems(kubernetes_config()) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.address=local"], r"joins the Ray cluster around it; set auto"),
        (["run.root=/data/runs"], r"run\.root: pods share /fsx only"),
        (["model.path=/models/qwen"], r"model\.path: pods do not see /models/qwen; put it below /fsx"),
        (["adapter.initial=/data/adapter"], r"adapter\.initial: pods do not see /data/adapter"),
        (["run.root=/fsx/../data"], r"run\.root: pods share /fsx only"),
        (["cluster.kubernetes.volume.mount=/tmp", "run.root=/tmp/runs", "model.path=a/b"], "meets /tmp/ray"),
        (["cluster.kubernetes.volume.mount=/", "run.root=/runs"], "an absolute folder of its own"),
        (["cluster.kubernetes.nvme=local"], r"nvme: must be an absolute folder"),
        (["cluster.kubernetes.volume.storage_class=fsx"], "give one of them"),
        (["cluster.kubernetes.volume.dns_name=null"], r"volume\.dns_name: file_system_id needs it"),
        (["cluster.kubernetes.volume.mount_name=null"], r"volume\.mount_name: file_system_id needs it"),
        (["cluster.kubernetes.volume.dns_name=fs-1.fsx.eu.amazonaws.com"], "is of another file system"),
        (["cluster.kubernetes.volume={claim: x, mount_name: y}"], r"mount_name: only with file_system_id"),
        (["cluster.kubernetes.queue={name: Bad Name}"], r"queue\.name"),
        (["cluster.kubernetes.queue={name: team, priority: High_1}"], r"queue\.priority"),
        (["cluster.kubernetes.head.memory=1000m"], r"head\.memory"),
        (["cluster.kubernetes.head.memory=16GB"], r"head\.memory: must be text such as 16Gi, 16G or 500M"),
        (["cluster.kubernetes.volume.capacity=5ki"], r"volume\.capacity"),
        (["observe.prometheus_port=6379"], "6379 is Ray's head"),
        (["observe.prometheus_port=8080"], "8080 is Ray's metrics"),
        (["observe.prometheus_port=8265"], "8265 is Ray's dashboard"),
        (["cluster.kubernetes.volume.uid=0"], r"volume\.uid 0: pods do not run as root"),
        (["cluster.kubernetes.secrets={POD_NAME: a/b}"], r"secrets\.POD_NAME: not a variable that can be set"),
        (["cluster.environment={A: 'env:API_KEY'}"], r"env:API_KEY is not set in pods"),
        (["cluster.environment={A: 'file:/elsewhere/key'}"], "pods do not see /elsewhere/key"),
        (
            ["rewards.0={kind: http, url: 'http://a/b', token: 'env:JUDGE'}"],
            r"rewards\.0\.token: env:JUDGE is not set in pods",
        ),
        (["cluster.kubernetes.workers.labels={'ray.io/group': x}"], "belongs to argusrl, Ray or Kueue"),
        (["cluster.kubernetes.head.selector={zone: 'not ok'}"], "zone=not ok is no label"),
        (["cluster.kubernetes.role_arn=admin"], "an IAM role is arn:aws:iam"),
        (["cluster.kubernetes.image='my image'"], "must be registry/name:tag"),
        (["cluster.notify.webhook=hooks"], r"webhook: must be https://"),
        (["cluster.notify.webhook='https://a.example/h?token=abcdef'"], "holds a secret in clear text"),
        (["cluster.notify.sns_topic=mine"], r"a topic is arn:aws:sns"),
    ],
)
def test_each_rule(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        kubernetes_config(*overrides)
    assert len(caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.kubernetes.secrets={API_KEY: tools/key}", "cluster.environment={A: 'env:API_KEY'}"],
        ["cluster.environment={A: 'file:/fsx/keys/key'}"],
        ["cluster.kubernetes.volume={claim: team-fsx}"],
        ["cluster.kubernetes.volume={claim: fresh, storage_class: fsx-sc}"],
        ["cluster.notify.webhook=env:HOOK"],
        ["cluster.notify.sns_topic=arn:aws:sns:us-west-2:123456789012:runs"],
        ["cluster.kubernetes=null", "cluster.address=local", "run.root=runs"],
    ],
)
def test_what_may_be(overrides: list[str]) -> None:
    assert problems(kubernetes_config(*overrides)) == []


def test_secrets_are_references_by_their_form() -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        kubernetes_config("cluster.kubernetes.secrets={HF_TOKEN: hf_abcdefghijklmnop}")


def test_problems_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, ["cluster.address=local", "run.root=/data", "cluster.kubernetes.volume.uid=0"])
    assert len(caught.value.problems) == 3
