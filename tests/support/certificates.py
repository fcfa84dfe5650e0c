"""An authority of the tests' own, and the certificates it signs, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = datetime.timedelta(days=2)
NAMES = {
    "C": NameOID.COUNTRY_NAME,
    "O": NameOID.ORGANIZATION_NAME,
    "OU": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "CN": NameOID.COMMON_NAME,
}


class Authority:
    """Signs for `directory`. Its own certificate is `ca`."""

    def __init__(self, directory: Path, name: str = "tests") -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(f"CN=authority of the {name}")
        certificate = self._signed(self._name, self._key.public_key(), [], authority=True)
        self.ca = self._write(
            f"{name}-ca.pem", certificate.public_bytes(serialization.Encoding.PEM)
        )

    def make(
        self,
        file: str,
        subject: str,
        *,
        hosts: tuple[str, ...] = (),
        emails: tuple[str, ...] = (),
        password: str = "",
    ) -> Path:
        """Return a certificate and its key in one PEM file.

        `subject` is like "O=Example,CN=alice", with the least specific part first.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        names += [x509.RFC822Name(email) for email in emails]
        certificate = self._signed(_subject(subject), key.public_key(), names)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        return self._write(file, pem)

    def _write(self, file: str, pem: bytes) -> Path:
        path = self.directory / file
        path.write_bytes(pem)
        return path

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: list[x509.GeneralName],
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - VALID)
            .not_valid_after(now + VALID)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            made = made.add_extension(usage, critical=True)
        return made.sign(self._key, hashes.SHA256())


def _subject(text: str) -> x509.Name:
    pairs = (part.split("=", 1) for part in text.split(","))
    return x509.Name([x509.NameAttribute(NAMES[name], value) for name, value in pairs])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
