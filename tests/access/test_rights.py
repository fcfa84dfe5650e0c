"""Each act needs the same rights by every way there is to it.

ACTS is the table: an act, the ways to it, the rights it needs. Each way is tried by a user with
exactly these rights, which works, and by one for each right who has all but that one, which is
refused: by AMQP with 403, by HTTP with 401. Names are new ones for each try: @n stands for its
number, V in a path for the vhost.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Confirm, Connection, Exchange, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, method, with_properties
from tests.support.real_broker import RealBroker

VHOST = "rights"
PASSWORD = "p"  # of users made only here
# judged quickly
HASH = base64.b64encode(b"salt" + hashlib.sha256(b"salt" + PASSWORD.encode()).digest()).decode()
_numbers = itertools.count(1)

ADMIN = ("guest", "guest")
OK, BAD_REQUEST, REFUSED, UNAUTHORISED, NOT_ALLOWED = 0, 400, 403, 401, 530
RIGHTS = ("configure", "write", "read")
TOPIC_RIGHTS = {"topic write": "write", "topic read": "read"}
ALL_TAGS = ("management", "policymaker", "monitoring", "administrator")
# Who may do what the tag is for.
ENOUGH = {
    "management": ALL_TAGS,
    "policymaker": ("policymaker", "administrator"),
    "monitoring": ("monitoring", "administrator"),
    "administrator": ("administrator",),
}


class Amqp(NamedTuple):
    """Methods sent one behind the other on one channel; the answer to the last is waited for."""

    says: tuple[Any, ...]
    answer: type[base.Frame]


class Http(NamedTuple):
    how: str
    path: str
    body: Any = None
    refused: int = UNAUTHORISED  # without one of the rights, as RabbitMQ answers


class Message(NamedTuple):
    """A publish with confirms."""

    exchange: str
    key: str
    headers: dict[str, Any]


class Act(NamedTuple):
    """An act, the ways to do it, and the rights that it needs.

    `needs` has pairs (right, name), or ("topic write" or "topic read", exchange, key). `tag` is the
    tag that HTTP asks for beside management.
    """

    name: str
    ways: tuple[Amqp | Http, ...]
    needs: tuple[tuple[str, ...], ...] = ()
    before: tuple[Http, ...] = ()  # by an administrator
    tag: str = "management"
    entry: bool = True  # some permission in the vhost is needed, whatever it says


def amqp(*says: Any, answer: type[base.Frame]) -> Amqp:
    return Amqp(says, answer)


def put_queue(name: str, **arguments: Any) -> Http:
    return Http("PUT", f"queues/V/{name}", {"durable": True, "arguments": arguments})


def put_exchange(name: str, type: str = "direct", **more: Any) -> Http:
    return Http("PUT", f"exchanges/V/{name}", {"type": type, **more})


def declare_queue(name: str, **arguments: Any) -> Amqp:
    return amqp(Queue.Declare(0, name, durable=True, arguments=arguments), answer=Queue.DeclareOk)


def declare_exchange(name: str, type: str = "direct", **arguments: Any) -> Amqp:
    return amqp(
        Exchange.Declare(0, name, type, durable=True, arguments=arguments),
        answer=Exchange.DeclareOk,
    )


def published(exchange: str, key: str, **headers: Any) -> tuple[Amqp, Http]:
    body = {
        "routing_key": key,
        "properties": {"headers": headers},
        "payload": "x",
        "payload_encoding": "string",
    }
    return (
        amqp(Confirm.Select(), Message(exchange, key, headers), answer=Basic.Ack),
        Http("POST", f"exchanges/V/{exchange or 'amq.default'}/publish", body, BAD_REQUEST),
    )


def row() -> bytes:
    """Return an Arrow stream of one message."""
    out = io.BytesIO()
    batch = pa.record_batch({"value": [b"x"]})
    with pa.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    return out.getvalue()


DLX, AE = "x-dead-letter-exchange", "alternate-exchange"
POLICY = {"pattern": "^nothing@n$", "definition": {"max-length": 1}}
# Policies that name an exchange need the tag alone, as in RabbitMQ.
DLX_POLICY = {"pattern": "^nothing@n$", "definition": {"dead-letter-exchange": "other@n"}}
QUEUE, EXCHANGE, OTHER, TOPIC = (
    put_queue("q@n"),
    put_exchange("x@n"),
    put_exchange("y@n"),
    put_exchange("t@n", "topic"),
)
MESSAGE = Http("POST", "exchanges/V/amq.default/publish", {
    "routing_key": "q@n", "properties": {}, "payload": "x",
    "payload_encoding": "string"})  # fmt: skip
BOUND = Http("POST", "bindings/V/e/x@n/q/q@n", {"routing_key": "k"})
STREAM_EXCHANGE = put_exchange("x@n", "x-modulus-hash", arguments={"x-shards": 2})
STREAMS = {"x-super-stream": True, "x-shard-arguments": {"x-queue-type": "stream"}}
SHARD_DLX = {"x-shards": 2, "x-shard-arguments": {DLX: "y@n"}}

ACTS = [
    Act("declare a queue", (declare_queue("q@n"), QUEUE), (("configure", "q@n"),)),
    Act(
        "declare a queue with a dead-letter exchange",
        (declare_queue("q@n", **{DLX: "y@n"}), put_queue("q@n", **{DLX: "y@n"})),
        (("configure", "q@n"), ("read", "q@n"), ("write", "y@n")),
    ),
    Act(
        "declare a queue whose dead letters go to the default exchange",
        (declare_queue("q@n", **{DLX: ""}), put_queue("q@n", **{DLX: ""})),
        (("configure", "q@n"), ("read", "q@n"), ("write", "amq.default")),
    ),
    Act("declare an exchange", (declare_exchange("x@n"), EXCHANGE), (("configure", "x@n"),)),
    Act(
        "declare an exchange with an alternate exchange",
        (declare_exchange("x@n", **{AE: "y@n"}), put_exchange("x@n", arguments={AE: "y@n"})),
        (("configure", "x@n"), ("read", "x@n"), ("write", "y@n")),
    ),
    Act(
        "declare a stream exchange whose queues have a dead-letter exchange",
        (
            declare_exchange("x@n", "x-modulus-hash", **SHARD_DLX),
            put_exchange("x@n", "x-modulus-hash", arguments=SHARD_DLX),
        ),
        (("configure", "x@n"), ("read", "x@n"), ("write", "y@n")),
    ),
    Act(
        "declare an exchange with names for shard queues that a policy may give it",
        (
            declare_exchange("x@n", **{"x-shard-arguments": {DLX: "y@n"}}),
            put_exchange("x@n", arguments={"x-shard-arguments": {DLX: "y@n"}}),
        ),
        (("configure", "x@n"), ("read", "x@n"), ("write", "y@n")),
    ),
    Act(
        "delete a queue",
        (amqp(Queue.Delete(0, "q@n"), answer=Queue.DeleteOk), Http("DELETE", "queues/V/q@n")),
        (("configure", "q@n"),),
        (QUEUE,),
    ),
    Act(
        "delete an exchange",
        (amqp(Exchange.Delete(0, "x@n"), answer=Exchange.DeleteOk),
         Http("DELETE", "exchanges/V/x@n")),
        (("configure", "x@n"),),
        (EXCHANGE,),
    ),
    Act(
        "bind a queue",
        (
            amqp(Queue.Bind(0, "q@n", "x@n", "k"), answer=Queue.BindOk),
            amqp(*(Queue.Bind(0, "q@n", "x@n", f"k{at}", nowait=True) for at in range(3)),
                 Queue.Bind(0, "q@n", "x@n", "k"), answer=Queue.BindOk),
            BOUND,
        ),
        (("write", "q@n"), ("read", "x@n")),
        (QUEUE, EXCHANGE),
    ),
    Act(
        "bind a queue to a topic exchange",
        (
            amqp(Queue.Bind(0, "q@n", "t@n", "k"), answer=Queue.BindOk),
            Http("POST", "bindings/V/e/t@n/q/q@n", {"routing_key": "k"}),
        ),
        (("write", "q@n"), ("read", "t@n"), ("topic read", "t@n", "k")),
        (QUEUE, TOPIC),
    ),
    Act(
        "unbind a queue from a topic exchange",
        (
            amqp(Queue.Unbind(0, "q@n", "t@n", "k"), answer=Queue.UnbindOk),
            Http("DELETE", "bindings/V/e/t@n/q/q@n/k"),
        ),
        (("write", "q@n"), ("read", "t@n"), ("topic read", "t@n", "k")),
        (QUEUE, TOPIC, Http("POST", "bindings/V/e/t@n/q/q@n", {"routing_key": "k"})),
    ),
    Act(
        "bind an exchange to a topic exchange",
        (
            amqp(Exchange.Bind(0, "y@n", "t@n", "k"), answer=Exchange.BindOk),
            Http("POST", "bindings/V/e/t@n/e/y@n", {"routing_key": "k"}),
        ),
        (("write", "y@n"), ("read", "t@n"), ("topic read", "t@n", "k")),
        (OTHER, TOPIC),
    ),
    Act(
        "unbind an exchange",
        (
            amqp(Exchange.Unbind(0, "y@n", "x@n", "k"), answer=Exchange.UnbindOk),
            Http("DELETE", "bindings/V/e/x@n/e/y@n/k"),
        ),
        (("write", "y@n"), ("read", "x@n")),
        (OTHER, EXCHANGE, Http("POST", "bindings/V/e/x@n/e/y@n", {"routing_key": "k"})),
    ),
    Act("publish", published("x@n", "k"), (("write", "x@n"),), (EXCHANGE,)),
    Act("publish to the default exchange", published("", "q@n"), (("write", "amq.default"),),
        (QUEUE,)),
    Act(
        "publish to a topic exchange",
        (*published("t@n", "k"),
         Http("POST", "exchanges/V/t@n/arrow?routing_key=k&mandatory=false", row())),
        (("write", "t@n"), ("topic write", "t@n", "k")),
        (TOPIC,),
    ),
    *(
        Act(
            f"publish with keys in {header}",
            published("t@n", "k", **{header: ["more", "third"]}),
            (("write", "t@n"), *(("topic write", "t@n", key) for key in ("k", "more", "third"))),
            (TOPIC,),
        )
        for header in ("CC", "BCC")
    ),
    Act(
        "publish what names an exchange for its dead letter",
        published("x@n", "k", **{DLX: "y@n"}),
        (("write", "x@n"), ("write", "y@n")),
        (EXCHANGE, OTHER),
    ),
    Act(
        "publish what names a topic exchange for its dead letter",
        published("x@n", "k", **{DLX: "t@n", "BCC": ["more"]}),
        (("write", "x@n"), ("write", "t@n"), ("topic write", "t@n", "k"),
         ("topic write", "t@n", "more")),
        (EXCHANGE, TOPIC),
    ),
    Act(
        "publish what names a topic exchange and a key for its dead letter",
        published("x@n", "k", **{DLX: "t@n", "x-dead-letter-routing-key": "dead"}),
        (("write", "x@n"), ("write", "t@n"), ("topic write", "t@n", "dead")),
        (EXCHANGE, TOPIC),
    ),
    Act(
        "have messages of a queue",
        (
            amqp(Basic.Consume(0, "q@n", "tag"), answer=Basic.ConsumeOk),
            amqp(Basic.Get(0, "q@n"), answer=Basic.GetEmpty),
            Http("POST", "queues/V/q@n/get",
                 {"ackmode": "ack_requeue_true", "count": 1, "encoding": "auto"}),
        ),
        (("read", "q@n"),),
        (QUEUE,),
    ),
    Act(
        "purge a queue",
        (amqp(Queue.Purge(0, "q@n"), answer=Queue.PurgeOk),
         Http("DELETE", "queues/V/q@n/contents")),
        (("read", "q@n"),),
        (QUEUE,),
    ),
    Act(
        "move messages to another queue",
        (Http("POST", "queues/V/q@n/move", {"destination": "p@n"}),),
        (("read", "q@n"), ("write", "amq.default")),
        (QUEUE, put_queue("p@n"), MESSAGE),
    ),
    Act(
        "pause and resume a queue",
        (Http("PUT", "queues/V/q@n/pause"), Http("PUT", "queues/V/q@n/resume")),
        (("configure", "q@n"),),
        (QUEUE,),
    ),
    Act(
        "have messages of a stream exchange",
        (
            amqp(Basic.Qos(prefetch_count=5), Basic.Consume(0, "x@n", "tag"),
                 answer=Basic.ConsumeOk),
            Http("GET", "streams/V/x@n"),
            Http("GET", "streams/V/x@n/0/arrow"),
            Http("GET", "streams/V/x@n/offset-for-time?timestamp=0"),
            Http("GET", "streams/V/x@n/groups"),
            Http("PUT", "streams/V/x@n/groups/g", {"shards": {}}),
            Http("DELETE", "streams/V/x@n/groups/g"),
        ),
        (("read", "x@n"),),
        (put_exchange("x@n", arguments=STREAMS),),
    ),
    Act(
        "read a stream",
        (
            amqp(Basic.Qos(prefetch_count=5), Basic.Consume(0, "q@n", "tag"),
                 answer=Basic.ConsumeOk),
            Http("POST", "queues/V/q@n/stream", {"offset": 0, "count": 1}),
            Http("GET", "streams/V/q@n/0/arrow"),
        ),
        (("read", "q@n"),),
        (put_queue("q@n", **{"x-queue-type": "stream"}), MESSAGE),
    ),
    Act(
        "purge a stream exchange",
        (amqp(Queue.Purge(0, "x@n"), answer=Queue.PurgeOk),
         Http("DELETE", "virtual-queues/V/x@n/contents")),
        (("read", "x@n"),),
        (STREAM_EXCHANGE,),
    ),
    Act(
        "delete the queues of a stream exchange",
        (amqp(Queue.Delete(0, "x@n"), answer=Queue.DeleteOk),
         Http("DELETE", "virtual-queues/V/x@n")),
        (("configure", "x@n"),),
        (STREAM_EXCHANGE,),
    ),
    Act(
        "test whether the broker is alive",
        (Http("GET", "aliveness-test/V"),),
        (("configure", "aliveness-test"), ("write", "amq.default"), ("read", "aliveness-test")),
    ),
    # Rows that ask for a tag; administrators need no permission in the vhost.
    Act("set a policy", (Http("PUT", "policies/V/p@n", POLICY),), tag="policymaker"),
    Act("set a policy with a dead-letter exchange", (Http("PUT", "policies/V/p@n", DLX_POLICY),),
        tag="policymaker"),
    Act(
        "delete a policy",
        (Http("DELETE", "policies/V/p@n"),),
        (),
        (Http("PUT", "policies/V/p@n", POLICY),),
        "policymaker",
    ),
    Act(
        "set an operator policy",
        (
            Http("PUT", "operator-policies/V/p@n", POLICY),
            Http("PUT", "parameters/operator_policy/V/p@n", {"value": POLICY}),
        ),
        tag="administrator",
    ),
    Act(
        "delete an operator policy",
        (Http("DELETE", "operator-policies/V/p@n"),
         Http("DELETE", "parameters/operator_policy/V/p@n")),
        (),
        (Http("PUT", "operator-policies/V/p@n", POLICY),),
        "administrator",
    ),
    Act(
        "set a limit of a vhost",
        (
            Http("PUT", "vhost-limits/V/max-queues", {"value": 100000}),
            Http("PUT", "parameters/vhost-limits/V/limits", {"value": {"max-queues": 100000}}),
        ),
        tag="administrator",
    ),
    Act(
        "delete a limit of a vhost",
        (Http("DELETE", "vhost-limits/V/max-queues"),
         Http("DELETE", "parameters/vhost-limits/V/limits")),
        (),
        (Http("PUT", "vhost-limits/V/max-queues", {"value": 100000}),),
        "administrator",
    ),
    Act(
        "set a limit of a user",
        (
            Http("PUT", "user-limits/guest/max-channels", {"value": 100000}),
            Http("PUT", "parameters/user-limits/V/guest", {"value": {"max-channels": 100000}}),
        ),
        tag="administrator",
        entry=False,
    ),
    Act(
        "set the parameter of a shovel or federation",
        tuple(
            Http("PUT", f"parameters/{kind}/V/s@n", {"value": value})
            for kind, value in (
                ("shovel", {"src-uri": "amqp://a", "src-queue": "q", "dest-uri": "amqp://a"}),
                ("federation-upstream", {"uri": "amqp://"}),
            )
        ),
        tag="policymaker",
    ),
    Act(
        "set the number of shards of a stream exchange",
        (
            Http("PUT", "exchanges/V/x@n/shards", {"number": 3}),
            Http("PUT", "parameters/shards/V/x@n", {"value": {"shards-per-node": 3}}),
        ),
        (),
        (STREAM_EXCHANGE,),
        "policymaker",
    ),
    Act(
        "set a global parameter",
        (Http("PUT", "global-parameters/g@n", {"value": 1}),),
        tag="policymaker",
        entry=False,
    ),
    Act(
        "name the broker",
        (
            Http("PUT", "cluster-name", {"name": "c@n"}),
            Http("PUT", "global-parameters/cluster_name", {"value": "c@n"}),
        ),
        tag="administrator",
        entry=False,
    ),
    Act(
        "act on a queue's mirrors",
        (Http("POST", "queues/V/q@n/actions", {"action": "sync"}),),
        (),
        (QUEUE,),
        "administrator",
    ),
    Act(
        "import definitions",
        (
            Http("POST", "definitions", {"queues": [{"name": "i@n", "vhost": VHOST}]}),
            Http("POST", "definitions/V",
                 {"queues": [{"name": "i@n", "arguments": {DLX: "foreign"}}]}),
        ),
        tag="administrator",
        entry=False,
    ),
    Act(
        "say who may do what",
        (
            Http("PUT", "users/u@n", {"tags": "", "password_hash": ""}),
            Http("PUT", "permissions/V/guest", {"configure": ".*", "write": ".*", "read": ".*"}),
            Http("PUT", "topic-permissions/V/guest",
                 {"exchange": "none", "write": ".*", "read": ".*"}),
            Http("PUT", "vhosts/v@n", {}),
        ),
        tag="administrator",
        entry=False,
    ),
]  # fmt: skip

WAYS = [(act, way) for act in ACTS for way in act.ways]
IDS = [f"{act.name} by "
       f"{way.says[-1].name if isinstance(way.says[-1], base.Frame) else 'Basic.Publish'}"
       if isinstance(way, Amqp) else f"{act.name} by {way.how} {way.path}"
       for act, way in WAYS]  # fmt: skip


class Broker:
    """The broker with one user whose rights change from try to try."""

    def __init__(self, real: RealBroker) -> None:
        self.real = real
        self.number = 0
        self.user = ""

    def begin(
        self, act: Act, needs: tuple[tuple[str, ...], ...], tag: str, entry: bool = True
    ) -> None:
        """Prepare an act with new names.

        Create what the act needs, and a user with these rights and no others.
        """
        self.number = next(_numbers)
        self.user = f"u-rights-{self.number}"
        for call in act.before:
            assert self.call(call, ADMIN) < 300, call
        body = {
            "tags": tag,
            "password_hash": HASH,
            "hashing_algorithm": "rabbit_password_hashing_sha256",
        }
        assert self.call(Http("PUT", f"users/{self.user}", body), ADMIN) < 300
        if entry:
            rights = {
                right: one_of(need[1] for need in needs if need[0] == right) for right in RIGHTS
            }
            assert (
                self.call(Http("PUT", f"permissions/V/{self.user}", self.named(rights)), ADMIN)
                < 300
            )
        for exchange in {need[1] for need in act.needs if need[0] in TOPIC_RIGHTS}:
            keys = {
                right: one_of(need[2] for need in needs if need[0] == said)
                for said, right in TOPIC_RIGHTS.items()
            }
            body = self.named({"exchange": exchange, **keys})
            assert self.call(Http("PUT", f"topic-permissions/V/{self.user}", body), ADMIN) < 300

    def named(self, value: Any) -> Any:
        return json.loads(json.dumps(value).replace("@n", str(self.number)))

    def attempt(self, way: Amqp | Http) -> int:
        """0 when it is done, else the code of the refusal."""
        if isinstance(way, Http):
            status = self.call(way, (self.user, PASSWORD))
            return OK if status < 300 else status
        with RawClient(self.real.port) as client:
            try:
                client.shake_hands(user=self.user, password=PASSWORD, vhost=VHOST)
            except AssertionError as error:
                assert "NOT_ALLOWED" in str(error), error
                return NOT_ALLOWED
            for says in way.says:
                if isinstance(says, Message):
                    exchange, key, headers = self.named(list(says))
                    client.send(with_properties(1, exchange, key, b"x", headers=headers))
                else:
                    client.send(method(1, self._with_names(says)))
            while True:
                read = client.read()
                assert read is not None, "hung up"
                if isinstance(read[1], Channel.Close | Connection.Close):
                    return int(read[1].reply_code)
                if isinstance(read[1], way.answer):
                    return OK

    def _with_names(self, says: base.Frame) -> base.Frame:
        made = type(says)()
        for name in says.attributes():
            value = getattr(says, name)
            setattr(made, name, self.named(value) if isinstance(value, str | dict) else value)
        return made

    def call(self, way: Http, login: tuple[str, str]) -> int:
        path = self.named(way.path).replace("/V", f"/{VHOST}", 1)
        data = way.body
        if data is not None and not isinstance(data, bytes):
            data = json.dumps(self.named(data)).encode()
        request = urllib.request.Request(
            f"http://{self.real.http}/api/{path}", data, method=way.how
        )
        request.add_header(
            "Authorization", "Basic " + base64.b64encode(":".join(login).encode()).decode()
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())
            if error.code == UNAUTHORISED:
                assert said["error"] == "not_authorised", "not refused for its login"
            if error.code == BAD_REQUEST:
                assert said["reason"].startswith("403 ACCESS_REFUSED"), said
            return error.code


def one_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches these names and no others."""
    found = [name.replace(".", r"\.") for name in names]
    return f"^({'|'.join(found)})$" if found else ""


