"""``headwater-client join`` takes its token from a file or the standard input, never from argv."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from headwater.client.cli import app
from headwater.common.errors import JoinTokenBroken

TOKEN = "headwater-join-1.c2VjcmV0"


def join(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["join", *arguments], input=typed)


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [(TOKEN,), ("-",), (TOKEN, "--folder", "there")])
def test_a_token_among_the_arguments_is_refused_and_not_repeated(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = join(*arguments, typed=TOKEN)
    assert result.exit_code == 2
    assert "TokenInArguments" in said(result)
    assert "--token-file FILE" in said(result)
    assert TOKEN not in said(result)
    assert not list(tmp_path.iterdir())


def test_a_token_is_read_from_a_file_or_the_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    for result in (join("--token-file", str(file)), join("--token-file", "-", typed=TOKEN)):
        assert JoinTokenBroken.__name__ in said(result)
        assert "incomplete" in said(result), "it was read up to its check sum"
    assert "incomplete" in said(join(typed=TOKEN))


def test_no_token_at_all_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for result in (join(typed=""), join("--token-file", str(tmp_path / "empty"))):
        assert "JoinTokenBroken: expected a join token, found nothing" in said(result)


def test_the_help_of_join_shows_no_argument() -> None:
    assert "Usage: headwater-client join [OPTIONS] Make this" in said(
        CliRunner().invoke(app, ["join", "--help"], prog_name="headwater-client")
    )


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = join("--token-file", str(tmp_path / "no-token"))
    assert result.exit_code == 2
    assert "no-token: No such file or directory" in said(result)
