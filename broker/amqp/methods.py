"""Control methods and field tables, from bytes to values and back.

The methods, their names, fields and types are pamqp's. Reading and writing them is done here,
strictly, for a server:

- pamqp reads a cut string or table as a shorter one; here that, and bytes that are left over, is a
  syntax error.
- pamqp recurses as deep as a client nests its tables; here depth has a bound.
- pamqp refuses some names while writing (its validate()); what was declared must also be listed.
- pamqp writes a float as 32 bits, and small integers in types that older clients cannot read; here
  they are `d`, and `I` or `l`.
- pamqp has no access.request, which old clients still send.
- pamqp fills the reserved field of channel.open-ok, on which clients that read it as empty fail.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import pamqp.decode
import pamqp.encode
from pamqp import base, commands

from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.spec import COMMAND_INVALID, FRAME_ERROR, SYNTAX_ERROR, TABLE_DEPTH_MAX

M = TypeVar("M", bound=base.Frame)
Value = Any  # value of a field: bool, int, float, str, bytes, None, datetime, Decimal, list, dict


class Long(int):
    """A number of a table that is written as a long (l), however small.

    Some peers look at the type of a number, not only at its value.
    """


class Short(int):
    """A number of a table that is written as a short (s), as some peers write it."""


class AccessRequest(base.Frame):
    """access.request: realms of AMQP 0-8.

    Every client may do everything that it could ask for here.
    """

    __slots__ = ["active", "exclusive", "passive", "read", "realm", "write"]
    FIELDS: ClassVar[list[str]] = ["realm", "exclusive", "passive", "active", "write", "read"]
    frame_id: ClassVar[int] = 10
    index: ClassVar[int] = 0x001E000A
    name: ClassVar[str] = "Access.Request"
    _realm = "shortstr"
    _exclusive = _passive = _active = _write = _read = "bit"


class AccessRequestOk(base.Frame):
    """access.request-ok."""

    __slots__ = ["ticket"]
    frame_id: ClassVar[int] = 11
    index: ClassVar[int] = 0x001E000B
    name: ClassVar[str] = "Access.RequestOk"
    _ticket = "short"

    def __init__(self, ticket: int = 1) -> None:
        self.ticket = ticket


class ChannelOpenOk(commands.Channel.OpenOk):
    """channel.open-ok with its reserved field empty, as RabbitMQ sends it.

    pamqp insists on the text "0" there.
    """

    FIELDS: ClassVar[list[str]] = ["channel_id"]

    def __init__(self) -> None:
        self.channel_id = ""


_METHODS: Final[dict[int, type[base.Frame]]] = {
    **commands.INDEX_MAPPING,
    AccessRequest.index: AccessRequest,
}
_FIELDS: Final[dict[type[base.Frame], list[tuple[str, str]]]] = {}
_PLANS: Final[dict[type[base.Frame], list[tuple[str, Callable[[_Reader], Value] | None]]]] = {}


def decode_method(payload: bytes) -> base.Frame:
    """Return the method of a method frame's payload. Raises ConnectionException."""
    if len(payload) < 4:
        raise _syntax_error("a method of fewer than 4 bytes")
    index: int = _INDEX.unpack_from(payload)[0]
    found = _METHODS.get(index)
    if found is None:
        raise ConnectionException(
            COMMAND_INVALID, "unimplemented method", index >> 16, index & 0xFFFF
        )
    try:
        return _decode_fields(found, payload)
    except ConnectionException as error:
        raise ConnectionException(error.code, error.text, index >> 16, index & 0xFFFF) from None


class SaidAtStart(NamedTuple):
    """The fields of connection.start-ok.

    Connections of one kind of client share `client_properties`, which nobody may change.
    """

    client_properties: dict[str, Value]
    mechanism: str
    response: bytes
    locale: str


# Clients of one library say the same of themselves each time they connect. The bounds hold for what
# anybody can send who has proved nothing yet.
KNOWN_PROPERTIES_MAX: Final = 64
KNOWN_PROPERTIES_BYTES_MAX: Final = 1024
_known_properties: dict[bytes, dict[str, Value]] = {}


def decode_start_ok(payload: bytes) -> SaidAtStart:
    """Return what connection.start-ok says. Raises ConnectionException as decode_method does."""
    reader = _Reader(payload, 4, FRAME_ERROR)
    try:
        table = payload[4 : 8 + reader.number(_U32)]
        reader.at = 4
        properties = _known_properties.get(table)
        if properties is None:
            properties = reader.table(0)
            if len(_known_properties) >= KNOWN_PROPERTIES_MAX:
                _known_properties.clear()
            if len(table) <= KNOWN_PROPERTIES_BYTES_MAX:
                _known_properties[table] = properties
        reader.at = 4 + len(table)
        mechanism, response = reader.short_string(), reader.take(reader.number(_U32))
        said = SaidAtStart(properties, mechanism, response, reader.short_string())
        reader.check_end()
    except ConnectionException as error:
        index = commands.Connection.StartOk.index
        raise ConnectionException(error.code, error.text, index >> 16, index & 0xFFFF) from None
    return said