@pytest.fixture(scope="module")
def tried(broker: RealBroker) -> Iterator[Broker]:
    made = Broker(broker)
    assert made.call(Http("PUT", f"vhosts/{VHOST}", {}), ADMIN) < 300
    yield made
    assert made.call(Http("DELETE", f"vhosts/{VHOST}"), ADMIN) == 204


@pytest.mark.row("I1", "I4", "I5", "I7")
@pytest.mark.parametrize(("act", "way"), WAYS, ids=IDS)
def test_an_act_is_done_with_its_rights_and_refused_without_any_one_of_them(
    tried: Broker, act: Act, way: Amqp | Http
) -> None:
    refused = REFUSED if isinstance(way, Amqp) else way.refused
    tag = act.tag if isinstance(way, Http) else ""
    tried.begin(act, act.needs, tag)
    assert tried.attempt(way) == OK
    for missing in act.needs:
        tried.begin(act, tuple(need for need in act.needs if need != missing), tag)
        assert tried.attempt(way) == refused, f"without {missing}"
    if isinstance(way, Http):
        for less in ("", *(other for other in ALL_TAGS if other not in ENOUGH[act.tag])):
            tried.begin(act, act.needs, less)
            assert tried.attempt(way) == UNAUTHORISED, f"with the tag '{less}'"
    if act.entry and (act.needs or act.tag == "policymaker"):
        tried.begin(act, (), tag, entry=False)
        assert tried.attempt(way) == (NOT_ALLOWED if isinstance(way, Amqp) else UNAUTHORISED), (
            "outside the vhost"
        )


