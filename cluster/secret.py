"""The keys of a cluster, all made from its secret.

Every node derives the same keys, so nothing is exchanged or stored. Streams between controllers use
TLS 1.3, in which both ends show one certificate and accept no other. ZeroMQ uses CURVE with one
pair of keys for both ends. The derivation is slow on purpose (scrypt): whoever can reach a port of
the cluster could otherwise guess a short secret at leisure.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

# About 0.1 s and 32 MiB for one guess.
SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20}
KEY_BYTES: Final = 32
# The certificate is the same on every node and at every start, so its dates and number are fixed.
VALID_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL: Final = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


if TYPE_CHECKING:
    import ssl  # the supervisor does without


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a cluster: PEM texts for TLS, and Z85 texts for CURVE."""

    certificate: str
    key: str
    curve_public: str
    curve_secret: str

    @property
    def fingerprint(self) -> bytes:
        """A text by which nodes see in etcd that they have the same secret."""
        return hashlib.sha256(self.certificate.encode()).hexdigest().encode()

    @property
    def ticket_key(self) -> bytes:
        """The key by which a node signs what another node is to do for a client."""
        return hashlib.sha256(b"tickets of " + self.key.encode()).digest()


def keys_of(secret: str, cluster: str) -> Keys:
    """Return the keys that belong to a secret in the cluster of this name."""
    # A process that is given its keys needs none of these.
    import zmq
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from zmq.utils import z85

    salt = b"shardmq cluster " + cluster.encode()
    made = hashlib.scrypt(secret.encode(), salt=salt, dklen=2 * KEY_BYTES, **SCRYPT)
    signing = Ed25519PrivateKey.from_private_bytes(made[:KEY_BYTES])
    curve_secret = z85.encode(made[KEY_BYTES:])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "shardmq node")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(signing.public_key())
        .serial_number(1)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(signing, None)
    )
    key = signing.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Keys(
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key.decode(),
        zmq.curve_public(curve_secret).decode(),
        curve_secret.decode(),
    )


def tls_context(keys: Keys, *, server: bool) -> ssl.SSLContext:
    """Return the context of one end of a stream, which shows and accepts the one certificate."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of the cluster, not of a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=keys.certificate)
    # The key is given by the name of a file, and must not lie in one that others could read.
    fd = os.memfd_create("shardmq-cluster-key", os.MFD_CLOEXEC)
    try:
        os.write(fd, (keys.key + keys.certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if server:
        context.num_tickets = 0
    return context