def unchecked(kind: type[M], **fields: Value) -> M:
    """Return a method with these fields, and the defaults of pamqp for the others.

    pamqp's own constructors refuse names of queues, exchanges and vhosts that brokers take, such as
    those with `>` or letters outside of ASCII. A table may be given as its bytes.
    """
    method = kind()
    for name, value in fields.items():
        getattr(method, name)  # a method takes any attribute, also a misspelt one
        setattr(method, name, value)
    return method


def encode_method(method: base.Frame) -> bytes:
    """Return the payload of a method frame."""
    constant = _CONSTANT.get(type(method))
    if constant is not None:
        return constant
    out = bytearray(_INDEX.pack(method.index))
    bits = count = 0
    for name, kind in _fields(type(method)):
        value = getattr(method, name)
        if kind == "bit":
            bits |= bool(value) << count
            count += 1
            continue
        if count:
            out.append(bits)
            bits = count = 0
        out += _FIELD_ENCODERS[kind](value)
    if count:
        out.append(bits)
    return bytes(out)


def decode_table(data: bytes) -> dict[str, Value]:
    """Return a field table that has its length before it and nothing behind it."""
    reader = _Reader(data, 0)
    table = reader.table(0)
    if reader.at != len(data):
        raise _syntax_error("bytes behind a table")
    return table


def skip_value(table: bytes, at: int) -> int:
    """Return where the value that begins at `at` inside a table, with its type, ends.

    Tables and arrays are not looked into, so what is inside may be broken.
    """
    reader = _Reader(table, at)
    kind = reader.take(1)
    if kind in _LONG:
        reader.take(reader.number(_U32))
    elif kind in _SIZES:
        reader.take(_SIZES[kind])
    else:
        raise _syntax_error(f"unknown field type {kind[0]}")
    return reader.at


def encode_table(table: dict[str, Value]) -> bytes:
    """Return a field table with its length before it."""
    data = b"".join(_short_string(key) + _encode_value(value) for key, value in table.items())
    return _U32.pack(len(data)) + data


def _fields(kind: type[base.Frame]) -> list[tuple[str, str]]:
    fields = _FIELDS.get(kind)
    if fields is None:
        names = getattr(kind, "FIELDS", None) or kind.__slots__
        fields = _FIELDS[kind] = [(name, kind.amqp_type(name)) for name in names]
    return fields


def _decode_fields(kind: type[base.Frame], payload: bytes) -> base.Frame:
    # Every field is set below, so defaults are not needed; and pamqp's checks are not ours.
    method = kind.__new__(kind)
    reader = _Reader(payload, 4, FRAME_ERROR)
    plan = _PLANS.get(kind)
    if plan is None:
        plan = _PLANS[kind] = [(name, _FIELD_READERS[of]) for name, of in _fields(kind)]
    bit = 8
    bits = 0
    for name, read in plan:
        if read is not None:
            bit = 8
            setattr(method, name, read(reader))
            continue
        if bit == 8:
            bits, bit = reader.u8(), 0
        setattr(method, name, bool(bits >> bit & 1))
        bit += 1
    reader.check_end()
    return method


_EMPTY: Final = bytes(4)  # the length of a table without values


class _Reader:
    """Reads values out of bytes, never past their end.

    `code` is the reply code for an attempt to do so, as RabbitMQ has it.
    """

    __slots__ = ("at", "code", "data")

    def __init__(self, data: bytes, at: int, code: int = SYNTAX_ERROR) -> None:
        self.data = data
        self.at = at
        self.code = code

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self._cut()
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def check_end(self) -> None:
        """Raise ConnectionException if anything is behind the last field of a method."""
        if self.at != len(self.data):
            raise ConnectionException(FRAME_ERROR, "bytes behind the method's last field")

    def _cut(self) -> ConnectionException:
        return ConnectionException(self.code, "a field ends behind its frame or table")

    def number(self, form: struct.Struct) -> Any:
        at = self.at
        self.at = at + form.size
        if self.at > len(self.data):
            raise self._cut()
        return form.unpack_from(self.data, at)[0]

    def u8(self) -> int:
        at = self.at
        if at >= len(self.data):
            raise self._cut()
        self.at = at + 1
        return self.data[at]

    def u16(self) -> Value:
        return self.number(_U16)

    def u32(self) -> Value:
        return self.number(_U32)

    def u64(self) -> Value:
        return self.number(_U64)

    def short_string(self) -> str:
        start = self.at + 1
        if start > len(self.data) or (end := start + self.data[start - 1]) > len(self.data):
            raise self._cut()
        self.at = end
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError:
            # RabbitMQ's text, for methods with its code; it takes any bytes for a key of a table.
            raise ConnectionException(self.code, "Malformed UTF-8 in shortstr") from None

    def long_string(self) -> str | bytes:
        """Return a long string, as bytes when it is no text."""
        data = self.take(self.number(_U32))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def table(self, depth: int = 0) -> dict[str, Value]:
        if self.data[self.at : self.at + 4] == _EMPTY:
            self.at += 4
            return {}
        inner = self._inner(depth)
        found: dict[str, Value] = {}
        while inner.at < len(inner.data):
            key = inner.short_string()
            found[key] = inner.value(depth + 1)
        return found

    def array(self, depth: int) -> list[Value]:
        inner = self._inner(depth)
        found = []
        while inner.at < len(inner.data):
            found.append(inner.value(depth + 1))
        return found

    def _inner(self, depth: int) -> _Reader:
        # The inner bytes are copied at each depth, so the bound on depth also bounds copying.
        if depth > TABLE_DEPTH_MAX:
            raise _syntax_error(f"tables nested more than {TABLE_DEPTH_MAX} deep")
        return _Reader(self.take(self.number(_U32)), 0)

    def value(self, depth: int) -> Value:
        """Return a value of a table, which has its type before it."""
        kind = self.take(1)
        form = _NUMBERS.get(kind)
        if form is not None:
            return self.number(form)
        match kind:
            case b"S":
                return self.long_string()
            case b"F":
                return self.table(depth)
            case b"A":
                return self.array(depth)
            case b"t":
                return self.u8() != 0
            case b"x":
                return self.take(self.number(_U32))
            case b"V":
                return None
            case b"T":
                return _timestamp(self.take(8))
            case b"D":
                scale = self.u8()
                # Exact, whatever the precision of the thread's context.
                return Decimal(self.number(_U32)).scaleb(-scale, _DECIMALS)
        raise _syntax_error(f"unknown field type {kind[0]}")


