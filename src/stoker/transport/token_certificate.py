"""A TLS certificate derived from the token, the same for all holders of the token.

Its private key is derived from the token. So each end knows which certificate the other must show,
and only a process with the token can show it. TLS 1.3 encrypts traffic with keys of the single
connection: even with the token, nobody can decrypt recorded traffic.

Python's ssl module can use certificates but not make them. This module makes one with arithmetic on
NIST's curve P-256, in about 20 ms (bench/results/encryption.json). The arithmetic does not resist
timing attacks; it runs once per process, on a secret that peers never time.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

# The curve P-256 (FIPS 186-4, D.1.2.3): y^2 = x^3 - 3x + b modulo _PRIME. _GENERATOR is a point of
# prime order _ORDER.
_PRIME = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_GENERATOR = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int]

# Object identifiers, and the subject's name, as DER.
_EC_KEY = bytes.fromhex("06072a8648ce3d0201")
_P256 = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
_NAME = bytes.fromhex("3011310f300d06035504030c0673746f6b6572")  # CN=stoker
_VALIDITY = b"\x17\x0d000101000000Z\x18\x0f99991231235959Z"  # from 2000 to 9999: it never expires


class TokenCertificate(NamedTuple):
    """A self-signed certificate and its private key."""

    certificate: bytes
    """DER."""
    key: bytes
    """PEM; secret."""


def make_certificate(token: bytes) -> TokenCertificate:
    secret = _derive_scalar(token, b"key")
    x, y = _multiply(secret, _GENERATOR)
    point = _bit_string(b"\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big"))
    to_be_signed = _sequence(
        _der(0xA0, _integer(2)),  # version 3
        _integer(1),
        _ECDSA_SHA256,
        _NAME,
        _sequence(_VALIDITY),
        _NAME,
        _sequence(_sequence(_EC_KEY, _P256), point),
    )
    key = _sequence(
        _integer(1), _der(0x04, secret.to_bytes(32, "big")), _der(0xA0, _P256), _der(0xA1, point)
    )
    signature = _bit_string(
        _signature(to_be_signed, secret, _derive_scalar(token, b"nonce" + to_be_signed))
    )
    pem = b"-----BEGIN EC PRIVATE KEY-----\n%s-----END EC PRIVATE KEY-----\n"
    return TokenCertificate(
        _sequence(to_be_signed, _ECDSA_SHA256, signature), pem % base64.encodebytes(key)
    )


def _derive_scalar(token: bytes, purpose: bytes) -> int:
    """Return a number from 1 to the order less 1, from 512 bits, so that all are equally likely."""
    digest = hmac.digest(token, b"stoker certificate\x00" + purpose, "sha512")
    return int.from_bytes(digest, "big") % (_ORDER - 1) + 1


def _signature(data: bytes, secret: int, nonce: int) -> bytes:
    """Sign with ECDSA. Two signatures with one nonce would reveal the secret, so it is derived
    from the data."""
    digest = int.from_bytes(hashlib.sha256(data).digest(), "big")
    r = _multiply(nonce, _GENERATOR)[0] % _ORDER
    s = pow(nonce, -1, _ORDER) * (digest + r * secret) % _ORDER
    return _sequence(_integer(r), _integer(s))


def _multiply(number: int, point: _Point) -> _Point:
    """Return ``number`` times a point, by doubling and adding; 0 < number < order."""
    result: _Point | None = None
    for digit in f"{number:b}":
        if result is not None:
            result = _add(result, result)
        if digit == "1":
            result = point if result is None else _add(result, point)
    assert result is not None
    return result


def _add(left: _Point, right: _Point) -> _Point:
    (x1, y1), (x2, y2) = left, right
    if left == right:
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _PRIME)
    x = (slope * slope - x1 - x2) % _PRIME
    return x, (slope * (x1 - x) - y1) % _PRIME


def _der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = (length.bit_length() + 7) // 8
    return bytes([tag, 0x80 | size]) + length.to_bytes(size, "big") + content


def _sequence(*contents: bytes) -> bytes:
    return _der(0x30, *contents)


def _integer(number: int) -> bytes:
    return _der(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _bit_string(content: bytes) -> bytes:
    return _der(0x03, b"\x00", content)
