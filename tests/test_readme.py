"""The README and CONTRIBUTING tell the truth: commands parse, files exist, transcripts are what commands print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from v41c.cli import cli, main
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.passes.pipeline import pass_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EngineOf = Callable[[Path, str], Path]


def commands() -> list[str]:
    """Command lines of ours: after a prompt in a transcript, or in the text with an argument."""
    shown = re.findall(r"^\$ (v41c .+)$", README, re.MULTILINE)
    return shown + [line for line in re.findall(r"`(v41c [^`]+)`", README) if " " in line and line == line.lower()]


def test_the_two_commands_stand_there_verbatim() -> None:
    assert "```sh\npip install -e . && v41c demo\n```" in README
    assert "```sh\npip install -e '.[test]' && pytest\n```" in README


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str) -> None:
    _, verb, *arguments = shlex.split(command.partition(" | ")[0])
    assert verb in cli.commands
    try:
        cli.commands[verb].make_context(verb, arguments)
    except click.MissingParameter:
        assert "$" not in command  # in running text an argument may be left out


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_verb_is_mentioned(verb: str) -> None:
    assert f"v41c {verb}" in README


def test_options_exist() -> None:
    known = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert mentioned - known <= {"--help"}


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_files_exist(text: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    folders = "v41c|ir|frontend|passes|targets|codegen|runtime|tests|docs"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", text) + re.findall(r"`(\w+\.md|\.ci/run)`", text)
    assert links + paths
    for path in links + paths:
        assert (ROOT / path).exists(), path


def test_the_continuation_is_what_the_engine_says(engine_of: EngineOf, capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(engine_of(TRAINED_CHECKPOINT, "release"))
    shown = re.findall(r"^\$ (v41c run engine [^\n]+)\n(.*?)^loaded", README, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for command, text in shown:
        arguments = shlex.split(command.replace(" engine ", f" {engine} "))[1:]
        assert main(arguments) == 0
        assert capsys.readouterr().out == text


def test_the_ledger_is_that_of_the_passes() -> None:
    table = README.partition("$ v41c compile")[2].partition("written  ")[0]
    rows = [line.split()[0] for line in table.splitlines() if re.match(r"[a-z-]+ +\d", line)]
    assert rows == ["trace", *pass_names()]