def _timestamp(data: bytes) -> Value:
    try:
        return pamqp.decode.timestamp(data)[1]
    except (ValueError, OverflowError, OSError):  # no date in a calendar: return the number
        return _U64.unpack(data)[0]


def _syntax_error(text: str) -> ConnectionException:
    return ConnectionException(SYNTAX_ERROR, text)


# -- out -------------------------------------------------------------------------------------------


def _short_string(value: str | None) -> bytes:
    data = (value or "").encode()
    if len(data) > 255:
        raise ValueError("a short string has at most 255 bytes")
    return bytes([len(data)]) + data


def _long_string(value: str | bytes | None) -> bytes:
    data = value.encode() if isinstance(value, str) else value or b""
    return _U32.pack(len(data)) + data


def _encode_value(value: Value) -> bytes:
    """Return a value of a table with its type before it."""
    match value:
        case bool():
            return b"t\x01" if value else b"t\x00"
        case Long():
            return b"l" + _I64.pack(value)
        case Short():
            return b"s" + _I16.pack(value)
        case int() if value >= 1 << 63:  # a timestamp that is no date
            return b"T" + _U64.pack(value)
        case int():
            return (
                b"I" + _I32.pack(value)
                if -(1 << 31) <= value < 1 << 31
                else b"l" + _I64.pack(value)
            )
        case float():
            return b"d" + _F64.pack(value)
        case str():
            return b"S" + _long_string(value)
        case bytes() | bytearray():
            return b"x" + _long_string(bytes(value))
        case dict():
            return b"F" + encode_table(value)
        case list():
            data = b"".join(map(_encode_value, value))
            return b"A" + _U32.pack(len(data)) + data
        case None:
            return b"V"
        case Decimal():
            return b"D" + pamqp.encode.decimal(value)
    return b"T" + pamqp.encode.timestamp(value)


_INDEX = _U32 = struct.Struct(">I")
_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")
_DECIMALS = Context(prec=20)

# Types as RabbitMQ reads them: s is signed, l and L have 64 bits.
_NUMBERS: Final = {
    b"b": struct.Struct(">b"),
    b"B": _U8,
    b"s": struct.Struct(">h"),
    b"u": _U16,
    b"I": _I32,
    b"i": _U32,
    b"l": _I64,
    b"L": _I64,
    b"f": struct.Struct(">f"),
    b"d": _F64,
}
# The bytes of a value behind its type, and the types whose length comes first.
_SIZES: Final = {
    **{kind: form.size for kind, form in _NUMBERS.items()}, b"t": 1, b"V": 0, b"T": 8, b"D": 5,
}  # fmt: skip
_LONG: Final = (b"S", b"F", b"A", b"x")
# How each type of field is read; bits come several to an octet.
_FIELD_READERS: Final[dict[str, Callable[[_Reader], Value] | None]] = {
    "shortstr": _Reader.short_string,
    "longstr": _Reader.long_string,
    "table": _Reader.table,
    "octet": _Reader.u8,
    "short": _Reader.u16,
    "long": _Reader.u32,
    "longlong": _Reader.u64,
    "bit": None,
}
_FIELD_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "shortstr": _short_string,
    "longstr": _long_string,
    "table": lambda value: value if isinstance(value, bytes) else encode_table(value or {}),
    "octet": _U8.pack,
    "short": _U16.pack,
    "long": _U32.pack,
    "longlong": _U64.pack,
}
# The payloads of methods that are always alike.
_CONSTANT: Final[dict[type[base.Frame], bytes]] = {}
_CONSTANT.update(
    (type(method), encode_method(method))
    for method in (
        ChannelOpenOk(),
        commands.Channel.CloseOk(),
        commands.Connection.CloseOk(),
        commands.Queue.BindOk(),
    )
)