@pytest.mark.row("I1")
@pytest.mark.parametrize(
    "act",
    [act for act in ACTS if act.tag in ("policymaker", "administrator")],
    ids=lambda act: act.name,
)
def test_administrators_set_what_tags_are_for_in_every_vhost(tried: Broker, act: Act) -> None:
    for way in act.ways:
        tried.begin(act, (), "administrator", entry=False)
        assert tried.attempt(way) == OK


@pytest.mark.parametrize("right", ["configure", "write", "read"])
def test_a_right_to_some_names_is_none_to_others(tried: Broker, right: str) -> None:
    """The table would notice: with the right to another name each way that needs it is refused."""
    for act, way in WAYS:
        wanted = [need for need in act.needs if need[0] == right]
        if not wanted or isinstance(way, Http):
            continue
        tried.begin(
            act,
            tuple((right, "elsewhere@n") if need == wanted[0] else need for need in act.needs),
            "",
        )
        assert tried.attempt(way) == REFUSED, act.name


@pytest.mark.row("I4")
def test_line_breaks_that_fall_out_of_a_name_do_not_change_who_may_have_it(tried: Broker) -> None:
    act = Act(
        "declare a queue with a name read from a file", (Http("PUT", "queues/V/sec%0Aret@n", {}),)
    )
    tried.begin(act, (), "management")
    everything_else = {"configure": "^(?!secret)", "write": "", "read": ""}
    assert tried.call(Http("PUT", f"permissions/V/{tried.user}", everything_else), ADMIN) == 204
    assert tried.attempt(act.ways[0]) == UNAUTHORISED
    assert tried.attempt(Http("PUT", "queues/V/open%0A@n", {})) == OK


