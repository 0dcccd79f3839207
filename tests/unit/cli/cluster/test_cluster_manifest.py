from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from argusrl.cli.cluster import VERBS
from argusrl.cli.main import run
from argusrl.cluster.kinds import DEPLOYMENT
from fakes.kubernetes_api import ApiServer
from fakes.kubernetes_recipe import RECIPE, ROOT, ray_job


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_of_the_group_has_its_module_and_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", verb, "--help"]) == 0
    assert f"Usage: argusrl cluster {verb}" in capsys.readouterr().out


def test_the_group_lists_its_verbs_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)
    code = (
        "import sys; from argusrl.cli.main import run; assert run(['cluster', '--help']) == 0\n"
        "heavy = {'kubernetes', 'boto3', 'ray', 'torch', 'yaml', 'jsonschema'} & set(sys.modules)\n"
        "verbs = {name for name in sys.modules if name.startswith('argusrl.cli.cluster.')}\n"
        "assert not heavy, heavy; assert not verbs, verbs"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_yaml_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "manifest", str(RECIPE), "run.name=maze", "--submission", "2"]) == 0
    text = capsys.readouterr().out
    objects = list(yaml.safe_load_all(text))
    assert objects[-1]["kind"] == "RayJob"
    assert objects[-1]["metadata"]["name"] == "maze-s2"
    assert text.startswith("---\n# ")


def test_what_is_written_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    assert run(["cluster", "manifest", str(RECIPE), "--validate", "--output", str(file)]) == 0
    assert run(["cluster", "manifest", "--check", str(file)]) == 0
    assert "6 objects are valid" in capsys.readouterr().out


def test_a_wrong_file_gives_every_mistake_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    run(["cluster", "manifest", str(RECIPE), "--output", str(file)])
    text = file.read_text().replace("backoffLimit: 0\n  submitter", "backofLimit: 0\n  submitter")
    file.write_text(text.replace("num-cpus: '0'", "num-cpus: 0").replace("HTTPMode", "HttpMode"))
    capsys.readouterr()
    assert run(["cluster", "manifest", "--check", str(file), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["valid"]
    assert len(found["problems"]) == 3
    assert run(["cluster", "manifest", "--check", str(file)]) == 2
    assert "3 problems" in capsys.readouterr().err


def test_json_holds_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "manifest", str(RECIPE), "--json"]) == 0
    kinds = [value["kind"] for value in json.loads(capsys.readouterr().out)]
    assert kinds[-1] == "RayJob"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which recipe?"),
        ([str(RECIPE), "cluster.slots=5"], "3 nodes of 2 GPUs"),
        (["--check", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_a_wrong_command_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "manifest", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_list_is_checked_and_what_nobody_knows_here_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", "manifest", "--check", str(ROOT / "deploy/kubernetes/pod_monitor.yaml")]) == 0
    text = capsys.readouterr().out
    assert "PodMonitor argusrl: monitoring.coreos.com/v1 is not known here, and not checked" in text
    assert "valid" not in text
    service = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "s"}}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [service, config_map]}))
    assert run(["cluster", "manifest", "--check", str(file)]) == 0
    assert "1 object is valid" in capsys.readouterr().out
    config_map["data"] = "x"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [service, config_map]}))
    assert run(["cluster", "manifest", "--check", str(file), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == len(found["notes"]) == 1


@pytest.mark.parametrize("tolerations", [[5], "all", {"key": "x"}, [["key"]]])
def test_a_value_of_the_wrong_type_is_a_problem_and_no_traceback(
    tolerations: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ray_job()
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["tolerations"] = tolerations
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(job))
    assert run(["cluster", "manifest", "--check", str(file)]) == 2
    assert "tolerations" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["manifest", "install"])
def test_a_file_that_cannot_be_written_is_told(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", verb, str(RECIPE), "--output", str(tmp_path / "nowhere" / "x.yaml")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--namespace", "Bad_NS"], ["--run-namespace", "Team_A"], ["--claim", "Not_OK"]])
def test_what_kubernetes_would_refuse_is_refused_before_anything_is_asked(
    words: list[str], server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", "install", str(RECIPE), *words, "--apply"]) == 2
    assert words[1] in capsys.readouterr().err
    assert not server.asked


def test_the_controllers_nodes_are_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "install", str(RECIPE), "--node-label", "team=ops"]) == 0
    assert "team: ops" in capsys.readouterr().out
    assert run(["cluster", "install", str(RECIPE), "--node-label", "team"]) == 2
    assert "--node-label team: write KEY=VALUE" in capsys.readouterr().err


