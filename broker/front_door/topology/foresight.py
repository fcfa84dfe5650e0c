"""Foresee the result of a method: whether it can fail, and what it will have made.

A channel's pipeline asks for a method while earlier methods are unanswered, if neither they nor the
method can fail. This file judges by the copy of the catalog, by the user's rights and by what the
unanswered methods will have made or deleted.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from pamqp import base, commands

from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology import history
from shardmq.broker.front_door.topology.queues import shards_of
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.routing import delaying, keeping
from shardmq.broker.routing.types import TYPES


class Foresight:
    """Judges the methods of one channel in their order.

    Another connection may still prove a judgement wrong, as if it had come between two methods.
    """

    def __init__(self, session: Session, controller: CatalogLink) -> None:
        self._session, self._controller = session, controller
        # Kind and name of what the unanswered methods will have made (True) or deleted (False).
        self._foreseen: dict[tuple[str, str], bool] = {}

    @property
    def _catalog(self) -> Catalog:
        return self._controller.catalog

    def forget(self) -> None:
        """Forget what was foreseen: everything is answered and in the copy of the catalog."""
        self._foreseen.clear()

    def is_sure(self, work: base.Frame | Binds) -> bool:
        """Return whether nothing known here speaks against the method.

        What a sure method makes or deletes is foreseen for the methods behind it.
        """
        if isinstance(work, Binds):
            if len(work.ends) == 1:
                return self.can_bind_any_key(*work.ends[0][:2])
            # Binds of the same exchange and queue are judged once.
            pairs = groupby(work.ends, itemgetter(0, 1))
            return all(self.can_bind_any_key(*pair) for pair, _ in pairs)
        return not self._has_topic_rights() and self._method_is_sure(work)

    def can_bind_any_key(self, source: str, queue: str) -> bool:
        """Return whether binds without arguments between these two are sure."""
        return (
            not self._has_topic_rights()
            and self._exists("queue", queue)
            and self._exists("exchange", source)
            and self._takes_any_binding(source, None)
            and not checks.is_hidden_queue(queue)
            and not shards_of(self._session, self._catalog, queue)
        )

    def _has_topic_rights(self) -> bool:
        return self._catalog.permissions.has_topic(self._session.user, self._session.vhost)

    def _method_is_sure(self, method: base.Frame) -> bool:
        match method:
            case commands.Queue.Bind() if self._gets_history(method):
                return False
            case commands.Queue.Bind() | commands.Queue.Unbind():
                there = self._exists("queue", method.queue)
                there = there and self._exists("exchange", method.exchange)
                return there and self._takes_any_binding(method.exchange, method.arguments)
            case commands.Exchange.Bind() | commands.Exchange.Unbind():
                there = self._exists("exchange", method.source)
                there = there and self._exists("exchange", method.destination)
                return there and self._takes_any_binding(method.source, method.arguments)
            case commands.Queue.Declare(passive=False):
                return not method.arguments and self._foresee_made("queue", method.queue)
            case commands.Exchange.Declare(passive=False, auto_delete=False):
                return (
                    method.exchange_type in TYPES
                    and checks.takes_any_binding(method.exchange_type, {})
                    and method.exchange_type != delaying.DELAYED_TYPE
                    and not method.arguments
                    and self._foresee_made("exchange", method.exchange)
                )
            case commands.Queue.Delete(if_unused=False, if_empty=False):
                is_virtual = bool(shards_of(self._session, self._catalog, method.queue))
                return not is_virtual and self._foresee_deleted("queue", method.queue)
            case commands.Exchange.Delete(if_unused=False):
                return self._foresee_deleted("exchange", method.exchange)
        return False

    def _takes_any_binding(self, exchange: str, arguments: dict[str, Any] | None) -> bool:
        """Return whether the exchange takes a binding with these arguments, whatever its key is.

        An exchange that is only foreseen takes any key, or it would not be foreseen.
        """
        found = self._catalog.exchange(self._session.vhost, exchange)
        if found is None:
            return checks.takes_any_binding("", arguments or {})
        type = delaying.inner_type(found.type, found.arguments)
        return checks.takes_any_binding(type, arguments or {}) and not keeping.keeps(
            type, found.arguments
        )

    def _gets_history(self, bind: commands.Queue.Bind) -> bool:
        vhost = self._catalog.vhost(self._session.vhost)
        return history.wants_history(vhost, bind.exchange, bind.arguments or {})

    def _exists(self, kind: str, name: str) -> bool:
        """Return whether the thing will exist by then and the user may do everything with it."""
        if not name or not self._has_all_rights(name):
            return False
        foreseen = self._foreseen.get((kind, name))
        if foreseen is not None:
            return foreseen
        if kind == "exchange":
            exchange = self._catalog.exchange(self._session.vhost, name)
            # An auto-delete exchange goes with its last binding, which an unanswered method may
            # take.
            return exchange is not None and not exchange.auto_delete
        queue = self._catalog.queue(self._session.vhost, name)
        return queue is not None and queue.owner in ("", self._session.owner)

    def _foresee_made(self, kind: str, name: str) -> bool:
        """Return whether the name is free; then the methods behind may count on the declare."""
        vhost = self._session.vhost
        find = self._catalog.exchange if kind == "exchange" else self._catalog.queue
        if (
            not self._is_ordinary(name)
            or (kind, name) in self._foreseen
            or find(vhost, name) is not None
        ):
            return False
        self._foreseen[kind, name] = True
        return True

    def _foresee_deleted(self, kind: str, name: str) -> bool:
        if not self._is_ordinary(name) or not self._exists(kind, name):
            return False
        self._foreseen[kind, name] = False
        return True

    def _is_ordinary(self, name: str) -> bool:
        """Return whether the name is taken as it is and the user may do everything with it."""
        ordinary = name != "" and not name.startswith("amq.") and checks.clean_name(name) == name
        return ordinary and self._has_all_rights(name)

    def _has_all_rights(self, name: str) -> bool:
        return self._catalog.permissions.may_all(self._session.user, self._session.vhost, name)
