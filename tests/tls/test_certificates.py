"""Test which certificate a client is shown, whom its own names, and unusable files."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from shardmq.broker.shared.certificates import (
    Certificates,
    distinguished_name,
    expires_at,
    login_name,
    matching,
)
from shardmq.broker.shared.config import ConfigError, Sni, Tls
from tests.support.certificates import Authority

ALICE = {
    "subject": (
        (("countryName", "DE"),),
        (("organizationName", "Ex, ample"),),
        (("organizationalUnitName", "#one"), ("localityName", "Hall ")),
        (("commonName", "alice"),),
        (("emailAddress", "a@example.org"),),
    ),
    "issuer": ((("commonName", "authority"),),),
    "subjectAltName": (
        ("email", "a@example.org"),
        ("DNS", "alice.example.org"),
        ("DNS", "alice"),
        ("URI", "urn:alice"),
        ("IP Address", "10.0.0.1"),
    ),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_a_distinguished_name_is_written_as_rabbitmq_does() -> None:
    expected = "EMAILADDRESS=a@example.org,CN=alice,OU=\\#one+L=Hall\\ ,O=Ex\\, ample,C=DE"
    assert distinguished_name(ALICE) == expected
    assert distinguished_name(ALICE, "issuer") == "CN=authority"
    assert distinguished_name({}) == ""


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"login_from": "common_name"}, "alice"),
        ({"login_from": "subject_alternative_name"}, "alice.example.org"),
        ({"login_from": "subject_alternative_name", "san_index": 1}, "alice"),
        ({"login_from": "subject_alternative_name", "san_index": 2}, ""),
        ({"login_from": "subject_alternative_name", "san_type": "email"}, "a@example.org"),
        ({"login_from": "subject_alternative_name", "san_type": "uri"}, "urn:alice"),
        ({"login_from": "subject_alternative_name", "san_type": "ip"}, "10.0.0.1"),
    ],
)
def test_the_user_of_a_certificate_is_the_name_the_settings_ask_for(
    how: dict[str, Any], name: str
) -> None:
    assert login_name(ALICE, Tls(cert="x", **how)) == name
    assert login_name({}, Tls(cert="x", **how)) == ""


@pytest.mark.parametrize(
    ("host", "pattern"),
    [
        ("a.example.org", "a.example.org"),
        ("A.Example.ORG.", "a.example.org"),
        ("b.example.org", "*.example.org"),
        ("c.b.example.org", ""),
        ("example.org", ""),
        ("localhost", ""),
        ("", ""),
    ],
)
def test_a_star_stands_for_one_label(host: str, pattern: str) -> None:
    assert matching(host, ["a.example.org", "*.example.org"]) == pattern


def test_each_name_has_its_own_context_and_an_unknown_one_the_first(authority: Authority) -> None:
    first = authority.make("first.pem", "CN=first")
    other = authority.make("other.pem", "CN=other")
    shown = Certificates(Tls(cert=str(first), sni=[Sni(host="*.example.org", cert=str(other))]))
    assert shown.context.sni_callback is not None
    generation = shown._http
    assert generation.shown_to("x.example.org") is not generation.context
    assert generation.shown_to("x.example.com") is generation.shown_to(None) is generation.context


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good = str(authority.make("good.pem", "CN=good"))
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("not PEM")
    stranger = str(authority.make("stranger.pem", "CN=stranger"))
    locked = str(authority.make("locked.pem", "CN=locked", password="secret"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cert": str(tmp_path / "none.pem")}, "tls.cert: .*none.pem: No such file"),
        ({"cert": good, "key": str(tmp_path / "none.key")}, "tls.key: .*none.key: No such file"),
        ({"cert": str(nothing)}, "tls.cert: .*nothing.pem"),
        (
            {"cert": good, "key": stranger},
            "tls.cert: .*good.pem, tls.key: .*stranger.pem: key values mismatch",
        ),
        ({"cert": locked}, "tls.cert: .*locked.pem"),
        ({"cert": good, "ca": str(nothing), "verify": "peer"}, "tls.ca: .*nothing.pem"),
        ({"cert": good, "ciphers": "none-such"}, "tls.ciphers: none-such"),
        (
            {"cert": good, "sni": [Sni(host="x", cert=str(nothing))]},
            r"tls.sni\[0\].cert: .*nothing.pem",
        ),
    ]
    for how, text in wrong:
        with pytest.raises(ConfigError, match=text):
            Certificates(Tls(**how))


def test_a_reload_that_fails_changes_nothing(authority: Authority) -> None:
    path = authority.make("changed.pem", "CN=changed")
    certificates = Certificates(Tls(cert=str(path)))
    before = certificates.context
    path.write_text("half a")
    with pytest.raises(ConfigError):
        certificates.reload()
    assert certificates.context is before
    authority.make("changed.pem", "CN=changed")
    certificates.reload()
    assert certificates.context is not before


def test_old_versions_are_not_spoken(authority: Authority) -> None:
    cert = str(authority.make("versions.pem", "CN=versions"))
    assert Certificates(Tls(cert=cert)).context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert (
        Certificates(Tls(cert=cert, min_version="1.3")).context.minimum_version
        == ssl.TLSVersion.TLSv1_3
    )


def test_a_reload_with_other_settings_goes_by_them_from_then_on(authority: Authority) -> None:
    """Or, when they cannot be used, goes on with those before."""
    certificates = Certificates(Tls(cert=str(authority.make("first.pem", "CN=first"))))
    assert certificates.context.minimum_version == ssl.TLSVersion.TLSv1_2
    certificates.reload(Tls(cert=str(authority.make("second.pem", "CN=second")), min_version="1.3"))
    assert certificates.context.minimum_version == ssl.TLSVersion.TLSv1_3
    with pytest.raises(ConfigError, match="tls.cert"):
        certificates.reload(Tls(cert="/nonexistent"))
    certificates.reload()
    assert certificates.context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_the_end_of_a_certificate_is_the_one_it_says(authority: Authority, tmp_path: Path) -> None:
    for path in (
        authority.make("ends.pem", "O=Example,CN=ends", hosts=("a.example.org",)),
        authority.ca,
    ):
        said = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        assert expires_at(str(path)) == said.timestamp()
    pem = authority.ca.read_text()
    for text in ("", pem[:60], "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        (tmp_path / "broken.pem").write_text(text)
        with pytest.raises(ValueError, match="certificate"):
            expires_at(str(tmp_path / "broken.pem"))
