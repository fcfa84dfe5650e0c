"""Certificates and keys as TLS contexts, and the names in clients' certificates.

A *generation* is what the files said when they were read: the context of the certificate that is
shown by default, and one for each host name that has its own certificate. `Certificates.reload`
reads the files again and makes a new generation. Connections keep the generation that they began
with.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from shardmq.broker.shared.config import ConfigError, Tls

VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
# Names of getpeercert, and how RabbitMQ writes them (RFC 4519, RFC 4514).
SHORT_NAMES: Final = {
    "surname": "SN",
    "givenName": "GIVENNAME",
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "domainComponent": "DC",
    "emailAddress": "EMAILADDRESS",
    "streetAddress": "STREET",
    "userId": "UID",
}
ALTERNATIVE_NAMES: Final = {"dns": "DNS", "email": "email", "uri": "URI", "ip": "IP Address"}
CERTIFICATE_CHARS_MAX: Final = 1 << 20
ESCAPED: Final = frozenset(',+"\\<>;')

# A certificate as ssl.getpeercert gives it.
PeerCertificate = dict[str, Any]


class Certificates:
    """The certificates of a front door. `context` is for the next AMQP connection.

    Raises ConfigError that names the setting whose file cannot be used.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self.reload()

    def reload(self, tls: Tls | None = None) -> None:
        """Read the files again, or those of other settings.

        Raises ConfigError, and changes nothing, when the files cannot be used.
        """
        tls = tls or self._tls
        amqp = Generation(tls, verify=tls.verify == "peer")
        http = Generation(tls, verify=False)
        self._tls = tls
        self.context, self._http = amqp.context, http

    def http_context(self) -> ssl.SSLContext:
        """Return a context for a listener that keeps one context for ever.

        Each handshake is handed to the generation of its time.
        """
        context = Generation(self._tls, verify=False).context

        def hand_over(connection: ssl.SSLObject, host: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._http.shown_to(host)

        context.sni_callback = hand_over
        return context


class Generation:
    """All contexts made of the files at one time.

    `context` chooses among them by the host name that a client asks for.
    """

    def __init__(self, tls: Tls, verify: bool) -> None:
        self.context = _context(tls, "tls", tls.cert, tls.key, verify)
        self._by_host = {
            one.host.lower(): _context(tls, f"tls.sni[{at}]", one.cert, one.key, verify)
            for at, one in enumerate(tls.sni)
        }

        def choose(connection: ssl.SSLObject, host: str | None, _: ssl.SSLContext) -> None:
            connection.context = self.shown_to(host)

        self.context.sni_callback = choose

    def shown_to(self, host: str | None) -> ssl.SSLContext:
        """Return the context for a host name.

        For an unknown name, or none, it is that of the first certificate: the client decides
        whether to accept it.
        """
        return self._by_host.get(matching(host or "", self._by_host), self.context)


def matching(host: str, patterns: Iterable[str]) -> str:
    """Return the pattern for this host name, or "" without one.

    A pattern is the name itself, or has a star in place of the first label.
    """
    host = host.lower().rstrip(".")
    _, _, parent = host.partition(".")
    known = frozenset(patterns)
    return next((pattern for pattern in (host, f"*.{parent}") if pattern in known), "")


def _context(tls: Tls, key: str, cert_path: str, key_path: str, verify: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[tls.min_version]
    # A client that asks for new keys all the time would keep the loop busy.
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Connections last, so tickets are of no use; and the kernel reports a client that leaves with
    # its tickets unread as broken off.
    context.num_tickets = 0
    if tls.ciphers:
        try:
            context.set_ciphers(tls.ciphers)
        except ssl.SSLError:
            raise ConfigError(f"tls.ciphers: {tls.ciphers}: none of them is known") from None
    _load(context, key, cert_path, key_path)
    if verify:
        context.verify_mode = ssl.CERT_REQUIRED if tls.fail_if_no_peer_cert else ssl.CERT_OPTIONAL
        try:
            context.load_verify_locations(tls.ca)
        except OSError as error:  # SSLError too
            raise ConfigError(f"tls.ca: {tls.ca}: {_said(error)}") from None
    return context


def _load(context: ssl.SSLContext, key: str, cert_path: str, key_path: str) -> None:
    for name, path in (("cert", cert_path), ("key", key_path)):
        try:
            if path:
                open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{key}.{name}: {path}: {error.strerror}") from None
    try:
        # Without a password OpenSSL would ask at the terminal for that of an encrypted key.
        context.load_cert_chain(cert_path, key_path or None, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}.cert: {cert_path}, {key}.key: {key_path or cert_path}: {_said(error)}"
        ) from None


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "no PEM file").lower().replace("_", " ")
        return reason
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


