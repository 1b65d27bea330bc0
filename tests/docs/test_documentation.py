"""The documentation is true: its code runs, its commands are known, its links lead somewhere, and its output is printed."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoshard import Dump, Mesh, Options, Overlap, plan
from autoshard.cli.main import _parser, main
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, code_spans, hidden_code, links
from tests.spawn import run_on_ranks

README, QUICKSTART = ROOT / "README.md", ROOT / "examples" / "quickstart.py"
SLOW = ("README", "checkpoints", "debugging", "reading_a_plan", "recipes", "search")  # pages that plan for seconds
FOLDERS = ("autoshard", "passes", "tests", "examples", "benchmarks", "docs")


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in PAGES]
)
def test_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    module = ModuleType(f"docs_page_{page.stem}")  # Dynamo imports the module of what it traces
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    try:
        exec(hidden_code(page, "prelude"), vars(module))
        for block in blocks_of(page):
            _do(block, page, module)
            printed += capsys.readouterr().out
            if block.is_printed:
                _check_printed(block, page, printed)
    finally:
        exec(hidden_code(page, "after"), vars(module))


def _do(block: Block, page: Path, module: ModuleType) -> None:
    """Run a block, or look at it as far as it can be looked at."""
    if block.language == "python":
        code = compile("\n" * block.line + block.text, str(page), "exec")
        if block.runs:
            exec(code, vars(module))
        elif page != README:
            assert not _unknown_names(block, vars(module))
    if block.language == "console":
        for words in block.commands:
            arguments = _checked_command(words)
            if block.runs and arguments is not None:
                assert main(arguments) == 0, " ".join(words)


def _checked_command(words: list[str]) -> list[str] | None:
    """Return the arguments of `python -m autoshard`; None for another command, which has to be there."""
    if words[0] == "torchrun" and "-m" not in words:
        assert (ROOT / words[-1]).is_file(), words
        return None
    name = words[words.index("-m") + 1] if "-m" in words else words[0]
    if name != "autoshard":
        assert name.startswith("benchmarks."), words
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file()
        return None
    arguments = words[words.index("-m") + 2 :]
    if arguments != ["--help"]:
        _parser(arguments[0]).parse_args(arguments)
        return arguments
    return None


def _unknown_names(block: Block, known: dict[str, object]) -> set[str]:
    """Return names that a block reads and neither it, nor the page before it, nor Python defines."""
    tree = ast.parse(block.text)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "import", "exec"), known)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    return {node.id for node in names} - defined - known.keys() - vars(builtins).keys()


def _check_printed(block: Block, page: Path, printed: str) -> None:
    lines = {line.rstrip() for line in printed.splitlines()}
    missing = [line for line in block.text.splitlines() if line.rstrip() not in lines]
    assert not missing, f"{page.name} shows what its code does not print:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        target, _, heading = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{page.name}: {link}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_commands_that_prose_names_are_there(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for span in code_spans(page):
        if re.match(rf"({'|'.join(FOLDERS)})/\S*$", span):
            assert list(ROOT.glob(span)), f"{page.name}: {span}"
        if span.startswith("python -m benchmarks."):
            _checked_command(span.split())
        if span.startswith("make "):
            assert span.split()[1] in targets, f"{page.name}: {span}"


def test_every_page_is_in_the_index() -> None:
    listed = links(ROOT / "docs" / "index.md")
    assert {page.name for page in PAGES if page.name != "index.md"} == {Path(link).name for link in listed}


def test_every_command_is_in_the_index() -> None:
    known = next(iter(_parser("")._subparsers._group_actions)).choices
    listed = re.findall(r"^\| `python -m autoshard (\w+)` \|", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(known)


def test_readme_is_read_in_one_sitting() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("kind", [Options, Overlap, Dump])
def test_every_option_is_described(kind: type) -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.M)
    if kind is Options:
        assert dict(rows) == {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(kind)}
    missing = [field.name for field in dataclasses.fields(kind) if f"`{field.name}" not in text]
    assert not [name for name in missing if name != "folder"]


def test_readme_shows_the_example_and_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = (block.text for block in blocks_of(README)[:2])
    source = QUICKSTART.read_text(encoding="utf-8")
    assert code in source
    monkeypatch.setenv("COLUMNS", "100")
    example = ModuleType("quickstart")
    monkeypatch.setitem(sys.modules, "quickstart", example)
    tree = ast.parse(source)  # its model alone, on the lines that it stands on: the rest needs four processes
    tree.body = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import | ast.ClassDef)]
    exec(compile(tree, str(QUICKSTART), "exec"), vars(example))
    batch = torch.randn(64, 32), torch.randint(10, (64,))
    options = Options(recipe={"dp": "fsdp", "tp": "megatron"}, hardware=None)
    made = plan(example.Classifier(), Mesh("dp=2,tp=2"), batch, options=options)
    assert str(made).splitlines() == shown.replace("4 ranks of cpu", "4 ranks").splitlines()


def _quickstart(rank: int) -> str:
    """Run the example on a rank as torchrun would, and return what it prints."""
    os.environ["COLUMNS"] = "100"
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(QUICKSTART), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.gloo
def test_quickstart_prints_what_readme_shows_and_trains() -> None:
    output = run_on_ranks(_quickstart, 4)[0]
    assert blocks_of(README)[1].text in output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
