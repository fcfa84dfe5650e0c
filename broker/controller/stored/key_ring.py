"""The keys by which the secrets of parameters are encrypted in files.

The file of `secrets.key_file` has one key of Fernet in each line. The first key encrypts, and all
of them decrypt, so a new first line changes the key. In memory secrets are plain. A secret that no
key decrypts stays the text that it is in the file, and goes into the file again like that.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from shardmq.broker.model.changes import ParameterPut
from shardmq.broker.model.encrypted import ENCRYPTED, is_encrypted
from shardmq.broker.model.secret_values import replaced
from shardmq.broker.shared.config import ConfigError

KEYS_MAX: Final = 100
FILE_BYTES_MAX: Final = 64 << 10
SETTING: Final = "secrets.key_file"

log = logging.getLogger(__name__)

Place = tuple[str, str, str, str]  # of a token: vhost, component, name and the secret itself


class Cipher(Protocol):
    """One key. `cryptography.fernet.Fernet` is one; a broker without keys does not load it."""

    def encrypt(self, data: bytes) -> bytes: ...

    def decrypt(self, token: bytes | str) -> bytes: ...


class Opened(NamedTuple):
    """A parameter as memory has it, and what was found in the file.

    is_stale: the file has a secret in another way than it would be written now.
    is_unread: no key decrypts one of the secrets.
    """

    put: ParameterPut
    is_stale: bool = False
    is_unread: bool = False


class KeyRing:
    """The keys of this broker; without keys secrets are written as they are.

    With `encrypts` false the keys decrypt only, so that encryption can be given up.
    Raises ValueError if a text is no key.
    """

    def __init__(self, keys: Sequence[str] = (), *, encrypts: bool = True) -> None:
        self._fernets: Sequence[Cipher] = ()
        if keys:
            from cryptography.fernet import Fernet

            self._fernets = [Fernet(key) for key in keys]
        self.encrypts = encrypts and bool(keys)
        # A secret is encrypted once, and not with each change of another parameter.
        self._tokens: dict[Place, str] = {}

    def __bool__(self) -> bool:
        """Return whether there are keys."""
        return bool(self._fernets)

    def opened(self, put: ParameterPut) -> Opened:
        """Return a parameter of a file with its secrets decrypted."""
        is_stale = is_unread = False

        def opened(text: str) -> str:
            nonlocal is_stale, is_unread
            if not is_encrypted(text):
                is_stale = is_stale or self.encrypts
                return text
            number, plain = self._decrypted(text)
            if plain is None:
                is_unread = True
                return text
            if self.encrypts and number == 0:
                self._tokens[(*_place(put), plain)] = text
            else:
                is_stale = True
            return plain

        value = replaced(put.component, put.value, opened)
        return Opened(msgspec.structs.replace(put, value=value), is_stale, is_unread)

    def decrypted(self, put: ParameterPut) -> ParameterPut:
        """Return a parameter of imported definitions, decrypted as far as the keys can."""
        return self.opened(put).put

    def sealed(self, put: ParameterPut) -> ParameterPut:
        """Return a parameter as a file has it: with its secrets encrypted, if there is a key."""
        return self._sealed(put, {})

    def sealed_all(self, puts: Iterable[ParameterPut]) -> list[ParameterPut]:
        """Return all parameters that there are, as a file has them."""
        used: dict[Place, str] = {}
        found = [self._sealed(put, used) for put in puts]
        self._tokens = used
        return found

    def _sealed(self, put: ParameterPut, used: dict[Place, str]) -> ParameterPut:
        if not self.encrypts:
            return put

        def sealed(text: str) -> str:
            if is_encrypted(text):
                return text
            place = (*_place(put), text)
            token = used.get(place) or self._tokens.get(place)
            if token is None:
                token = ENCRYPTED + self._fernets[0].encrypt(text.encode()).decode()
            used[place] = token
            return token

        value = replaced(put.component, put.value, sealed)
        return msgspec.structs.replace(put, value=value)

    def _decrypted(self, text: str) -> tuple[int, str | None]:
        """Return the number of the key that decrypts a text, and what the text means."""
        if not self._fernets:
            return -1, None
        from cryptography.fernet import InvalidToken

        token = text.removeprefix(ENCRYPTED)
        for number, fernet in enumerate(self._fernets):
            try:
                return number, fernet.decrypt(token).decode()
            except (InvalidToken, ValueError):
                continue
        return -1, None


def _place(put: ParameterPut) -> tuple[str, str, str]:
    return put.vhost, put.component, put.name


def keys_in(path: Path) -> list[str]:
    """Return the keys in a file. Empty lines and those that begin with # are passed over.

    Raises ConfigError, which names the file and the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{SETTING}: {path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{SETTING}: {path}: it has more than {FILE_BYTES_MAX} bytes")
    keys = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if not (key := line.strip()) or key.startswith("#"):
            continue
        try:
            KeyRing([key])
        except ValueError:
            # The text of the line may be a secret of something else.
            raise ConfigError(
                f"{SETTING}: {path}, line {number}: that is no key; "
                "shardctl generate_secrets_key makes one"
            ) from None
        keys.append(key)
    if not keys:
        raise ConfigError(f"{SETTING}: {path}: no key in it")
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{SETTING}: {path}: {len(keys)} keys; it may have {KEYS_MAX}")
    return keys


def key_ring(key_file: str, *, encrypts: bool = True) -> KeyRing:
    """Return the keys of a file, or none without a file.

    A file that every user of the host may read is warned of. Raises ConfigError.
    """
    if not key_file:
        return NO_KEYS
    ring = KeyRing(keys_in(Path(key_file)), encrypts=encrypts)
    if warning := openness(Path(key_file)):
        log.warning("%s", warning)
    return ring


def openness(path: Path) -> str:
    """Return a warning if every user of this host may read or change a file of keys, else ""."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""  # it has been read
    if not mode & (stat.S_IROTH | stat.S_IWOTH):
        return ""
    return (
        f"{SETTING}: every user of this host may read or change {path} "
        f"(mode {stat.S_IMODE(mode):04o}): chmod 600"
    )


NO_KEYS: Final = KeyRing()
