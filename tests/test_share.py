"""Completion files and manual pages: they are those of the command line, and shells and `man` take them."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from scripts import make_share

SHARE = Path(__file__).parents[1] / "share"
BASH = SHARE / "bash-completion/completions/ckpttool"
ZSH = SHARE / "zsh/site-functions"
FISH = SHARE / "fish/vendor_completions.d/ckpttool.fish"
PAGES = sorted(SHARE.glob("man/man1/*"))
# A line up to the cursor, and what is offered there.
LINES = {
    "ckpttool mer": {"merge"},
    "ckpttool reshard --to h": {"hf", "hybrid"},
    "ckpttool reshard SRC DST --to=torch": {"torch-bin"},
    "ckpttool reshard --tp-": {"--tp-out"},
    "ckpttool merge --method dare_": {"dare_linear", "dare_ties"},
    "ckpttool merge -o sh": {"share/"},
    "ckpttool inspect sh": {"share/"},
    "ckpttool inspect --ranks sh": {"share/"},
    "ckpttool reshard --tp-out sh": set(),
    "ckpttool reshard --family transformers/afm": {"transformers/afmoe"},
    "ckpttool reshard --family sh": {"share/"},
}


def here(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def test_up_to_date() -> None:
    """`python scripts/make_share.py` writes them."""
    found = {str(p.relative_to(SHARE)): p.read_text(encoding="utf-8") for p in SHARE.rglob("*") if p.is_file()}
    expected = make_share.generated()
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert found[name] == text, f"share/{name} is old: python scripts/make_share.py"


def asked(program: str, *words: str) -> str:
    """What it prints; it says nothing of what is wrong."""
    done = subprocess.run([program, *words], cwd=SHARE.parent, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.stdout


@here("bash")
def test_bash() -> None:
    script = f"source {BASH}; compopt() {{ :; }}\n"
    for line in LINES:
        words = " ".join(line.replace("=", " = ").split(" "))
        script += f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); _ckpttool\n"
        script += 'echo "${COMPREPLY[@]}"\n'
    offered = asked("bash", "-c", script).splitlines()
    # `complete -o filenames`, which is not there without readline, adds the slash.
    assert [{*o.split()} for o in offered] == [{w.rstrip("/") for w in words} for words in LINES.values()]


@here("fish")
def test_fish() -> None:
    script = f"source {FISH}\n" + "".join(f"complete -C '{line}'; echo ---\n" for line in LINES)
    offered = asked("fish", "--no-config", "-c", script).split("---\n")[:-1]
    found = [{row.partition("\t")[0].rpartition("=")[2] for row in rows.splitlines()} for rows in offered]
    assert found == list(LINES.values())


# What is offered goes to a file, as does the end of each completion; the terminal is for zsh only.
ZSH_SETUP = """\
PS1=; fpath=({zsh} $fpath); autoload -U compinit; compinit -u -d {work}/dump; unsetopt beep
compadd() {{
  local -a hits
  if [[ " ${{(@)@[1,(i)(-|--)]}}" != *\\ -[OAD]\\ * ]]; then
    builtin compadd -A hits "$@"
    print -rl -- $hits >> {work}/out
  fi
  builtin compadd "$@"
}}
ended() {{ print -- --- >> {work}/out; zle kill-whole-line }}
zle -N ended
bindkey '^G' ended
bindkey '^I' complete-word
"""


@here("zsh")
def test_zsh(tmp_path: Path) -> None:
    """As for a user: zsh finds the file by its place, and loads it with the first Tab."""
    asked("zsh", "-f", "-n", str(ZSH / "_ckpttool"))
    (tmp_path / "setup").write_text(ZSH_SETUP.format(zsh=ZSH, work=tmp_path), encoding="utf-8")
    keys = f"source {tmp_path}/setup\n" + "".join(f"{line}\t\x07" for line in LINES)
    outside, terminal = pty.openpty()
    words = ["zsh", "-f", "-i"]
    environment = {**os.environ, "TERM": "vt100"}
    with subprocess.Popen(
        words,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=SHARE.parent,
        env=environment,
        start_new_session=True,
    ) as zsh:
        os.close(terminal)
        offered: list[str] = []
        for part in keys.splitlines(keepends=True):
            os.write(outside, part.encode())
        until = time.monotonic() + 60
        while len(offered) < len(LINES) and time.monotonic() < until:
            if select.select([outside], [], [], 0.02)[0]:
                os.read(outside, 65536)  # or zsh waits
            out = tmp_path / "out"
            offered = re.findall(r"(.*?)^---$", out.read_text(), re.DOTALL | re.MULTILINE) if out.exists() else []
        zsh.kill()
    os.close(outside)
    assert [{*o.split()} for o in offered] == [{w.rstrip("/") for w in words} for words in LINES.values()]


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(words, marks=here(words[0]), id=words[0])
        for words in (("mandoc", "-T", "lint", "-W", "warning"), ("groff", "-man", "-T", "utf8", "-ww", "-z"))
    ],
)
def test_page(page: Path, reader: tuple[str, ...]) -> None:
    """Nothing to complain of."""
    assert not asked(*reader, str(page))
