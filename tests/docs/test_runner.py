"""The runner of the pages: it runs what it should, and it can fail."""

from __future__ import annotations

import sysconfig
import textwrap
from concurrent.futures import ThreadPoolExecutor
from socket import AF_UNIX, SOCK_SEQPACKET, socket
from typing import TYPE_CHECKING

import pytest

from tests.docs.client import KILLED, order
from tests.docs.runner import (
    Block,
    PageError,
    Session,
    blocks,
    commands,
    output_matches,
    plain_arguments,
    problems,
    updated,
)

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """\
    # A page

    ```console
    $ echo one; echo two >&2
    one
    two

    $ printf 'a\\nb\\nc\\n'
    a
    ...
    $ cat fixtures/f.txt
    hel...rld
    $ false
    [exit 1]
    $ echo no; exit 3
    no
    [exit 3]
    ```

    - in a list:

      ```console
      $ cat > made.txt <<'EOF'
      > x = 1
      >
      >   y = 2
      > EOF
      $ wc -l \\
          < made.txt
      3
      ```

    ```python
    from pathlib import Path

    made = Path("made.txt").read_text()
    print("not compared")
    ```

    ```python
    assert made.startswith("x = 1")
    Path("from_python.txt").write_text("hi")
    ```

    ````console
    $ cat from_python.txt
    hi
    ````
    """


@pytest.fixture
def session(tmp_path: Path) -> Session:
    root = tmp_path / "root"
    (root / "fixtures").mkdir(parents=True)
    (root / "fixtures" / "f.txt").write_text("hello world\n")
    folder = tmp_path / "page"
    folder.mkdir()
    return Session(folder, root=root)


def page(text: str) -> str:
    return textwrap.dedent(text)


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


def test_a_true_page_passes(session: Session) -> None:
    assert list(session.check(page(PAGE), "page.md")) == []
    assert list(problems(page(PAGE))) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["$ echo one", "two"], "got:\n  one"),
        (["$ echo one"], "expected:\n  (nothing)"),
        (["$ true", "one"], "got:\n  (nothing)"),
        (["$ echo one; echo two", "one"], "  two"),
        (["$ echo one", "one", "...", "two"], "got:\n  one"),
        (["$ false"], "exit status: expected 0, got 1"),
        (["$ true", "[exit 1]"], "exit status: expected 1, got 0"),
        (["$ no-such-command-here", "..."], "got 127"),
        (["$ echo a >&2", "b"], "got:\n  a"),
    ],
)
def test_a_false_page_fails(session: Session, lines: list[str], words: str) -> None:
    (difference,) = session.check(console(*lines), "page.md")
    assert difference.startswith("page.md:2: $ ")
    assert words in difference


def test_every_difference_is_told(session: Session) -> None:
    text = console("$ echo one", "two") + console("$ echo fine", "fine", "$ echo three", "four")
    assert [difference.split(": ")[0] for difference in session.check(text, "p.md")] == ["p.md:2", "p.md:8"]


def test_python_that_raises_fails(session: Session) -> None:
    with pytest.raises(ZeroDivisionError):
        list(session.check("```python\n1 / 0\n```\n", "page.md"))


def test_examples_do_not_see_the_repository(session: Session) -> None:
    differences = list(session.check(console("$ echo bye > fixtures/f.txt"), "page.md"))
    assert differences == []
    assert (session.folder.parent / "root" / "fixtures" / "f.txt").read_text() == "hello world\n"


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ([], [], True),
        ([], ["a"], False),
        (["..."], [], True),
        (["..."], ["a", "b"], True),
        (["a", "...", "d"], ["a", "b", "c", "d"], True),
        (["a", "...", "d"], ["a", "d", "c"], False),
        (["...", "b", "...", "c"], ["b", "x", "b", "c"], True),
        (["...", "b", "...", "b"], ["b"], False),
        (["x...z"], ["xyz"], True),
        (["x...z"], ["xy", "z"], False),
        (["size (MB) ..."], ["size (MB) 12"], True),
        (["a", "..."], ["a"], True),
    ],
)
def test_wildcards(expected: list[str], actual: list[str], same: bool) -> None:
    assert output_matches(tuple(expected), tuple(actual)) is same


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```console notest\n$ ckpttool --help\n```\n", "every console block runs"),
        ("```bash\nckpttool inspect x\n```\n", "never runs"),
        ("```sh\ncd x && ckpttool inspect x\n```\n", "never runs"),
        ("```text\n$ ckpttool inspect x\n```\n", "never runs"),
        ("```\n$ ckpttool inspect x\n```\n", "never runs"),
    ],
)
def test_blocks_that_would_not_run_are_found(text: str, words: str) -> None:
    (problem,) = problems(text)
    assert words in problem


