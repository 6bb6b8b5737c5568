"""API keys and tenants: who gets in, and what a bad file says (never a key)."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from cb_sglang.errors import AuthenticationError, InvalidRequestError
from cb_sglang.tenants import (
    DEFAULT_TENANT,
    MAX_HEADER_CHARS,
    MAX_KEYS,
    VARIABLE,
    Tenant,
    Tenants,
    load_or_create_secret,
    namespace,
    new_key,
    salt,
    sender_id_key,
)


def test_without_keys_everybody_is_the_default_tenant() -> None:
    tenants = Tenants()
    assert not tenants.has_keys
    assert tenants.authenticate(None) == tenants.authenticate("Bearer anything") == DEFAULT_TENANT


def test_a_key_is_its_tenant() -> None:
    (mine, my_line), (mine_too, my_other_line), (yours, your_line) = new_key("me"), new_key("me"), new_key("you-2_b")
    tenants = Tenants.parse(f"# keys\n\n {my_line}\n{your_line}\r\n{my_other_line}", "FILE")
    assert tenants.has_keys
    assert tenants.authenticate(f"Bearer {mine}") == tenants.authenticate(f"bearer  {mine_too} ") == Tenant("me")
    assert tenants.authenticate(f"BEARER {yours}") == Tenant("you-2_b")


def test_who_is_not_let_in() -> None:
    key, line = new_key("me")
    tenants = Tenants.parse(line, "FILE")
    refused = [
        None,
        "",
        "Bearer",
        "Bearer ",
        key,
        f"Basic {key}",
        f"Bearer {key}x",
        f"Bearer {key[:-1]}",
        "Bearer é\udcff",
    ]
    refused += [f"Bearer {line.partition(':')[2]}", f"Bearer {key} {key}", f"Bearer {key}" + " " * MAX_HEADER_CHARS]
    for header in refused:
        with pytest.raises(AuthenticationError) as caught:
            tenants.authenticate(header)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert key not in caught.value.message


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_key(f"t{n}") for n in range(5)]
    tenants = Tenants.parse("\n".join(line for _, line in made), "FILE")
    compared: list[bool] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a == b)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    for key, _ in made:
        tenants.authenticate(f"Bearer {key}")
    with pytest.raises(AuthenticationError):
        tenants.authenticate("Bearer unknown")
    assert len(compared) == 6 * 5 and sum(compared) == 5


def test_keys_are_hashed_at_rest() -> None:
    key, line = new_key("me")
    assert line == f"me:{hashlib.sha256(key.encode()).hexdigest()}"
    assert len(key) == len("cb_") + 43  # 256 bits in base64
    assert new_key("me")[0] != key


@pytest.mark.parametrize("name", ["", "A", "a b", "a:b", "ä", "a" * 65, "a\n", "../a"])
def test_names_of_tenants(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="a-z"):
        new_key(name)


@pytest.mark.parametrize(
    "line", ["me", "me:", ":" + "0" * 64, "Me:" + "0" * 64, "me:" + "0" * 63, "me:" + "G" * 64, "me:key_in_clear_5678"]
)
def test_a_bad_line_is_named_by_number(line: str) -> None:
    good = new_key("me")[1]
    with pytest.raises(InvalidRequestError, match="FILE, line 3: write tenant:sha256") as caught:
        Tenants.parse(f"# first\n{good}\n{line}\n", "FILE")
    assert "5678" not in caught.value.message and good.partition(":")[2] not in caught.value.message


def test_a_key_stands_once() -> None:
    line = new_key("me")[1]
    for again in (line, line.replace("me:", "you:")):
        with pytest.raises(InvalidRequestError, match="line 2: this key is there already"):
            Tenants.parse(f"{line}\n{again}", "FILE")


def test_no_keys_in_a_file_never_means_open_to_all() -> None:
    with pytest.raises(InvalidRequestError, match="has 0 keys"):
        Tenants.parse("# nothing\n", "FILE")
    many = "\n".join(f"me:{n:064x}" for n in range(MAX_KEYS + 1))
    with pytest.raises(InvalidRequestError, match=f"give 1 to {MAX_KEYS}"):
        Tenants.parse(many, "FILE")


def test_where_keys_come_from(tmp_path: Path) -> None:
    (key, line), path = new_key("me"), tmp_path / "keys"
    path.write_text(line)
    assert Tenants.configured(path, {}).authenticate(f"Bearer {key}") == Tenant("me")
    assert Tenants.configured(None, {VARIABLE: line}).authenticate(f"Bearer {key}") == Tenant("me")
    assert not Tenants.configured(None, {}).has_keys
    for environment, file, told in (
        ({VARIABLE: line}, path, "give one of them"),
        ({VARIABLE: ""}, None, "has 0 keys"),
        ({}, tmp_path / "none", "cannot be read"),
        ({}, tmp_path, "cannot be read"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            Tenants.configured(file, environment)
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidRequestError, match="longer than"):
        Tenants.configured(path, {})
    path.write_bytes(b"\xff\xfe:\n")
    with pytest.raises(InvalidRequestError, match="line 1"):
        Tenants.configured(path, {})


def test_salts_differ_by_tenant_and_secret() -> None:
    made = {salt(secret, tenant) for secret in (b"1" * 32, b"2" * 32) for tenant in ("a", "b", "default")}
    assert len(made) == 6 and all(len(one) == 64 for one in made)
    assert salt(b"1" * 32, "a") == salt(b"1" * 32, "a")
    assert sender_id_key(b"1" * 32).hex() not in made


def test_only_the_default_tenant_shares_sglangs_own_namespace() -> None:
    assert namespace(b"1" * 32, DEFAULT_TENANT.name) is None
    assert namespace(b"1" * 32, "a") == salt(b"1" * 32, "a")


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    secret = load_or_create_secret(path)
    assert len(secret) == 32 and load_or_create_secret(path) == secret == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    assert load_or_create_secret(None) != load_or_create_secret(None)


def test_servers_that_start_at_once_share_the_secret(tmp_path: Path) -> None:
    path, found, start = tmp_path / "secret", [], threading.Barrier(8)

    def load() -> None:
        start.wait()
        found.append(load_or_create_secret(path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and set(found) == {path.read_bytes()}


def test_a_secret_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for content in (b"", b"short", bytes(33)):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(InvalidRequestError, match=r"does not hold 32 bytes|longer than 32 bytes"):
            load_or_create_secret(path)
    path.write_bytes(bytes(32))
    path.chmod(0o640)
    with pytest.raises(InvalidRequestError, match="chmod 600"):
        load_or_create_secret(path)
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        load_or_create_secret(path / "below")
