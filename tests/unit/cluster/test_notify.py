from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from botocore.stub import Stubber

from argusrl.cluster.notices import Notice, Notices
from argusrl.cluster.notify import Channel, NotDelivered, Topic, Webhook, body_of, channels, reward_collapse
from argusrl.config.cluster_sections import NotifySection
from argusrl.storage.layout import RunFolder

NOTICE = Notice(
    run="maze", kind="fault", text="the head is lost", key="head_lost:2", values={"submission": 2, "step": 7}
)
TOPIC = "arn:aws:sns:us-west-2:111122223333:argusrl"


@pytest.fixture
def receiver():
    """A web server that answers as `server.answers` says, and remembers what it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    yield server
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_notice_as_json(receiver):
    Webhook(receiver.url)(NOTICE)
    (body,) = receiver.got
    assert body["run"] == "maze"
    assert (body["submission"], body["step"]) == (2, 7)
    assert body["text"] == "argusrl maze: fault: the head is lost"


@pytest.mark.parametrize(("status", "final"), [(500, False), (503, False), (429, False), (404, True), (302, True)])
def test_whether_trying_again_helps(receiver, status, final):
    receiver.answers = [status]
    with pytest.raises(NotDelivered) as caught:
        Webhook(receiver.url)(NOTICE)
    assert caught.value.final == final


def test_what_is_said_about_a_failure_does_not_hold_the_url():
    with pytest.raises(NotDelivered) as caught:
        Webhook("http://127.0.0.1:9/secret-token")(NOTICE)
    assert "secret" not in str(caught.value)


def test_a_topic_gets_it_too(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    client = boto3.client("sns", region_name="us-west-2")
    message = json.dumps(body_of(NOTICE), indent=1)
    with Stubber(client) as stub:
        expected = {"TopicArn": TOPIC, "Subject": "argusrl maze: fault", "Message": message}
        stub.add_response("publish", {"MessageId": "1"}, expected)
        stub.add_client_error("publish", "AuthorizationError", "no")
        stub.add_client_error("publish", "InternalError", "later")
        Topic(TOPIC, client)(NOTICE)
        for final in (True, False):
            with pytest.raises(NotDelivered) as caught:
                Topic(TOPIC, client)(NOTICE)
            assert caught.value.final == final


class TestChannel:
    def test_tries_again_and_waits_longer_each_time(self):
        tries, waits = [], []

        def deliver(notice):
            tries.append(notice)
            if len(tries) < 4:
                raise NotDelivered("not yet")

        channel = Channel(deliver, sleep=waits.append)
        channel.send(NOTICE)
        channel.close()
        assert len(tries) == 4
        assert waits == [1.0, 2.0, 4.0]

    def test_gives_up_and_says_so(self):
        lost = []

        def deliver(notice):
            raise NotDelivered("HTTP 404", final=True)

        channel = Channel(deliver, lost.append)
        channel.send(NOTICE)
        channel.close()
        assert lost == ["fault of maze was not delivered: HTTP 404"]

    def test_nobody_waits_for_a_receiver_that_hangs(self):
        release = threading.Event()
        channel = Channel(lambda notice: release.wait(10) and None)
        for _ in range(2000):
            channel.send(NOTICE)
        release.set()
        channel.close()


def test_a_recipe_names_channels_by_reference(monkeypatch, receiver):
    monkeypatch.setenv("HOOK", receiver.url)
    (channel,) = channels(NotifySection(webhook="env:HOOK"), lambda text: None)
    channel.send(NOTICE)
    channel.close()
    assert len(receiver.got) == 1
    assert channels(NotifySection(), lambda text: None) == []


def test_a_channel_that_cannot_be_opened_leaves_the_other_one(monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    lost = []
    (channel,) = channels(NotifySection(webhook="env:HOOK", sns_topic=TOPIC), lost.append)
    channel.close()
    assert len(lost) == 1
    assert "env:HOOK" in lost[0]


class TestNotices:
    def test_one_key_is_told_once_by_all_controllers(self, tmp_path):
        run = RunFolder(tmp_path / "maze")
        sent = []

        class Hears:
            def send(self, notice):
                sent.append(notice)

        assert Notices(run).tell_once([Hears()], NOTICE)
        assert not Notices(run).tell_once([Hears()], NOTICE)
        assert len(sent) == 1

    def test_storage_that_is_away_does_not_make_it_repeat(self, tmp_path):
        (tmp_path / "file").write_text("")
        notices, sent = Notices(RunFolder(tmp_path / "file" / "maze")), []

        class Hears:
            def send(self, notice):
                sent.append(notice)

        for _ in range(3):
            notices.tell_once([Hears()], NOTICE)
        assert len(sent) == 1


def rows(*rewards):
    return [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]


class TestRewardCollapse:
    def test_a_run_that_lost_what_it_had_learnt(self):
        step, text = reward_collapse(rows(*[0.1] * 5, *[0.8] * 10, *[0.1] * 8))
        assert 10 <= step <= 15
        assert "fell from 0.800" in text

    @pytest.mark.parametrize(
        "rewards",
        [
            [],
            [0.1] * 5,
            [0.1] * 40,
            [index / 40 for index in range(40)],
            [0.1] * 5 + [0.8] * 10 + [0.1] * 3,  # a dip
            [0.1] * 5 + [0.8] * 10 + [0.6] * 10,  # more than half is left
            [0.5, 0.1] * 20,  # noise
        ],
        ids=["nothing", "short", "flat", "rising", "dip", "partly", "noise"],
    )
    def test_others_did_not(self, rewards):
        assert reward_collapse(rows(*rewards)) is None

    def test_numbers_that_are_none_are_left_out(self):
        found = [*rows(*[0.1] * 5, *[0.8] * 10, *[0.1] * 8), {"step": 99, "reward/mean": "NaN"}, {"time": 1}]
        assert reward_collapse(found) is not None