def test_other_blocks_are_left_alone() -> None:
    assert list(problems("```sh\nmake setup\npip install ckpttool\n```\n\n```yaml\ntool: ckpttool\n```\n")) == []


def test_bad_markdown_is_told() -> None:
    with pytest.raises(PageError, match="line 3: this block is never closed"):
        blocks("a\n\n```console\n$ x\n")
    (block,) = blocks("```console\noutput first\n```\n")
    with pytest.raises(PageError, match="line 2: a console block starts with a command"):
        commands(block)


def test_update_changes_only_what_differs(session: Session) -> None:
    text = "\n".join(
        [
            "before",
            "",
            console("$ echo one; echo two", "one", "...", "", "$ echo new", "old", "[exit 2]", "$ exit 3", "x"),
            "- in a list",
            "  ```console",
            "  $ printf 'a\\n\\nb\\n'",
            "  ```",
            "```sh",
            "echo untouched",
            "```",
            "after",
            "",
        ]
    )
    assert updated(text, session, "page.md") == "\n".join(
        [
            "before",
            "",
            console("$ echo one; echo two", "one", "...", "", "$ echo new", "new", "$ exit 3", "[exit 3]"),
            "- in a list",
            "  ```console",
            "  $ printf 'a\\n\\nb\\n'",
            "  a",
            "",
            "  b",
            "  ```",
            "```sh",
            "echo untouched",
            "```",
            "after",
            "",
        ]
    )
    (second := session.folder.parent / "second").mkdir()
    again = updated(text, session, "page.md")
    assert updated(again, Session(second, root=second), "page.md") == again


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("ckpttool inspect a --filter 'x.*'", ["inspect", "a", "--filter", "x.*"]),
        ("ckpttool inspect a \\\n    --json", ["inspect", "a", "--json"]),
        ('ckpttool merge "a b" -o c', ["merge", "a b", "-o", "c"]),
        ("ckpttool inspect a --json | head", None),
        ("ckpttool inspect *", None),
        ("ckpttool inspect $HOME", None),
        ('ckpttool inspect "$HOME"', None),
        ("ckpttool --version; ls", None),
        ("ckpttool inspect a\nls", None),
        ("cat ckpttool", None),
    ],
)
def test_what_needs_no_shell(text: str, arguments: list[str] | None) -> None:
    assert plain_arguments(text) == arguments


@pytest.mark.thorough  # `make docs-check` runs all of tests/docs
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("inspect nowhere", 2),
        ("--version", 0),
        ("inspect < fixtures/f.txt; cd fixtures; COLUMNS=40 ckpttool inspect -h", 0),
        ("reshard", 2),
        ("inspect -h", 0),
        ("inspect fixtures --json 2>&1 | tail -n 3", 0),
    ],
)
def test_all_ways_do_what_the_console_script_does(session: Session, arguments: str, status: int) -> None:
    """In this process, on the PATH of a shell, and the script itself, which a line gets that names a limit."""
    outcomes = []
    for text in (f"ckpttool {arguments}", f"true; ckpttool {arguments}", f": ulimit; ckpttool {arguments}"):
        (command,) = commands(Block("console", 1, (f"$ {text}",)))
        outcomes.append(session.run(command))
    assert outcomes == [outcomes[2]] * 3
    assert outcomes[0].status == status


def test_a_line_that_sets_limits_is_no_fork(session: Session) -> None:
    for text, script in (("command -v ckpttool", False), ("ulimit -f 1; command -v ckpttool", True)):
        (command,) = commands(Block("console", 1, (f"$ {text}",)))
        (found,) = session.run(command).output
        assert (found == f"{sysconfig.get_path('scripts')}/ckpttool") is script


def test_a_command_that_ends_without_a_status_is_told(tmp_path: Path) -> None:
    server = str(tmp_path / "s")
    with socket(AF_UNIX, SOCK_SEQPACKET) as listener, ThreadPoolExecutor() as threads:
        listener.bind(server)
        listener.listen()
        status = threads.submit(order, server, ["--version"], "/", {}, (0, 1, 2), 60)
        listener.accept()[0].close()
        assert status.result() == KILLED
