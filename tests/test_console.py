"""The screen: lines and a bar where there is a terminal, nothing on other ranks."""

import sys

from training.during.console import Console


def test_without_a_terminal_there_are_plain_lines_and_no_bar(capsys):
    console = Console()
    console.start(total=3)
    console.print("hello")
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out == "hello\n" and shown.err == ""


def test_on_a_terminal_lines_go_to_stdout_and_the_bar_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console()
    console.start(total=3, done=1)
    console.print("hello")
    console.advance()
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out.strip("\r\n") == "hello" and "1/3" in shown.err


def test_other_ranks_are_silent_even_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(enabled=False)
    console.start(total=3)
    console.print("hello")
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""
