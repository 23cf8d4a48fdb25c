"""What the README says is run: its commands, its config, its links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_it_opens_with_one_sentence_and_then_make_sweep_with_its_output() -> None:
    title, sentence, example = README.split("\n\n")[:3]
    assert title == "# autotune"
    assert len(re.findall(r"[.!?](?:\s|$)", sentence)) == 1
    assert example.startswith("```\n$ make sweep\n")
    assert re.search(r"ms ±\d+% compiled", README.split("```")[1])


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README


@pytest.mark.compiler
def test_its_commands_work_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = [
        line.removeprefix("$ ")
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert any(c.startswith("autotune sweep") for c in commands)
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "autotune"
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert not done.stderr, f"{command}: quiet when not a terminal"


def test_its_config_loads(tmp_path: Path) -> None:
    configs = [b for b in blocks("yaml") if "problems:" in b]
    assert configs
    for text in configs:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        assert config.load(path).problems


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    here = (ROOT / page).parent
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t]
    missing = [t for t in targets if not (here / t).exists()]
    named = re.findall(r"`((?:configs|benchmarks|docs|tests)/[\w./-]+\.\w+)`", text)
    missing += [n for n in named if not (ROOT / n).exists()]
    assert not missing


def test_make_has_the_two_commands_of_a_fresh_clone() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\nsweep:" in makefile
    assert "\ntest:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()
