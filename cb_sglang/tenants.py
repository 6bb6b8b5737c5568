"""API keys and the tenants they belong to, and what is derived from the server's secret for each tenant.

A key is 256 random bits, so that its plain SHA-256 gives nothing away: no list of likely keys can be tried against it.
A slow hash is for passwords, which people choose; here it would only make every request slow.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cb_sglang.errors import AuthenticationError, InvalidRequestError

VARIABLE = "CB_SGLANG_TENANT_KEYS"
MAX_KEYS = 4_096
MAX_HEADER_CHARS = 512
MAX_FILE_BYTES = 1 << 20
SECRET_BYTES = 32
_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose senders are whose. Raises InvalidRequestError unless the name is 1 to 64 of a-z, 0-9, _ and -."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequestError("a tenant's name is 1 to 64 of the characters a-z, 0-9, _ and -")


DEFAULT_TENANT = Tenant("default")


class Tenants:
    """Who may call. Without keys, everybody is the tenant "default"."""

    def __init__(self, keys: Sequence[tuple[Tenant, bytes]] = ()) -> None:
        """``keys``: tenants with the SHA-256 of a key each; a tenant may have several, so that it can change them."""
        self._keys = tuple(keys)

    @classmethod
    def configured(cls, path: Path | None, environment: Mapping[str, str] = os.environ) -> Tenants:
        """From the file, or from ``CB_SGLANG_TENANT_KEYS``, or without keys when there is neither.

        Raises InvalidRequestError when there are both, or one that cannot be used; it never tells a key or its hash.
        """
        lines = environment.get(VARIABLE)
        if path is None:
            return cls() if lines is None else cls.parse(lines, VARIABLE)
        if lines is not None:
            raise InvalidRequestError(f"tenants' keys come from {path} and from {VARIABLE}; give one of them")
        return cls.parse(_read(path, MAX_FILE_BYTES).decode(errors="replace"), str(path))

    @classmethod
    def parse(cls, lines: str, source: str) -> Tenants:
        """From ``tenant:sha256-hex`` lines; empty ones and those that start with # say nothing.

        Raises InvalidRequestError with the number of the line at fault.
        """
        keys: dict[bytes, Tenant] = {}
        for number, line in enumerate(lines.splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, _, key_hash = text.partition(":")
            if not _NAME.fullmatch(name) or not _SHA256.fullmatch(key_hash):
                raise InvalidRequestError(
                    f"{source}, line {number}: write tenant:sha256, a name of a-z, 0-9, _ and -, and 64 hex digits"
                )
            if bytes.fromhex(key_hash) in keys:
                raise InvalidRequestError(f"{source}, line {number}: this key is there already; remove one of the two")
            keys[bytes.fromhex(key_hash)] = Tenant(name)
        if not 1 <= len(keys) <= MAX_KEYS:
            raise InvalidRequestError(f"{source} has {len(keys)} keys; give 1 to {MAX_KEYS}")
        return cls([(tenant, key_hash) for key_hash, tenant in keys.items()])

    @property
    def has_keys(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._keys)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an ``Authorization: Bearer KEY`` header. Raises AuthenticationError.

        Takes the same time whichever key is the right one, and whether there is one.
        """
        if not self._keys:
            return DEFAULT_TENANT
        if authorization is not None and len(authorization) > MAX_HEADER_CHARS:
            raise AuthenticationError(f"the Authorization header is longer than {MAX_HEADER_CHARS} characters")
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationError("send your API key as the header Authorization: Bearer KEY")
        presented = _hash(key.strip())
        found: Tenant | None = None
        for tenant, key_hash in self._keys:
            found = tenant if hmac.compare_digest(presented, key_hash) else found
        if found is None:
            raise AuthenticationError("this API key is not known here; ask the operator for one")
        return found


def new_key(tenant: str) -> tuple[str, str]:
    """A new key for the tenant to keep, and the line for the operator's file. Raises InvalidRequestError."""
    key = f"cb_{secrets.token_urlsafe(32)}"
    return key, f"{Tenant(tenant).name}:{_hash(key).hex()}"


def salt(secret: bytes, tenant: str) -> str:
    """The tenant's namespace in the radix cache (SGLang's ``extra_key``); clients cannot guess it."""
    return hmac.digest(secret, b"radix namespace of " + tenant.encode(), "sha256").hex()


def namespace(secret: bytes, tenant: str) -> str | None:
    """The tenant's radix namespace; None for the default tenant, who shares SGLang's own with plain requests."""
    return None if tenant == DEFAULT_TENANT.name else salt(secret, tenant)


def sender_id_key(secret: bytes) -> bytes:
    """What senders' ids are made with (``SenderRegistry``)."""
    return hmac.digest(secret, b"ids of senders", "sha256")


def load_or_create_secret(path: Path | None) -> bytes:
    """The server's 32 random bytes, made on the first call; without a path, for this process only.

    Raises InvalidRequestError for a file that others can read, or that does not hold them.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if path is None:
        return secret
    if not os.path.exists(path):
        _create(path, secret)
    found = _read(path, SECRET_BYTES)
    if len(found) != SECRET_BYTES:
        raise InvalidRequestError(f"{path} does not hold {SECRET_BYTES} bytes; move it away, and it is made anew")
    if path.stat().st_mode & 0o077:
        raise InvalidRequestError(f"{path} is a secret that others can read; chmod 600 it")
    return found


def _create(path: Path, secret: bytes) -> None:
    """Write the whole file or none; one that another process has made meanwhile stays."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}; name another place") from error


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise InvalidRequestError(f"{path} is longer than {most} bytes")
    return data


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
