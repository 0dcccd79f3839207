"""The same cases for every `KubeApi`: the real client against the fake server, and the in-memory one."""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from argusrl.cluster.kinds import CONFIG_MAP, NODE, POD, RAY_CLUSTER, RAY_JOB, SERVICE_ACCOUNT, Kind
from argusrl.cluster.kube import Kube, connect
from argusrl.cluster.kube_api import Conflict, Denied, Expired, KubeApi, NotFound, Refused, Unreachable
from argusrl.errors import ClusterError
from fakes.kubernetes_api import ApiServer, MemoryKube, Rule, Store

pytest.importorskip("kubernetes")


def config_map(name: str = "settings", **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def pod(name: str = "worker", *, node: str = "", owner: dict[str, Any] | None = None, **labels: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "ray", "image": "argusrl:1"}]}
    if node:
        spec["nodeName"] = node
    meta: dict[str, Any] = {"name": name, "labels": labels}
    if owner:
        meta["ownerReferences"] = [owner]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def ray_job(name: str = "maze-s1") -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "ray-head", "image": "argusrl:1"}]}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {"argusrl.io/run": "maze"}},
        "spec": {
            "entrypoint": "argusrl train /etc/argusrl/recipe.yaml",
            "rayClusterSpec": {"headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": template}},
        },
    }


def reference(owner: dict[str, Any], **more: Any) -> dict[str, Any]:
    meta = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"], **more}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[ApiServer]:
    with ApiServer(store) as server:
        yield server


@pytest.fixture(params=["http", "memory"])
def kube(request: pytest.FixtureRequest, store: Store) -> KubeApi:
    if request.param == "memory":
        return MemoryKube(store)
    server: ApiServer = request.getfixturevalue("server")
    return server.connect()


@pytest.fixture
def http(server: ApiServer) -> Kube:
    return server.connect()


class TestObjects:
    def test_what_is_created_is_read_back_with_what_the_server_adds(self, kube: KubeApi) -> None:
        made = kube.create(CONFIG_MAP, config_map(step="1"))
        assert kube.get(CONFIG_MAP, "settings") == made
        assert made["metadata"]["namespace"] == "default"
        assert made["metadata"]["uid"]
        assert made["metadata"]["resourceVersion"]

    def test_creating_twice_is_a_conflict_that_says_so(self, kube: KubeApi) -> None:
        kube.create(RAY_JOB, ray_job())
        with pytest.raises(Conflict, match=r'rayjobs.ray.io "maze-s1" already exists') as caught:
            kube.create(RAY_JOB, ray_job())
        assert caught.value.exists

    def test_what_is_not_there(self, kube: KubeApi) -> None:
        with pytest.raises(NotFound, match='pods "nobody" not found'):
            kube.get(POD, "nobody")
        with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
            kube.create(CONFIG_MAP, config_map(), "nowhere")
        assert not kube.delete(POD, "nobody")

    def test_unknown_fields_are_refused_not_dropped(self, kube: KubeApi) -> None:
        job = ray_job()
        job["spec"]["backoffLimitt"] = 3
        with pytest.raises(Refused, match=r'unknown field "spec.backoffLimitt"'):
            kube.create(RAY_JOB, job)
        wrong = pod()
        wrong["spec"]["containers"][0]["imagee"] = "x"
        with pytest.raises(Refused, match=r'unknown field "spec.containers\[0\].imagee"'):
            kube.create(POD, wrong)

    def test_lists_choose_by_labels_and_fields_and_namespace(self, kube: KubeApi, store: Store) -> None:
        kube.create(POD, pod("a", node="n1", run="maze"))
        kube.create(POD, pod("b", run="maze"))
        kube.create(POD, pod("c", run="other"))
        store.seed({**pod("d", run="maze"), "metadata": {"name": "d", "namespace": "kube-system"}})

        def names(**choice: Any) -> list[str]:
            return [one["metadata"]["name"] for one in kube.list(POD, **choice).items]

        assert names() == ["a", "b", "c"]
        assert names(namespace="") == ["a", "b", "c", "d"]
        assert names(labels="run=maze") == ["a", "b"]
        assert names(labels="run in (maze, other),run!=other") == ["a", "b"]
        assert names(labels="!run") == []
        assert names(fields="spec.nodeName=n1") == ["a"]
        with pytest.raises(Refused, match="field label not supported"):
            names(fields="spec.containers=x")

    def test_items_of_a_list_know_their_kind(self, kube: KubeApi) -> None:
        kube.create(RAY_JOB, ray_job())
        (item,) = kube.list(RAY_JOB).items
        assert (item["apiVersion"], item["kind"]) == ("ray.io/v1", "RayJob")


