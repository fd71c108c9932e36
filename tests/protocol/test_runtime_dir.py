from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.runtime_dir import check_runtime_dir, default_runtime_dir


def test_the_users_runtime_directory_is_the_default(tmp_path: Path) -> None:
    if Path("/run/headrace").exists():
        pytest.skip("this machine has /run/headrace")
    found = default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert found == tmp_path / "headrace"


def test_a_shared_temporary_directory_is_never_chosen() -> None:
    if Path("/run/headrace").exists():
        pytest.skip("this machine has /run/headrace")
    with pytest.raises(ConfigError, match="give --runtime-dir"):
        default_runtime_dir({"TMPDIR": "/tmp"})


def test_without_any_directory_the_message_says_what_is_so_and_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice = "; mkdir -m 0700 ~/.headrace, then give --runtime-dir ~/.headrace to every command"
    found: list[str] = []
    for error in (FileNotFoundError, PermissionError):

        def stat(_path: Path, error: type[OSError] = error) -> None:
            raise error

        monkeypatch.setattr(Path, "stat", stat)
        with pytest.raises(ConfigError) as caught:
            default_runtime_dir({})
        found.append(str(caught.value))
    monkeypatch.undo()
    assert found == [
        f"no runtime directory: /run/headrace {what} and XDG_RUNTIME_DIR is not set{advice}"
        for what in ("does not exist", "is not ours")
    ]


def test_a_path_too_long_for_a_socket_is_refused_with_length_and_limit() -> None:
    assert check_runtime_dir(Path("/run/headrace")) == Path("/run/headrace")
    with pytest.raises(ConfigError, match=r"has 11\d bytes, .* may have 100; .*--runtime-dir"):
        check_runtime_dir(Path("/" + "x" * 100))
