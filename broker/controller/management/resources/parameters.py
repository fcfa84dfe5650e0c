"""/api/parameters and /api/global-parameters. Policies are shown here, but not set."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import (
    Call,
    Route,
    existing,
    long_list,
    put_status,
    with_keys,
)
from shardmq.broker.controller.management.cluster_id import global_parameters, identity
from shardmq.broker.controller.management.resources import federation, shovels
from shardmq.broker.controller.management.responses.listing import Listing, by_name
from shardmq.broker.controller.management.responses.schemas import object_of
from shardmq.broker.model.changes import GLOBAL, ParameterDelete, ParameterPut
from shardmq.broker.model.federation import UPSTREAM, UPSTREAM_SET
from shardmq.broker.model.policies import POLICY
from shardmq.broker.model.secret_values import has_encrypted
from shardmq.broker.model.shovels import SHOVEL


def row(put: ParameterPut) -> dict[str, Any]:
    return {"value": put.value, "vhost": put.vhost, "component": put.component, "name": put.name}


def global_row(put: ParameterPut) -> dict[str, Any]:
    return {"name": put.name, "value": put.value}


async def get_all(call: Call) -> Listing:
    """List parameters, of all or one component and vhost; policies only if asked for by name."""
    component = call.request.match_info.get("component")
    seen = {vhost.name for vhost in call.vhosts()}
    puts = [put for put in call.catalog.parameters.values() if put.vhost in seen]
    wanted = (put.component == component if component else put.component != POLICY for put in puts)
    return by_name(row(put) for put, is_wanted in zip(puts, wanted, strict=True) if is_wanted)


def _parameter(call: Call) -> ParameterPut:
    key = (call.vhost().name, call.part("component"), call.part("name"))
    return existing(call.catalog.parameters.get(key))


async def get(call: Call) -> dict[str, Any]:
    """Show a parameter."""
    return row(_parameter(call))


async def put(call: Call) -> Any:
    """Set a parameter."""
    vhost, component, name = call.vhost().name, call.part("component"), call.part("name")
    if component == POLICY:
        raise bad_request("policies may not be set using this method")
    value = with_keys(await call.json(), "value")["value"]
    if has_encrypted(component, value):  # whose rights could not be looked at
        raise bad_request(
            "an encrypted URI is taken from imported definitions only: set the URI itself"
        )
    if component == SHOVEL:
        shovels.check_rights(call, name, value)
    elif component in (UPSTREAM, UPSTREAM_SET):
        federation.check_rights(call, vhost, component, name, value)
    existed = (vhost, component, name) in call.catalog.parameters
    await call.ask(ParameterPut(vhost, component, name, value))
    return put_status(existed)


async def delete(call: Call) -> None:
    """Delete a parameter."""
    gone = _parameter(call)
    if gone.component == POLICY:
        raise bad_request("policies may not be cleared using this method")
    await call.ask(ParameterDelete(gone.vhost, gone.component, gone.name))


async def get_globals(call: Call) -> Listing:
    """List global parameters."""
    puts = global_parameters(call.catalog, identity(call.context.config))
    return by_name(map(global_row, puts))


def _global(call: Call) -> ParameterPut:
    puts = global_parameters(call.catalog, identity(call.context.config))
    return existing(next((put for put in puts if put.name == call.part("name")), None))


async def get_global(call: Call) -> dict[str, Any]:
    """Show a global parameter."""
    return global_row(_global(call))


async def put_global(call: Call) -> Any:
    """Set a global parameter."""
    name, value = call.part("name"), with_keys(await call.json(), "value")["value"]
    existed = ("", GLOBAL, name) in call.catalog.parameters
    await call.ask(ParameterPut("", GLOBAL, name, value))
    return put_status(existed)


async def delete_global(call: Call) -> None:
    """Delete a global parameter. The id of the cluster then is the default again."""
    name = _global(call).name
    if ("", GLOBAL, name) in call.catalog.parameters:
        await call.ask(ParameterDelete("", GLOBAL, name))


ONE = "/api/parameters/{component}/{vhost}/{name}"
GLOBAL_ONE = "/api/global-parameters/{name}"

ROUTES = [
    long_list("/api/parameters", get_all, "Parameter", "policymaker"),
    long_list("/api/parameters/{component}", get_all, "Parameter", "policymaker"),
    long_list("/api/parameters/{component}/{vhost}", get_all, "Parameter", "policymaker"),
    Route("GET", ONE, get, "policymaker", shows="Parameter"),
    Route("PUT", ONE, put, "policymaker", body=object_of(value={})),
    Route("DELETE", ONE, delete, "policymaker"),
    long_list("/api/global-parameters", get_globals, "GlobalParameter", "policymaker"),
    Route("GET", GLOBAL_ONE, get_global, "policymaker", shows="GlobalParameter"),
    Route("PUT", GLOBAL_ONE, put_global, "policymaker", body=object_of(value={})),
    Route("DELETE", GLOBAL_ONE, delete_global, "policymaker"),
]
