"""Errors of the command line: what is unknown is named, with what may have been meant."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

import headrace
from compute.__main__ import main as compute_main
from compute.frontend.__main__ import main as frontend_main
from expert_daemon.__main__ import main as daemon_main
from protocol.flag_parser import FlagParser


def _parser_of(command: str) -> Any:
    parser: Any = headrace.build_parser([command])
    return parser._commands.choices[command]


FLAGS_OF_COMMANDS = {
    name: list(_parser_of(name)._option_string_actions)
    for name in headrace.COMMANDS
    if name != "daemon"
}


def _error(capsys, arguments, main=headrace.main):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--temprature", "0", "Once upon a time"],
        ["generate", "Once upon a time", "--temprature", "0"],
        ["generate", "--seed", "1", "--temprature=0", "Once upon a time"],
        ["generate", "--prompt-ids", "1,2", "--temprature", "-1"],
    ],
)
def test_a_mistyped_flag_is_named_with_the_nearest_and_not_the_prompt(capsys, arguments):
    said = _error(capsys, arguments)
    assert "there is no flag --temprature; did you mean --temperature?" in said
    assert said.startswith("usage: headrace generate")
    assert "Once" not in said.splitlines()[-1]


@pytest.mark.parametrize("command", sorted(FLAGS_OF_COMMANDS))
def test_every_command_names_its_own_flags(capsys, command):
    flags = [flag for flag in FLAGS_OF_COMMANDS[command] if len(flag) > 6]
    for flag in flags or ["--help"]:
        wrong = flag[:4] + flag[5:]
        said = _error(capsys, [command, wrong, "1"])
        assert f"there is no flag {wrong}; did you mean --" in said
        assert said.startswith(f"usage: headrace {command}")


@pytest.mark.parametrize(
    ("main", "arguments", "flag"),
    [
        (headrace.main, ["cache", "resize", "--wiat", "3", "64MiB"], "--wait"),
        (headrace.main, ["cache", "--jsn", "warm"], "--json"),
        (headrace.main, ["daemon", "--aren", "64MiB"], "--arena"),
        (headrace.main, ["--versoin"], "--version"),
        (daemon_main, ["--aren", "64MiB"], "--arena"),
        (compute_main, ["--chunks", "3"], "--chunk"),
        (frontend_main, ["--prot", "3"], "--port"),
    ],
)
def test_so_do_actions_and_the_processes_themselves(capsys, main, arguments, flag):
    assert f"did you mean {flag}?" in _error(capsys, arguments, main)


def test_the_daemons_usage_is_that_of_the_command_that_ran_it(capsys):
    assert _error(capsys, ["daemon", "--aren", "1"]).startswith("usage: headrace daemon")
    assert _error(capsys, ["--aren"], daemon_main).startswith("usage: python -m expert_daemon")


def test_a_mistyped_command_is_named_with_the_nearest(capsys):
    said = _error(capsys, ["genrate", "Once"])
    assert "there is no command 'genrate'; did you mean generate?" in said
    assert "there is no action 'wram'; did you mean warm?" in _error(capsys, ["cache", "wram"])


def test_one_argument_too_many_is_that_commands_error(capsys):
    said = _error(capsys, ["generate", "Once", "upon"])
    assert said.startswith("usage: headrace generate")
    assert "error: one argument too many: 'upon'\n" in said


def test_a_long_usage_gives_way_to_what_is_wrong(capsys):
    said = _error(capsys, ["generate", "--temprature", "0"])
    assert said.splitlines() == [
        "usage: headrace generate [flags] [prompt]",
        "headrace generate: error: there is no flag --temprature; did you mean --temperature?",
        "headrace generate --help tells of all flags",
    ]


def test_a_short_usage_stands_as_it_is(capsys):
    parser = FlagParser("short")
    parser.add_argument("--level", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--level", "x"])
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "usage: short [-h] [--level LEVEL]"
    assert "--help" not in said


def test_nothing_like_it_gives_no_advice(capsys):
    assert "did you mean" not in _error(capsys, ["generate", "--zzzzzz"])


def test_values_that_look_like_flags_are_left_alone():
    parser = FlagParser()
    parser.add_argument("text", nargs="?")
    parser.add_argument("--stop", action="append")
    parser.add_argument("--bias", type=float)
    parser.add_argument("--pair", nargs=2)
    parser.add_argument("--maybe", nargs="?", const="x")
    parser.add_argument("--many", nargs="*")
    assert parser.parse_args(["-"]).text == "-"
    assert parser.parse_args(["- not a flag"]).text == "- not a flag"
    assert parser.parse_args(["--", "--no-flag"]).text == "--no-flag"
    assert parser.parse_args(["--bias", "-1.5"]).bias == -1.5
    assert parser.parse_args(["--stop=--x", "-3"]) == argparse.Namespace(
        text="-3", stop=["--x"], bias=None, pair=None, maybe=None, many=None
    )
    assert parser.parse_args(["--pair", "a", "b", "--maybe", "--many", "c", "d"]).many == ["c", "d"]


def test_words_of_the_process_are_looked_at_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headrace", "generate", "--temprature", "0"])
    assert "did you mean --temperature?" in _error(capsys, None)
