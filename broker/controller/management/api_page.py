"""/api/index.html: the description of the API, /api/openapi.json, for people to read.

The page is made once, at the start. It has no script, needs no login, and is served under the
policy of the page at /ui/, whose sheets it uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from shardmq.broker.controller.management import page

INDEX: Final = "/api/index.html"
# Paths at which RabbitMQ leads to this page, and the way from each to it.
LEADING_HERE: Final = {
    "/api": "api/index.html",
    "/api/": "index.html",
    "/stats": "api/index.html",
    "/doc/stats.html": "../api/index.html",
}
HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="../ui/mark.svg">
<link rel="stylesheet" href="../ui/style.css">
<link rel="stylesheet" href="../ui/api.css">
</head>
<body class="api">
<main>
<h1>{title}</h1>
<p class="lead">{about}</p>
<p class="lead">Version {version}. The same for programs: <a href="openapi.json">openapi.json</a>.
Back to <a href="../ui/">the page</a>.</p>
"""
INTRODUCTION: Final = """<h2>How to call it</h2>
<p>Log in with a name and a password (HTTP Basic). Send and expect JSON. For example:</p>
<pre>curl -u guest:guest localhost:15672/api/queues/%2F/orders
curl -u guest:guest -X PUT localhost:15672/api/queues/%2F/orders -d '{"durable": true}'</pre>
<p>Lists take <code>page</code>, <code>page_size</code>, <code>name</code>, <code>use_regex</code>,
<code>sort</code>, <code>sort_reverse</code> and <code>columns</code>. A call that is refused
has the status 4xx and a body with <code>error</code> and <code>reason</code>:</p>
"""
BACKTICKS: Final = re.compile(r"`([^`]+)`")
Schema = dict[str, Any]


def file_of(description: Schema) -> page.StaticFile:
    return page.static_file(html(description).encode(), ".html")


def add_redirects(app: web.Application) -> None:
    async def lead(request: web.Request) -> web.Response:
        return web.Response(status=301, headers={"Location": LEADING_HERE[request.path]})

    for path in LEADING_HERE:
        app.router.add_get(path, lead)


def html(description: Schema) -> str:
    """Return an OpenAPI description as a document of HTML."""
    info, schemas = description["info"], description["components"]["schemas"]
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append((method, path, operation))
    head = HEAD.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        about=_prose(info["description"]),
    )
    tags = sorted(by_tag)
    parts = [head, INTRODUCTION]
    errors = description["components"]["responses"]
    parts += _table("Statuses", ("status", "meaning"), (
        (code, _prose(error["description"])) for code, error in errors.items()
    ))  # fmt: skip
    parts.append('<nav aria-label="Subjects"><h2>Subjects</h2><ul>')
    parts += (f'<li><a href="#{quote(tag)}">{escape(tag)}</a></li>' for tag in tags)
    parts.append("</ul></nav>")
    for tag in tags:
        parts.append(f'<section><h2 id="{quote(tag)}">{escape(tag)}</h2>')
        for method, path, operation in by_tag[tag]:
            parts += _operation(method, path, operation, schemas)
        parts.append("</section>")
    parts.append("</main></body></html>")
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Schema, schemas: Schema) -> Iterator[str]:
    yield (
        f'<details><summary><b class="method">{method.upper()}</b> <code>{escape(path)}</code> '
        f"<span>{_prose(_summary(operation))}</span></summary>"
    )
    yield f"<p>{_prose(operation['description'])}</p>"
    yield from _table("Parameters", ("name", "in", "values"), (
        (f"<code>{escape(one['name'])}</code>", one["in"], _values(one["schema"], schemas))
        for one in operation["parameters"]
    ))  # fmt: skip
    body = operation.get("requestBody")
    if body is not None:
        yield from _fields("Body", body["content"]["application/json"]["schema"], schemas)
    for code, answer in operation["responses"].items():
        if "$ref" not in answer:
            yield f"<p><b>{code}</b>: {_prose(answer['description'])}</p>"
            for content in answer.get("content", {}).values():
                yield from _fields(f"Fields of {code}", content.get("schema", {}), schemas)
    yield "</details>"


def _prose(text: str) -> str:
    """Return a sentence as HTML; what is between backticks is code."""
    return BACKTICKS.sub(r"<code>\1</code>", escape(text))


def _summary(operation: Schema) -> str:
    """Return the summary, or "" if it only repeats method and path."""
    summary: str = operation["summary"]
    return "" if summary == operation["operationId"] else summary


def _fields(title: str, schema: Schema, schemas: Schema) -> Iterable[str]:
    """Yield a table of the properties of an object, or of the objects in a list."""
    schema = _resolved(schema, schemas)
    for rows in (*schema.get("anyOf", ()), schema):
        if "items" in rows and rows.get("type") == "array":
            schema = _resolved(rows["items"], schemas)
            break
    required = schema.get("required", ())
    return _table(title, ("name", "values"), (
        (f"<code>{escape(name)}</code>{' (required)' if name in required else ''}",
         _values(about, schemas))
        for name, about in schema.get("properties", {}).items()
    ))  # fmt: skip


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = schemas[schema["$ref"].rpartition("/")[2]]
    return found


def _values(schema: Schema, schemas: Schema) -> str:
    """Return the values that a schema allows in a few words."""
    schema = _resolved(schema, schemas)
    kinds = schema.get("type", "")
    said = [" or ".join(kinds) if isinstance(kinds, list) else kinds]
    if "enum" in schema:
        said.append("one of " + ", ".join(map(str, schema["enum"])))
    if "anyOf" in schema:
        said.append(" or ".join(one.get("type", "object") for one in schema["anyOf"]))
    said += [f"{end} {schema[key]}" for key, end in (("minimum", "from"), ("maximum", "to"))
             if key in schema]  # fmt: skip
    text = escape(" ".join(word for word in said if word))
    if about := schema.get("description"):
        text += f"{': ' if text else ''}{_prose(about)}"
    nested = schema.get("properties", {})
    if nested:
        text += "<ul>"
        for name, inner in nested.items():
            text += f"<li><code>{escape(name)}</code> {_values(inner, schemas)}</li>"
        text += "</ul>"
    return text


def _table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table of cells of HTML, or nothing if there are no rows."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if lines:
        yield f"<table><caption>{escape(caption)}</caption><thead><tr>"
        yield "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
        yield "</tr></thead><tbody>"
        yield from lines
        yield "</tbody></table>"
