"""Files with a secret are refused where others may read them, in one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.link import channel_credentials, kv_contexts, server_credentials
from jdisagg.serve.cluster.router_process import read_secret

SECRET = "sixteen bytes of secret, or more"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_that_its_owner_alone_may_read_is_taken(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    assert read_secret(Settings(secret_file=str(secret))) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o660])
def test_a_secret_that_others_may_read_or_write_is_refused_with_its_mode_and_name(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(ConfigError) as refused:
        read_secret(Settings(secret_file=str(secret)))
    assert f"--secret_file={secret} has mode {mode:04o}" in str(refused.value)
    assert f"chmod 600 {secret}" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", [server_credentials, channel_credentials, kv_contexts])
def test_a_private_key_that_others_may_read_is_refused(secret: Path, reader) -> None:
    secret.chmod(0o644)
    settings = Settings(tls_cert=str(secret), tls_key=str(secret))
    with pytest.raises(ConfigError, match=f"--tls_key={secret} has mode 0644"):
        reader(settings)
