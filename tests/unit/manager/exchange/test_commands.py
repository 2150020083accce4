"""`crl bank export --format` and `crl bank import` of Markdown and skills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crl.manager.exchange import files
from crl.manager.inspection.upkeep import create_bank
from support.bank_commands import bank, error_line, lines
from support.hostile import HOSTILE, entry


def test_every_format_returns_the_bank(bank_run: Path, tmp_path: Path):
    exported = bank("export", bank_run).stdout
    for name, form in (("a.jsonl", "jsonl"), ("a.md", "markdown"), ("skills", "skills")):
        (line,) = lines("export", bank_run, "--format", form, "--out", tmp_path / name)
        assert line.startswith("exported 5 experiences")
        new = tmp_path / f"{name}.sqlite"
        assert lines("import", new, tmp_path / name) == [f"imported 5 experiences into {new}"]
        assert sorted(bank("export", new).stdout.splitlines()) == sorted(exported.splitlines())
    assert (tmp_path / "a.jsonl").read_text("utf-8") == exported
    assert (
        bank("export", bank_run, "--format", "markdown").stdout == (tmp_path / "a.md").read_text()
    )
    folders = sorted(path.name for path in (tmp_path / "skills").iterdir())
    assert folders == ["crl-maze", "crl-room"]
    page = (tmp_path / "skills" / "crl-room" / "SKILL.md").read_text("utf-8")
    assert "of the run **mine** after 2 steps (method complementary, actor tiny-actor" in page
    assert (
        "- Go southwest.\n  *Evidence: lift +0.50 [-1.00, +1.00] over 1 group; won 1 of 1" in page
    )
    imported = lines("export", new, "--format", "markdown")
    assert "run: mine" not in imported
    assert "bank: skills.sqlite" in imported


@pytest.mark.parametrize("form", ["markdown", "skills"])
def test_hostile_banks_return(form: str, tmp_path: Path):
    texts = [text for text in HOSTILE if text.strip()]
    entries = [entry(i, text, task=text, goal=text) for i, text in enumerate(texts)]
    create_bank(tmp_path / "a.sqlite", entries)
    out = tmp_path / ("a.md" if form == "markdown" else "a")
    printed = lines("export", tmp_path / "a.sqlite", "--format", form, "--out", out)
    assert all(line.isprintable() for line in printed)
    lines("import", tmp_path / "b.sqlite", out)
    a, b = (bank("export", tmp_path / name).stdout for name in ("a.sqlite", "b.sqlite"))
    assert sorted(a.splitlines()) == sorted(b.splitlines())
    assert {path.name for path in tmp_path.iterdir()} == {"a.sqlite", "b.sqlite", out.name}


def test_edits_are_reported(bank_run: Path, tmp_path: Path):
    lines("export", bank_run, "--format", "markdown", "--out", tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text("utf-8")
    (tmp_path / "a.md").write_text(text.replace("- Go southwest.", "- Go south."), "utf-8")
    assert lines("import", tmp_path / "new.sqlite", tmp_path / "a.md")[1:] == [
        "without counters: 1 that were written by hand or edited",
        "left out: 1 whose text was edited or removed",
    ]
    (line,) = lines("import", tmp_path / "newer.sqlite", tmp_path / "a.md", "--json")
    counts = {"imported": 5, "new": 1, "left_out": 1}
    assert json.loads(line) == counts | {"bank": f"{tmp_path}/newer.sqlite"}


def test_an_export_overwrites_only_exports_and_only_on_request(bank_run: Path, tmp_path: Path):
    page, skills = tmp_path / "a.md", tmp_path / "skills"
    page.write_text("old")
    markdown = ("export", bank_run, "--format", "markdown", "--out")
    assert "the file already exists. Choose another path, or add --overwrite" in error_line(
        *markdown, page
    )
    assert page.read_text() == "old"
    lines(*markdown, page, "--overwrite")
    assert page.read_text("utf-8").startswith("---\nrun: mine\n")
    skills.mkdir()
    assert "is a directory. Give the path of a file" in error_line(*markdown, skills, "--overwrite")
    export = ("export", bank_run, "--format", "skills", "--out", skills)
    lines(*export)  # into an empty directory
    assert "the directory is not empty" in error_line(*export)
    for other in (
        skills / "notes.txt",
        skills / "crl-room" / "run.sh",
        skills / "my-own" / "SKILL.md",
    ):
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
        message = error_line(*export, "--overwrite")
        assert "also contains" in message
        assert "which is not an exported skill" in message
        assert other.read_text() == "mine"
        other.unlink()
    (skills / "my-own").rmdir()
    lines(*export, "--overwrite")
    target = tmp_path / "link"
    target.symlink_to(skills)
    assert "is not a directory" in error_line(*export[:-1], target, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "link", "skills"]


def test_a_failed_export_leaves_the_old_one(
    bank_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    skills = tmp_path / "skills"
    export = ("export", bank_run, "--format", "skills", "--out", skills)
    lines(*export)
    before = {path: path.read_bytes() for path in skills.rglob("*.*") if path.is_file()}
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if source.name == "draft":
            raise OSError(28, "No space left on device")
        return rename(source, target)

    monkeypatch.setattr(files.Path, "rename", failing)
    assert "cannot be written (No space left on device)" in error_line(*export, "--overwrite")
    assert {path: path.read_bytes() for path in skills.rglob("*.*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [skills]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "skills"], "--out = None: is required for skills and for --overwrite"),
        (["--overwrite"], "--out = None: is required"),
        (["--format", "markdwn"], "--format = 'markdwn': is not one of the choices"),
        (["--out", "/no/such/folder/a"], "cannot be written (No such file or directory)"),
    ],
)
def test_invalid_options_are_named(options: list[str], message: str, bank_run: Path):
    assert message in error_line("export", bank_run, *options)


def test_an_invalid_page_creates_no_bank(tmp_path: Path):
    (tmp_path / "a.md").write_text("# Nothing\n")
    message = error_line("import", tmp_path / "new.sqlite", tmp_path / "a.md")
    assert f"{tmp_path}/a.md:1 = '# Nothing': the file holds no experiences" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]