# -- until when one is good ------------------------------------------------------------------------

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"
_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17
_BEFORE_VALIDITY: Final = 3  # serial number, algorithm, issuer; RFC 5280, 4.1


def expires_at(path: str) -> float:
    """Return when the first certificate of a PEM file expires, in seconds since the epoch.

    The first certificate is the one that is shown. Raises OSError, ValueError.
    """
    with open(path, encoding="latin-1") as file:
        text = file.read(CERTIFICATE_CHARS_MAX)
    start, end = text.find(_BEGIN), text.find(_END)
    if not 0 <= start < end:
        raise ValueError("no certificate in PEM")
    der = ssl.PEM_cert_to_DER_cert(text[start : end + len(_END)])
    try:
        return _not_after(der)
    except IndexError:
        raise ValueError("no certificate in DER") from None


def _not_after(der: bytes) -> float:
    inside = _element(der, _element(der, 0)[1])[1]  # the certificate's signed part
    if der[inside] == _VERSION_TAG:
        inside = _element(der, inside)[2]
    for _ in range(_BEFORE_VALIDITY):
        inside = _element(der, inside)[2]
    not_before = _element(der, inside)[1]
    tag, start, end = _element(der, _element(der, not_before)[2])
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME_TAG else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[start:end].decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of an element, where its content begins, and where the content ends."""
    first = der[at + 1]
    start, length = at + 2, first
    if first & 0x80:
        start += first & 0x7F
        length = int.from_bytes(der[at + 2 : start])
    return der[at], start, start + length


# -- who a client's certificate says it is ---------------------------------------------------------


def login_name(certificate: PeerCertificate, tls: Tls) -> str:
    """Return the user that EXTERNAL logs in, or "" if the certificate has no such name."""
    if tls.login_from == "common_name":
        pairs = (pair for level in certificate.get("subject", ()) for pair in level)
        return ",".join(value for name, value in pairs if name == "commonName")
    if tls.login_from == "subject_alternative_name":
        wanted = ALTERNATIVE_NAMES[tls.san_type]
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == wanted]
        return names[tls.san_index] if tls.san_index < len(names) else ""
    return distinguished_name(certificate)


def distinguished_name(certificate: PeerCertificate, of: str = "subject") -> str:
    """Return a name as RabbitMQ writes it, the most specific part first: CN=one,O=two.

    Several values of one level are joined by +.
    """
    levels = [
        "+".join(f"{SHORT_NAMES.get(name, name)}={_escaped(value)}" for name, value in level)
        for level in certificate.get(of, ())
    ]
    return ",".join(reversed(levels))


def _escaped(value: str) -> str:
    """Return the value escaped by RFC 4514, 2.4."""
    out = []
    for at, letter in enumerate(value):
        at_edge = (at == 0 and letter in "# ") or (at == len(value) - 1 and letter == " ")
        if letter in ESCAPED or at_edge:
            out.append("\\" + letter)
        elif letter < " " or letter == "\x7f":
            out.append(f"\\{ord(letter):02X}")
        else:
            out.append(letter)
    return "".join(out)
