import json
import threading

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from botocore.stub import Stubber
from moto import mock_aws

from argusrl.errors import ClusterError, ConfigError
from argusrl.storage import s3 as s3_module
from argusrl.storage.layout import RunFolder
from argusrl.storage.s3 import BackgroundCopies, Place, client, copy_folder, put_json
from fakes.run_folder import memory_folder, publish_adapter

PLACE = Place("bucket", "team/demo")


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def s3(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(s3_module, "_FIRST_PAUSE_SECONDS", 0.01)
    with mock_aws():
        made = client()
        made.create_bucket(Bucket="bucket")
        yield made


@pytest.fixture
def adapter(tmp_path):
    run = RunFolder(tmp_path / "run")
    return run.absolute(publish_adapter(run, 3, 1).path)


def objects(s3):
    """Keys in the order in which they were put."""
    found = s3.list_objects_v2(Bucket="bucket").get("Contents", ())
    return {item["Key"]: s3.get_object(Bucket="bucket", Key=item["Key"])["Body"].read() for item in found}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", Place("bucket")),
        ("s3://bucket/", Place("bucket")),
        ("s3://my.bucket-1/a/b/", Place("my.bucket-1", "a/b")),
    ],
)
def test_places(url, place):
    assert Place.of(url) == place


@pytest.mark.parametrize("url", ["bucket/a", "s3:/bucket", "s3://B", "s3://", "https://bucket"])
def test_what_is_no_place(url):
    with pytest.raises(ConfigError, match="not a place in S3") as caught:
        Place.of(url)
    assert "3 to 63" in caught.value.hint


def test_a_folder_arrives_whole_and_is_not_sent_again(s3, adapter):
    sent = copy_folder(s3, adapter, PLACE)
    assert sent == sum(path.stat().st_size for path in adapter.iterdir())
    assert objects(s3) == {f"team/demo/{path.name}": path.read_bytes() for path in adapter.iterdir()}
    assert copy_folder(s3, adapter, PLACE) == 0


def test_the_manifest_comes_last(s3, adapter, monkeypatch):
    order = []
    real = s3.upload_file
    monkeypatch.setattr(s3, "upload_file", lambda *given, **options: order.append(given[2]) or real(*given, **options))
    copy_folder(s3, adapter, PLACE)
    assert order[-1] == "team/demo/manifest.json"
    assert len(order) == 3


def test_what_changed_or_was_cut_off_is_sent(s3, adapter):
    copy_folder(s3, adapter, PLACE)
    s3.put_object(Bucket="bucket", Key="team/demo/adapter_config.json", Body=b"half")
    assert copy_folder(s3, adapter, PLACE) == len('{"r": 8}')
    assert objects(s3)["team/demo/adapter_config.json"] == b'{"r": 8}'


def test_a_folder_without_a_manifest_is_copied_too(s3, tmp_path):
    (tmp_path / "export" / "inner").mkdir(parents=True)
    (tmp_path / "export" / "inner" / "a").write_bytes(b"a")
    assert copy_folder(s3, tmp_path / "export", PLACE) == 1
    assert copy_folder(s3, tmp_path / "export", PLACE) == 0
    assert list(objects(s3)) == ["team/demo/inner/a"]


def test_a_refusal_names_the_place(s3, adapter):
    with pytest.raises(ClusterError, match="cannot copy to s3://nobody/x") as caught:
        copy_folder(s3, adapter, Place("nobody", "x"))
    assert "NoSuchBucket" in caught.value.message


def test_a_role_that_may_put_and_not_list_is_enough(adapter):
    s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    uploaded = []
    s3.upload_file = lambda *given, **options: uploaded.append(given)
    with Stubber(s3) as stub:
        for _ in range(3):
            stub.add_client_error("head_object", "403", http_status_code=403)
        copy_folder(s3, adapter, PLACE)
    assert len(uploaded) == 3


class Reports(list):
    """What was reported, and a way to wait for it."""

    def __init__(self):
        super().__init__()
        self.came = threading.Event()

    def __call__(self, kind, message):
        self.append((kind, message))
        self.came.set()

    @property
    def kinds(self):
        return [kind for kind, _ in self]


def test_copies_run_beside_and_say_which_is_best(s3, adapter):
    reports = Reports()
    copies = BackgroundCopies(PLACE, reports)
    copies.copy(adapter, "adapters/v000003-ab", {"step": 3})
    copies.copy(adapter, "adapters/v000003-ab")
    copies.close()
    assert reports.kinds == ["copied"], "the second time there is nothing to send"
    found = objects(s3)
    assert json.loads(found["team/demo/best.json"]) == {"step": 3}
    assert len([key for key in found if key.startswith("team/demo/adapters/v000003-ab/")]) == 3


def test_a_failure_is_tried_again_and_then_told(s3, adapter):
    reports, tries = Reports(), []

    def connect():
        tries.append(1)
        if len(tries) == 1:
            raise ClusterError("cannot copy: no answer")
        return s3

    copies = BackgroundCopies(PLACE, reports, connect)
    copies.copy(adapter, "one")
    assert reports.came.wait(30)
    copies.copy(adapter, "two")
    copies.close()
    assert reports.kinds == ["copied", "copied"]
    assert not copies.busy
    nobody = BackgroundCopies(Place("nobody"), reports := Reports())
    nobody.copy(adapter, "one")
    assert reports.came.wait(30)
    nobody.close()
    assert reports.kinds == ["copy_failed"]
    assert "NoSuchBucket" in reports[0][1]


def test_a_run_that_ended_does_not_wait_for_another_try(s3, adapter, monkeypatch):
    monkeypatch.setattr(s3_module, "_FIRST_PAUSE_SECONDS", 1000.0)
    nobody = BackgroundCopies(Place("nobody"), reports := Reports())
    nobody.copy(adapter, "one")
    nobody.copy(adapter, "two")
    nobody.close()
    assert reports.kinds == ["copy_failed", "copy_failed"]


def test_an_adapter_that_retention_took_is_no_failure(s3, tmp_path):
    reports = Reports()
    copies = BackgroundCopies(PLACE, reports)
    copies.copy(tmp_path / "gone", "gone")
    copies.close()
    assert reports == []


def test_what_does_not_come_to_an_end_is_left(s3, adapter):
    go_on = threading.Event()
    reports = Reports()
    copies = BackgroundCopies(PLACE, reports, lambda: go_on.wait(30) and s3)
    copies.copy(adapter, "one")
    copies.copy(adapter, "two")
    copies.close(deadline_seconds=0.05)
    assert reports.kinds == ["copy_incomplete"]
    go_on.set()


def test_without_credentials_it_is_told(adapter):
    class Nobody:
        def head_object(self, **_):
            raise NoCredentialsError

    with pytest.raises(ClusterError, match="Unable to locate credentials"):
        copy_folder(Nobody(), adapter, PLACE)


def test_without_boto3_it_is_told(monkeypatch):
    monkeypatch.setattr(s3_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ClusterError, match="boto3") as caught:
        client()
    assert "argusrl[cluster]" in caught.value.hint


def test_small_records_are_replaced(s3):
    for number in range(2):
        put_json(s3, {"step": number}, PLACE / "best.json")
    assert json.loads(objects(s3)["team/demo/best.json"]) == {"step": 1}