def test_an_exclusive_queue_is_its_connections_by_http_too(tried: Broker, api: Api) -> None:
    queue = f"exclusive-{next(_numbers)}"
    with RawClient(tried.real.port) as client:
        client.shake_hands(vhost=VHOST)
        client.ask(1, Queue.Declare(0, queue, exclusive=True), Queue.DeclareOk)
        client.send(with_properties(1, "", queue, b"x"))
        assert (
            client.ask(1, Queue.Declare(0, queue, passive=True), Queue.DeclareOk).message_count == 1
        )
        path = f"/api/queues/{VHOST}/{queue}"
        get = {"ackmode": "ack_requeue_false", "count": 1, "encoding": "auto"}
        for how, act, body in (
            ("DELETE", "/contents", None),
            ("PUT", "/pause", None),
            ("PUT", "/resume", None),
            ("DELETE", "", None),
            ("POST", "/get", get),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                api(path + act, method=how, body=body)
            assert refused.value.code == BAD_REQUEST
            assert (
                "cannot obtain exclusive access to locked queue"
                in json.loads(refused.value.read())["reason"]
            )
        assert (
            client.ask(1, Queue.Declare(0, queue, passive=True), Queue.DeclareOk).message_count == 1
        )


def test_what_is_imported_into_a_vhost_is_made_in_that_vhost(tried: Broker, api: Api) -> None:
    queue = f"imported-{next(_numbers)}"
    policy = {"name": queue, "vhost": "/", "pattern": "^none$", "definition": {"max-length": 1}}
    document = {"queues": [{"name": queue, "vhost": "/"}], "policies": [policy]}
    api(f"/api/definitions/{VHOST}", method="POST", body=document)
    for kind in ("queues", "policies"):
        assert api(f"/api/{kind}/{VHOST}/{queue}")["vhost"] == VHOST
        with pytest.raises(urllib.error.HTTPError) as missing:
            api(f"/api/{kind}/%2F/{queue}")
        assert missing.value.code == 404
