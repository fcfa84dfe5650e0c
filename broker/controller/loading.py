"""Loads what exists at a start of the controller, and what the file of `load_definitions` adds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.authority import server_name
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.decisions.administration import REGEX_CHARS_SHOWN
from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.stored import imported
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.installation import installation_id
from shardmq.broker.model import checks, patterns
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CLUSTER_NAME,
    GLOBAL,
    AnyChange,
    ParameterPut,
    PermissionPut,
    UserPut,
    VhostPut,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.permissions import expanded
from shardmq.broker.model.policies import COMPONENTS
from shardmq.broker.routing.placement import NodeShards, Placement
from shardmq.cluster.replicas import Replicas, ReplicasOfShards

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """The things that a controller begins with."""

    definitions: Definitions
    catalog: Catalog
    placement: Placement


def load(
    definitions: Definitions,
    config: ControllerConfig,
    nodes: Iterable[NodeShards] = (),
    replicas: ReplicasOfShards = ReplicasOfShards(),
) -> Loaded:
    """Load what exists, and place what is new at the nodes. Raises DefinitionsError.

    In a cluster a thread must call this, because a sync waits for other nodes. So the id of the
    broker is made here, too.
    """
    placement = Placement(config.own_shards or range(config.shards), nodes)
    placement.has_copies(replicas)
    catalog = load_or_begin(definitions, config, placement=placement)
    if definitions.waits_for_others:
        installation_id(Path(config.data_dir), definitions.files)
    return Loaded(definitions, catalog, placement)


def load_or_begin(
    definitions: Definitions,
    config: ControllerConfig,
    needs_given: bool = False,
    placement: Placement | None = None,
) -> Catalog:
    """Return what exists, with what the file of `load_definitions` adds.

    At the first start that is one vhost and one user with all rights in it; a file that has users
    replaces this user. If an entry of the file is refused, this raises DefinitionsError, which
    names the entry. Nothing of the file is kept then, and after a first start the next one takes
    the directory for new. A later start goes on with what exists if only room is missing, unless
    `needs_given`.
    """
    begin = definitions.is_new
    if begin and (stored := next(Path(config.data_dir).glob("shard-*/*/msgs.*"), None)) is not None:
        raise DefinitionsError(
            f"{config.data_dir} has no definitions, but messages ({stored}): "
            "put the definitions back"
        )
    given = read_given(config)
    catalog = definitions.load()
    for line in refused_patterns(catalog):
        log.warning("%s", line)
    if begin and not given.users:
        user, vhost = config.default_user, config.default_vhost
        hashed = hash_new_password(config.default_pass, config.hashing_algorithm)
        first: list[AnyChange] = [
            VhostPut(vhost, "Default virtual host"),
            UserPut(user, *hashed, ["administrator"]),
            PermissionPut(vhost, user, ".*", ".*", ".*"),
        ]
        _apply(Decision(first), definitions, catalog)
    if config.cluster is not None and ("", GLOBAL, CLUSTER_NAME) not in catalog.parameters:
        # The default has the name of a host, and any node may lead.
        named = ParameterPut("", GLOBAL, CLUSTER_NAME, config.cluster.name)
        _apply(Decision([named]), definitions, catalog)
    decisions = Decisions(
        catalog,
        definitions.new_queue_id,
        server_name,
        placement or Placement(range(config.shards)),
    )
    needs_all = begin or needs_given
    stages = _load_given(given, decisions, definitions, catalog, config, needs_all=needs_all)
    warn_of_no_effect(stages, without_effect.NO_COPIES if placement is None else placement.most)
    _apply(decisions.restore(), definitions, catalog)
    definitions.flush()
    if (job := definitions.sync_job(catalog)) is not None:
        job()
    definitions.complete()
    return catalog


def refused_patterns(catalog: Catalog) -> Iterator[str]:
    """Yield a sentence for each stored expression that is refused now, and so matches nothing.

    An earlier version, or somebody who edited the file, put it there.
    """
    stored: list[tuple[str, str]] = []
    for put in catalog.parameters.values():
        if put.component in COMPONENTS and isinstance(put.value, dict):
            thing = f"{put.component.replace('_', ' ')} '{put.name}' in vhost '{put.vhost}'"
            stored.append((thing, str(put.value.get("pattern", ""))))
    for right in catalog.permissions.puts.values():
        thing = f"permission of user '{right.user}' in vhost '{right.vhost}'"
        stored += ((thing, regex) for regex in (right.configure, right.write, right.read))
    for topic in catalog.permissions.topic_puts:
        thing = f"topic permission of user '{topic.user}' in vhost '{topic.vhost}'"
        stored += ((thing, expanded(regex, topic)) for regex in (topic.write, topic.read))
    for thing, regex in stored:
        try:
            patterns.compiled(regex)
        except patterns.BadPattern as error:
            yield f"{thing}: '{cut(regex, REGEX_CHARS_SHOWN)}' matches nothing: {error}"


def read_given(config: ControllerConfig) -> imported.Document:
    """Return the file of `load_definitions`; without one, an empty document."""
    path = config.load_definitions
    if not path:
        return imported.Document()
    try:
        return imported.read(Path(path).read_bytes())
    except OSError as error:
        raise DefinitionsError(f"load_definitions: {path}: {error.strerror}") from None
    except Refusal as refusal:
        raise DefinitionsError(f"load_definitions: {path}: {refusal.text}") from None


def warn_of_no_effect(stages: list[list[imported.Ask]], most: Replicas) -> None:
    """Log which parts of a file of definitions are kept and have no effect.

    `most` is that of `without_effect.found_in`.
    """
    for warning in without_effect.sentences((ask for stage in stages for ask in stage), most):
        log.warning("load_definitions: %s", warning)


def _load_given(
    document: imported.Document,
    decisions: Decisions,
    definitions: Definitions,
    catalog: Catalog,
    config: ControllerConfig,
    needs_all: bool,
) -> list[list[imported.Ask]]:
    """Carry out the requests of a document before any front door or shard is connected.

    Returns them, if they were carried out to the end.
    If there is no room for an entry this raises only with `needs_all`. Without it the entries
    before that one stay.
    """
    try:
        stages = imported.stages(
            document,
            None,
            partial(hash_new_password, algorithm=config.hashing_algorithm),
            definitions.keys.decrypted,
        )
        for stage in stages:
            for ask in stage:
                if imported.needed(ask, catalog):
                    _carry_out(ask, decisions, definitions, catalog)
    except Refusal as refusal:
        if refusal.code == checks.NO_ROOM and not needs_all:
            log.error("load_definitions: not taken in to its end: %s", refusal.text)
            return []
        raise DefinitionsError(
            f"load_definitions: {config.load_definitions}: {refusal.text}"
        ) from None
    return stages


def _carry_out(
    ask: imported.Ask, decisions: Decisions, definitions: Definitions, catalog: Catalog
) -> None:
    try:
        decision = decisions.decide(ask, "")
    except Refusal as refusal:
        raise Refusal(refusal.code, imported.refused(ask, refusal.text)) from None
    lacking = definitions.lacks_room(decision.changes)
    if lacking:
        raise Refusal(checks.NO_ROOM, imported.refused(ask, lacking))
    _apply(decision, definitions, catalog)


def _apply(decision: Decision, definitions: Definitions, catalog: Catalog) -> None:
    for change in decision.changes:
        definitions.add(change, catalog)
        catalog.apply(change)
    for note in decision.notes:
        log.warning("%s", note)
