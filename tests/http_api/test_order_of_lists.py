"""Lists come in the order of vhosts and names, as RabbitMQ sorts them, whatever was made first."""

from __future__ import annotations

import pytest

from tests.http_api.conftest import Api
from tests.http_api.test_api import QUICK_HASH

NAMES = ("zz", "mm", "aa")


@pytest.mark.row("G1.7", "G1.11", "G1.19", "G1.21", "G1.22", "G1.23", "G1.25", "G1.26")
@pytest.mark.parametrize(
    ("path", "column"),
    [
        ("vhosts", "name"),
        ("users", "name"),
        ("users/without-permissions", "name"),
        ("permissions", "vhost"),
        ("exchanges", "name"),
        ("exchanges/%2F", "name"),
        ("queues/%2F", "name"),
        ("policies", "name"),
        ("operator-policies", "name"),
        ("parameters/federation-upstream", "name"),
        ("global-parameters", "name"),
        ("vhost-limits", "vhost"),
        ("user-limits", "user"),
        ("topic-permissions", "user"),
    ],
    ids=lambda value: value.replace("%2F", "of-vhost"),
)
async def test_a_list_is_sorted_by_name(api: Api, path: str, column: str) -> None:
    for name in NAMES:
        for put, body in (
            (f"vhosts/{name}", {}),
            (f"users/{name}", {"password": "x", "tags": "", **QUICK_HASH}),
            (f"exchanges/%2F/{name}", {"type": "fanout"}),
            (f"queues/%2F/{name}", {}),
            (f"policies/%2F/{name}", {"pattern": "^z", "definition": {"max-length": 3}}),
            (f"operator-policies/%2F/{name}", {"pattern": "^z", "definition": {"max-length": 3}}),
            (f"parameters/federation-upstream/%2F/{name}", {"value": {"uri": "amqp://"}}),
            (f"global-parameters/{name}", {"value": 1}),
            (f"vhost-limits/{name}/max-queues", {"value": 1}),
            (f"user-limits/{name}/max-channels", {"value": 1}),
            (f"topic-permissions/%2F/{name}", {"exchange": "e", "write": "", "read": ""}),
        ):
            assert (await api.call("PUT", f"/api/{put}", body))[0] in (201, 204), put
    for query, order in (("", NAMES[::-1]), ("?sort_reverse=true&page=1&page_size=500", NAMES)):
        status, found = await api.call("GET", f"/api/{path}{query}")
        assert status == 200, found
        rows = found["items"] if query else found
        assert [row[column] for row in rows if row[column] in NAMES] == [*order], query