def test_files_that_are_no_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("a: [", "x.yaml, line 1, column 5: not YAML: "),
        ("- a\n", "holds no Kubernetes objects"),
        ("", "holds no Kubernetes"),
        ("model: {path: a/b}\n", "looks like a recipe"),
    ):
        (tmp_path / "x.yaml").write_text(text)
        assert run(["cluster", "manifest", "--check", str(tmp_path / "x.yaml")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "problems" not in error


def test_install_is_yaml_that_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "install.yaml"
    words = ["--namespace", "ops", "--run-namespace", "team-a", "--claim", "fsx", "--secret", "HOOK=hook/url"]
    assert run(["cluster", "install", str(RECIPE), *words, "--prepull", "--output", str(file)]) == 0
    objects = list(yaml.safe_load_all(file.read_text()))
    assert {value["metadata"].get("namespace") for value in objects} == {None, "ops", "team-a"}
    deployment = next(value for value in objects if value["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fsx"
    assert run(["cluster", "manifest", "--check", str(file)]) == 0
    capsys.readouterr()
    assert run(["cluster", "install", str(RECIPE), "--secret", "HOOK=https://a/b?c"]) == 2
    error = capsys.readouterr().err
    assert "--secret HOOK: write NAME=SECRET/KEY" in error
    assert "https" not in error


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    pytest.importorskip("kubernetes")
    with ApiServer() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


def test_live_asks_the_cluster_of_the_kubeconfig(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "manifest", str(RECIPE), "--live"]) == 2
    assert "KubeRay is not installed" in capsys.readouterr().err
    assert server.asked


def test_nothing_is_installed_in_a_cluster_without_kuberay(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", "install", str(RECIPE), "--apply"]) == 7
    error = capsys.readouterr().err
    assert "3 problems" in error
    assert "nothing was changed" in error
    assert not [verb for verb, *_ in server.asked if verb != "get" and verb != "list"]


def test_installing_creates_every_object(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("argusrl.cluster.manifests.apply.cluster_problems", lambda kube: [])
    assert run(["cluster", "install", str(RECIPE), "--apply"]) == 0
    said = capsys.readouterr()
    assert not said.err
    lines = said.out.splitlines()
    assert lines[0] == "✓ Namespace argusrl-system"
    assert lines[-1] == "✓ Deployment argusrl-system/argusrl-controller"
    assert len(server.store.objects(DEPLOYMENT)) == 1
    assert run(["cluster", "install", str(RECIPE), "--apply"]) == 0


def test_namespaces_without_the_administrators_own_claim_are_named(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("argusrl.cluster.manifests.apply.cluster_problems", lambda kube: [])
    server.store.seed({"kind": "PersistentVolumeClaim", "metadata": {"name": "mine"}, "spec": {}})
    assert run(["cluster", "install", str(RECIPE), "cluster.kubernetes.volume={claim: mine}", "--apply"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "namespace argusrl-system has no PersistentVolumeClaim mine" in line


def test_options_that_the_recipe_does_not_know_of_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "install", str(RECIPE), "--namespace", "ops", "cluster.notify.webhook=env:HOOK"]
    assert run(words) == 0
    error = capsys.readouterr().err
    assert "cluster.kubernetes.controller_namespace is argusrl-system" in error
    assert "--secret HOOK=SECRET/KEY" in error
    assert run([*words, "cluster.kubernetes.controller_namespace=ops", "--secret", "HOOK=hook/url"]) == 0
    assert not capsys.readouterr().err


def test_objects_whose_run_does_not_fit_are_valid_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "manifest", str(RECIPE), "run.name=maze", "--validate"]
    assert run(words) == 0
    assert "does not fit" not in capsys.readouterr().err
    assert run([*words, "cluster.kubernetes.head.memory=1Gi"]) == 0
    assert "does not fit" in capsys.readouterr().err
