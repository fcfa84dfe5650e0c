"""The TLS context for the URI of a broker, with RabbitMQ's parameters of the query.

The certificate of the broker is checked if the URI has `verify=verify_peer`. Without `verify` it is
checked if the URI names a `cacertfile`, as nothing else would tell a broker from an impostor.
"""

from __future__ import annotations

import ssl

from shardmq.bridges.errors import LinkFailed
from shardmq.broker.model.amqp_uri import AmqpUri


def context_of(uri: AmqpUri) -> ssl.SSLContext:
    """Read the files that the URI names. Raises LinkFailed."""
    verifies = bool(uri.cacertfile) if uri.verify is None else uri.verify
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = verifies and uri.server_name is not None
    context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
    file = uri.cacertfile
    try:
        if uri.cacertfile:
            context.load_verify_locations(uri.cacertfile)
        elif verifies:
            context.load_default_certs()
        if uri.certfile:
            file = uri.certfile
            # A key with a password must not ask for it at the terminal.
            context.load_cert_chain(uri.certfile, uri.keyfile or None, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise LinkFailed(f"TLS: {file}: {error.__class__.__name__}: {error}") from None
    return context