class TestChanges:
    def test_a_merge_patch_sets_and_removes(self, kube: KubeApi) -> None:
        kube.create(CONFIG_MAP, config_map(a="1", b="2"))
        changed = kube.patch(CONFIG_MAP, "settings", {"data": {"a": None, "c": "3"}})
        assert changed["data"] == {"b": "2", "c": "3"}

    def test_a_patch_of_another_version_is_a_conflict(self, kube: KubeApi) -> None:
        old = kube.create(CONFIG_MAP, config_map(a="1"))["metadata"]["resourceVersion"]
        kube.patch(CONFIG_MAP, "settings", {"data": {"a": "2"}})
        with pytest.raises(Conflict, match="has been modified") as caught:
            kube.patch(CONFIG_MAP, "settings", {"data": {"a": "3"}}, resource_version=old)
        assert not caught.value.exists
        assert kube.get(CONFIG_MAP, "settings")["data"] == {"a": "2"}

    def test_status_is_changed_apart_from_the_rest(self, kube: KubeApi) -> None:
        made = kube.create(RAY_JOB, {**ray_job(), "status": {"jobStatus": "RUNNING"}})
        assert "status" not in made
        both = {"spec": {"entrypoint": "other"}, "status": {"jobStatus": "RUNNING"}}
        assert kube.patch(RAY_JOB, "maze-s1", both, sub="status")["spec"]["entrypoint"] != "other"
        assert kube.patch(RAY_JOB, "maze-s1", {"status": {"jobStatus": "FAILED"}})["status"]["jobStatus"] == "RUNNING"

    def test_apply_creates_changes_and_takes_back(self, kube: KubeApi) -> None:
        document = config_map(a="1", b="2")
        kube.apply(document)
        kube.patch(CONFIG_MAP, "settings", {"data": {"theirs": "x"}})
        kube.apply(config_map(b="3"))
        assert kube.get(CONFIG_MAP, "settings")["data"] == {"b": "3", "theirs": "x"}

    def test_apply_of_the_same_changes_nothing(self, kube: KubeApi) -> None:
        first = kube.apply(ray_job())
        assert kube.apply(ray_job())["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]

    def test_a_dry_run_leaves_no_trace(self, kube: KubeApi) -> None:
        assert kube.apply(config_map(a="1"), dry_run=True)["data"] == {"a": "1"}
        with pytest.raises(NotFound):
            kube.get(CONFIG_MAP, "settings")


class TestDeletion:
    def test_preconditions_protect_a_successor(self, kube: KubeApi) -> None:
        made = kube.create(RAY_JOB, ray_job())
        with pytest.raises(Conflict, match="Precondition failed: UID"):
            kube.delete(RAY_JOB, "maze-s1", uid="another")
        with pytest.raises(Conflict, match="has been modified"):
            kube.delete(RAY_JOB, "maze-s1", resource_version="1")
        meta = made["metadata"]
        assert kube.delete(RAY_JOB, "maze-s1", uid=meta["uid"], resource_version=meta["resourceVersion"])
        assert kube.list(RAY_JOB).items == []

    def test_a_pod_on_a_dead_node_stays_until_forced(self, kube: KubeApi, store: Store) -> None:
        store.dead_nodes.add("n1")
        kube.create(POD, pod(node="n1"))
        assert kube.delete(POD, "worker")
        meta = kube.get(POD, "worker")["metadata"]
        assert meta["deletionTimestamp"]
        assert meta["deletionGracePeriodSeconds"] == 30
        assert kube.delete(POD, "worker", grace_seconds=0)
        assert not kube.delete(POD, "worker", grace_seconds=0)

    def test_owned_objects_follow_their_owner(self, kube: KubeApi) -> None:
        job = kube.create(RAY_JOB, ray_job())
        kube.create(POD, pod(owner=reference(job)))
        kube.delete(RAY_JOB, "maze-s1")
        assert kube.list(POD).items == []

    def test_foreground_deletion_waits_for_what_is_owned(self, kube: KubeApi, store: Store) -> None:
        store.kubelets = False
        job = kube.create(RAY_JOB, ray_job())
        kube.create(POD, pod(node="n1", owner=reference(job, blockOwnerDeletion=True)))
        kube.delete(RAY_JOB, "maze-s1", propagation="Foreground")
        assert kube.get(RAY_JOB, "maze-s1")["metadata"]["finalizers"] == ["foregroundDeletion"]
        assert "deletionTimestamp" in kube.get(POD, "worker")["metadata"]
        store.finish_pods()
        assert not kube.list(POD).items
        assert not kube.list(RAY_JOB).items

    def test_orphans_stay(self, kube: KubeApi) -> None:
        job = kube.create(RAY_JOB, ray_job())
        kube.create(POD, pod(owner=reference(job)))
        kube.delete(RAY_JOB, "maze-s1", propagation="Orphan")
        assert kube.list(RAY_JOB).items == []
        assert (
            "ownerReferences" not in kube.get(POD, "worker")["metadata"]
            or not kube.get(POD, "worker")["metadata"]["ownerReferences"]
        )

    def test_finalizers_keep(self, kube: KubeApi) -> None:
        job = ray_job()
        job["metadata"]["finalizers"] = ["ray.io/rayjob-finalizer"]
        kube.create(RAY_JOB, job)
        kube.delete(RAY_JOB, "maze-s1")
        assert "deletionTimestamp" in kube.get(RAY_JOB, "maze-s1")["metadata"]
        kube.patch(RAY_JOB, "maze-s1", {"metadata": {"finalizers": None}})
        assert not kube.list(RAY_JOB).items


class TestWatching:
    def test_a_watch_begins_with_what_is_there(self, kube: KubeApi) -> None:
        kube.create(POD, pod("a", run="maze"))
        kube.create(POD, pod("b"))
        watch = kube.watch(POD, labels="run=maze", seconds=1)
        first, second = next(watch), next(watch)
        assert (first.kind, first.object["metadata"]["name"]) == ("added", "a")
        assert second.kind == "listed"
        kube.patch(POD, "a", {"metadata": {"labels": {"x": "y"}}})
        third = next(watch)
        assert (third.kind, third.object["metadata"]["labels"]) == ("modified", {"run": "maze", "x": "y"})
        kube.delete(POD, "a")
        assert next(change.kind for change in watch if change.kind != "modified") == "deleted"


class TestRealClient:
    def test_defaults_of_the_crd_are_filled_in(self, http: Kube) -> None:
        made = http.create(RAY_JOB, ray_job())
        if "submissionMode" not in made["spec"]:
            pytest.skip("no CRD schemas here")
        assert made["spec"]["submissionMode"] == "K8sJobMode"
        assert made["spec"]["backoffLimit"] == 0

    def test_values_against_the_crd_are_refused(self, http: Kube) -> None:
        job = ray_job()
        job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
        with pytest.raises(Refused, match=r"rayStartParams.num-cpus"):
            http.create(RAY_JOB, job)

    def test_values_against_the_core_schema_are_refused(self, http: Kube) -> None:
        wrong = pod()
        wrong["spec"]["containers"][0]["env"] = [{"name": "A", "value": 3}]
        with pytest.raises(Refused, match=r"env.0.value"):
            http.create(POD, wrong)

    def test_long_lists_come_in_pages_of_one_moment(self, http: Kube, store: Store, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube._PAGE", 2)
        for number in range(5):
            http.create(SERVICE_ACCOUNT, {"metadata": {"name": f"a{number}"}})
        pages = http._pages(SERVICE_ACCOUNT, "default", {})
        first = next(pages)
        http.create(SERVICE_ACCOUNT, {"metadata": {"name": "a9"}})
        rest = [item["metadata"]["name"] for page in pages for item in page.items]
        assert [item["metadata"]["name"] for item in first.items] + rest == ["a0", "a1", "a2", "a3", "a4"]
        assert len(http.list(SERVICE_ACCOUNT).items) == 6

    def test_a_list_that_expires_between_pages_is_read_anew(self, http: Kube, store: Store, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube._PAGE", 2)
        for number in range(3):
            http.create(SERVICE_ACCOUNT, {"metadata": {"name": f"a{number}"}})
        pages = http._pages(SERVICE_ACCOUNT, "default", {})
        next(pages)
        store.seed({"kind": "Namespace", "metadata": {"name": "other"}})
        store.compact()
        with pytest.raises(Expired):
            next(pages)
        assert len(http.list(SERVICE_ACCOUNT).items) == 3

    def test_a_watch_goes_on_after_its_server_ended_it(self, http: Kube, server: ApiServer, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube.BACKOFF_SECONDS", 0.01)
        server.rules.append(Rule(verb="watch", drop=True, times=1))
        server.rules.append(Rule(verb="watch", status=503, times=1))
        watch = http.watch(POD, seconds=5)
        assert next(watch).kind == "listed"
        threading.Timer(0.05, lambda: server.store.seed(pod("late"))).start()
        assert next(watch).object["metadata"]["name"] == "late"
        assert [verb for verb, *_ in server.asked].count("watch") >= 2

    def test_410_in_a_watch_is_answered_by_a_list_that_says_what_changed(self, http: Kube, store: Store) -> None:
        for name in ("goes", "stays", "changes", "again"):
            store.seed(pod(name))
        watch = http.watch(POD, seconds=5)
        while next(watch).kind != "listed":
            pass
        with store.lock:  # all of it unseen
            store.delete(POD, "goes", "default")
            store.delete(POD, "again", "default")
            store.seed(pod("again"))
            store.patch(POD, "changes", {"metadata": {"labels": {"x": "1"}}}, "default")
            store.seed(pod("new"))
            store.compact()
        seen = [next(watch) for _ in range(5)]
        told = {(change.kind, change.object["metadata"]["name"]) for change in seen}
        assert told == {
            *{("deleted", "goes"), ("deleted", "again"), ("added", "again")},
            *{("modified", "changes"), ("added", "new")},
        }

    def test_bookmarks_keep_a_quiet_watch_young(self, http: Kube, store: Store, server: ApiServer) -> None:
        watch = http.watch(POD, seconds=5)
        assert next(watch).kind == "listed"
        arrived = threading.Event()

        def follow() -> None:
            next(watch)
            arrived.set()

        thread = threading.Thread(target=follow)
        thread.start()
        for number in range(3):  # of other kinds: only a bookmark tells the watch how far the server is
            store.seed({"kind": "ConfigMap", "metadata": {"name": f"c{number}"}})
        while ("watch", "pods", "") not in server.asked:
            threading.Event().wait(0.01)
        threading.Event().wait(0.15)
        store.compact()
        store.seed(pod("late"))
        assert arrived.wait(5)
        thread.join()
        assert [verb for verb, resource, _ in server.asked if resource == "pods"].count("list") == 1

    def test_reads_are_tried_again_and_writes_are_not(self, http: Kube, server: ApiServer, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube_http.BACKOFF_SECONDS", 0.001)
        server.rules.append(Rule(status=503, times=3))
        assert http.list(POD).items == []
        server.rules[:] = [Rule(status=503, times=1)]
        with pytest.raises(Unreachable, match="injected"):
            http.create(POD, pod())
        assert http.list(POD).items == []

    def test_a_server_that_does_not_answer_in_time(self, server: ApiServer, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube_http._READ_TRIES", 1)
        server.rules.append(Rule(delay_seconds=0.2))
        with pytest.raises(Unreachable, match="does not answer GET /api/v1/nodes"):
            server.connect(timeout_seconds=0.05).list(NODE)

    def test_no_server_at_all(self, monkeypatch: Any) -> None:
        monkeypatch.setattr("argusrl.cluster.kube_http._READ_TRIES", 1)
        with ApiServer() as server:
            kube = server.connect()
        with pytest.raises(Unreachable, match="does not answer"):
            kube.list(NODE)

    def test_who_is_not_known_and_who_is_not_allowed(self, server: ApiServer) -> None:
        with pytest.raises(Denied, match="does not accept your credentials") as caught:
            server.connect(token="old").list(POD)
        assert "update-kubeconfig" in caught.value.hint
        server.rules.append(Rule(verb="delete", resource="pods", status=403))
        with pytest.raises(Denied, match='cannot delete resource "pods"') as caught:
            server.connect().delete(POD, "x")
        assert "administrator" in caught.value.hint

    def test_a_kind_that_is_not_installed(self, http: Kube, monkeypatch: Any) -> None:
        monkeypatch.delitem(
            __import__("fakes.kubernetes_api.server", fromlist=["_PLACES"])._PLACES, ("ray.io/v1", "rayclusters")
        )
        with pytest.raises(NotFound) as caught:
            http.list(RAY_CLUSTER)
        assert "KubeRay" in caught.value.hint

    def test_logs_and_commands_in_containers(self, http: Kube, server: ApiServer) -> None:
        http.create(POD, pod())
        server.logs["worker", ""] = "one\ntwo\nthree\n"
        assert list(http.logs("worker")) == ["one", "two", "three"]
        assert list(http.logs("worker", tail_lines=2, container="ray")) == ["two", "three"]
        server.programs["worker"] = lambda command: (3, " ".join(command))
        assert http.execute("worker", ["argusrl", "doctor"]) == (3, "argusrl doctor")
        assert http.list(POD).items  # the client still speaks HTTP
        with pytest.raises(NotFound):
            http.execute("nobody", ["true"])

    def test_the_clock_of_the_server(self, http: Kube, server: ApiServer) -> None:
        server.clock_skew_seconds = -90.0
        assert http.clock_skew_seconds() == pytest.approx(-90, abs=2)

    def test_a_kubeconfig_is_found(self, server: ApiServer, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config", "team")))
        kube = connect()
        assert kube.namespace == "team"
        assert kube.version() == "v1.34.2-fake"

    @pytest.mark.parametrize(
        "text",
        ["a: [", "- a", "text", "contexts: 5", "{current-context: a, contexts: [{name: a}]}", "\x80"],
    )
    def test_a_damaged_kubeconfig(self, text: str, tmp_path: Path, monkeypatch: Any) -> None:
        path = tmp_path / "config"
        path.write_bytes(text.encode("latin-1"))
        monkeypatch.setenv("KUBECONFIG", str(path))
        with pytest.raises(ClusterError) as caught:
            connect()
        assert "update-kubeconfig" in caught.value.hint

    def test_a_program_for_credentials_that_is_not_installed(
        self, server: ApiServer, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = server.write_kubeconfig(tmp_path / "config")
        found = yaml.safe_load(path.read_text())
        program = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "no-such-program", "args": []}
        found["users"][0]["user"] = {"exec": program}
        path.write_text(yaml.safe_dump(found))
        monkeypatch.setenv("KUBECONFIG", str(path))
        with pytest.raises(ClusterError, match=r"no credentials: .*no-such-program"):
            connect()
        assert capfd.readouterr().err == ""

    def test_a_port_of_a_pod_on_this_machine(self, http: Kube, server: ApiServer) -> None:
        class Echo(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        http.create(POD, pod("head"))
        with HTTPServer(("127.0.0.1", 0), Echo) as dashboard:
            threading.Thread(target=dashboard.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            server.ports["head", 8265] = dashboard.server_address[1]
            with http.forward("head", 8265) as place:
                body = b"x" * 300_000
                for _ in range(2):
                    with urllib.request.urlopen(f"http://{place}/", data=body, timeout=5) as answer:
                        assert answer.read() == body
            dashboard.shutdown()
        server.rules.append(Rule(verb="create", resource="pods/portforward", status=403))
        with pytest.raises(ClusterError, match="cannot reach port 8265"), http.forward("head", 8265):
            pass

    def test_without_the_client_it_is_said_how_to_get_it(self, monkeypatch: Any) -> None:
        monkeypatch.setitem(sys.modules, "kubernetes", None)
        with pytest.raises(ClusterError, match="kubernetes package is missing") as caught:
            connect()
        assert "argusrl[cluster]" in caught.value.hint

    def test_without_any_cluster(self, monkeypatch: Any, tmp_path: Path) -> None:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
        with pytest.raises(ClusterError, match="no access to a Kubernetes cluster") as caught:
            connect()
        assert "KUBECONFIG" in caught.value.hint


class TestSimulated:
    def test_requests_fail_before_they_are_done_or_after(self, store: Store) -> None:
        def fail(verb: str, kind: Kind, name: str) -> None:
            if verb == "create":
                raise Unreachable("timed out")

        with pytest.raises(Unreachable):
            MemoryKube(store, before=fail).create(POD, pod("never"))
        with pytest.raises(Unreachable):
            MemoryKube(store, after=fail).create(POD, pod("done"))
        assert [one["metadata"]["name"] for one in store.objects(POD)] == ["done"]
