"""The command line: a plan for a model in a file; a mistake is one message on stderr and exit code 2."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from autoshard import ShardingPlan
from autoshard.cli.flags import with_flags
from autoshard.cli.main import DONE, USERS_FAULT, main
from autoshard.cli.target import load_target
from autoshard.config.display import Display

ROOT = Path(__file__).parents[2]

SOURCE = """
import sys
import torch
from torch import nn

WIDTH = 8

def small(batch: int = 6, seq: int = 4):
    x = torch.zeros(batch, seq, WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)), (x,)

def named(*, width):
    return nn.Linear(width, width), (torch.zeros(2, width),), {}

def broken():
    raise KeyError("weights")

def leaves():
    sys.exit(1)

def bare():
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").write_text("model")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("autoshard_target_")]:
        del sys.modules[name]


def plan(*words: str) -> int:
    return main(["plan", "model.py:small", "--mesh", "dp=2,tp=2", "--hardware", "h100", *words])


def test_plan_prints_and_saves(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "fsdp+megatron", "-o", "plan.json") == DONE
    printed = capsys.readouterr()
    saved = ShardingPlan.load("plan.json")
    assert printed.out.startswith("plan on 4 ranks of h100: dp=2 fsdp, tp=2 megatron\n")
    assert saved.inputs["input"].shape == (6, 4, 8)
    lines = printed.err.splitlines()
    assert lines[-1] == f"saved plan.json, fingerprint {saved.fingerprint}"
    assert [line.split(":")[0] for line in lines][:2] == ["model", "capture"]
    assert "\x1b" not in printed.err + printed.out


def test_show_prints_a_saved_plan_as_it_was_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "ddp", "--batch", "4", "-o", "plan.json") == DONE
    printed = capsys.readouterr().out
    assert main(["show", "plan.json"]) == DONE
    assert capsys.readouterr().out == printed


def test_plan_and_show_write_the_same_page_and_trace(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "ddp", "--batch", "4", "-o", "plan.json", "--html", "a.html", "--trace", "a.json") == DONE
    assert capsys.readouterr().err.splitlines()[-2:] == ["wrote a.html", "wrote a.json"]
    assert main(["show", "plan.json", "--html", "b.html", "--trace", "b.json"]) == DONE
    assert (target / "a.html").read_text() == (target / "b.html").read_text()
    assert (target / "a.json").read_text() == (target / "b.json").read_text()


def test_the_table_of_recipes_is_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are long where a batch is padded; without a terminal, a table is 80 columns wide by default."""
    monkeypatch.delenv("COLUMNS")
    words = ["--mesh", "dp_replicate=2,dp_shard=2,tp=2", "--hardware", "h100", "--batch", "63"]
    assert main(["recipes", "model.py:small", *words]) == DONE
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("candidate"))
    rows = [line for line in lines[head + 1 :] if line.startswith(("* ", "  ")) and ": " not in line]
    assert any("batch padded for" in row for row in rows) and max(map(len, rows)) > 80
    assert all(row.endswith("fits") for row in rows)


def test_sizes_go_to_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--batch", "10", "--seq", "3", "-o", "plan.json") == DONE
    assert ShardingPlan.load("plan.json").inputs["input"].shape == (10, 3, 8)


def test_a_recipe_per_axis_mixed_precision_and_no_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "dp=ddp,tp=none", "--bf16", "--inference", "-o", "plan.json") == DONE
    made = ShardingPlan.load("plan.json")
    assert made.recipes == ("ddp", None)
    assert made.settings.options["mixed_precision"] == {
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "output_dtype": None,
        "cast_forward_inputs": True,
    }
    assert not made.settings.training


def test_no_recipe_on_any_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "none", "-o", "plan.json") == DONE
    assert ShardingPlan.load("plan.json").recipes == (None, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan model.py --mesh dp=2", "cannot read the target 'model.py'; write it as 'file.py:function'"),
        (
            "plan modle.py:small --mesh dp=2",
            "there is no file 'modle.py'; the target is 'file.py:function', seen from {cwd}",
        ),
        ("plan notes.txt:small --mesh dp=2", "'notes.txt' is no Python file; the target is 'file.py:function'"),
        (
            "plan model.py:smal --mesh dp=2",
            "model.py has no 'smal'; its functions are small, named, broken, leaves, bare. Did you mean 'small'?",
        ),
        ("plan model.py:WIDTH --mesh dp=2", "model.py:WIDTH is int, not a function that gives (model, args)"),
        (
            "plan model.py:broken --mesh dp=2",
            """model.py:broken raised KeyError: 'weights' (model.py:16: raise KeyError("weights"))""",
        ),
        ("plan model.py:leaves --mesh dp=2", "model.py:leaves raised SystemExit: 1 (model.py:19: sys.exit(1))"),
        (
            "plan model.py:bare --mesh dp=2",
            "model.py:bare gives Linear; it has to give (model, args) or (model, args, kwargs): an nn.Module, a tuple "
            "and a dict",
        ),
        (
            "plan model.py:bare --mesh dp=2 --batch 4",
            "model.py:bare takes (), which does not go with --batch 4: got an unexpected keyword argument 'batch'; "
            "--batch and --seq give the arguments of these names",
        ),
        (
            "plan model.py:named --mesh dp=2",
            "model.py:named takes (*, width), which does not go with no arguments: missing a required argument: "
            "'width'; --batch and --seq give the arguments of these names",
        ),
        (
            "plan model.py:small --mesh dp2",
            "cannot read 'dp2' in mesh 'dp2'; write it as 'dp=2,tp=4'",
        ),
        (
            "plan model.py:small",
            "the following arguments are required: --mesh; see `python -m autoshard plan --help`",
        ),
        (
            "plan model.py:small --mesh dp=2 --batch many",
            "argument --batch: invalid int value: 'many'; see `python -m autoshard plan --help`",
        ),
        (
            "plan model.py:small --mesh dp=2 --recipe fdsp",
            "unknown recipe 'fdsp'; recipes are fsdp, zero2, ddp, hsdp, megatron, context, context(gather), context(ring), "
            "context(all_to_all), fsdp_context, fsdp_context(gather), fsdp_context(ring), fsdp_context(all_to_all), or two of "
            "them joined, such as 'fsdp+megatron'. Did you mean 'fsdp'?",
        ),
        (
            "plan model.py:small --mesh dp=2 --recipe pp=fsdp",
            "unknown mesh axis 'pp'; this mesh has dp=2: name one of these",
        ),
        (
            "plan model.py:small --mesh dp=2 --recipe dp=fsdp,dp=ddp",
            "--recipe dp=fsdp,dp=ddp: axis 'dp' is given two recipes; leave one out",
        ),
        *(
            (
                f"plan model.py:small --mesh dp=2,tp=2 --recipe {recipe}",
                f"--recipe {recipe}: give each axis a recipe, or none: dp=fsdp,tp=none",
            )
            for recipe in ("dp=", "=fsdp", "dp=fsdp,tp", "dp=fsdp,")
        ),
        (
            "plan model.py:small --mesh dp=2 --recipe fsdp -o none/plan.json",
            "there is no folder 'none' to save none/plan.json in; make it, or give another path",
        ),
        (
            "plan model.py:small --mesh dp=2 --recipe fsdp --html none/plan.html",
            "there is no folder 'none' to save none/plan.html in; make it, or give another path",
        ),
        (
            "show plan.json --trace none/trace.json",
            "there is no folder 'none' to save none/trace.json in; make it, or give another path",
        ),
        (
            "explain plan.json --mesh dp=2 --what x",
            "plan.json is a saved plan, which has its mesh and options: leave --mesh out, or give file.py:function to plan",
        ),
        (
            "explain plan.json --what x --recipe ddp --bf16 --memory-limit 1GB",
            "plan.json is a saved plan, which has its mesh and options: leave --bf16, --memory-limit, --recipe out, or give "
            "file.py:function to plan",
        ),
        (
            "crossover --devices 8",
            "a crossover has one unknown: give the tokens or the hidden size, not both or neither",
        ),
        ("hsdp --nodes 1", "--nodes 1: HSDP shards inside nodes and copies between them; give 2 or more"),
        ("hsdp --per-node 0", "--per-node 0: give 1 or more, at most 1e+15"),
        ("hsdp --parameters nan", "--parameters nan: give 1 or more, at most 1e+15"),
        ("hsdp --parameters inf", "--parameters inf: give 1 or more, at most 1e+15"),
        ("hsdp --parameters 0.5", "--parameters 0.5: give 1 or more, at most 1e+15"),
        ("hsdp --buckets 0", "--buckets 0: give 1 or more, at most 1e+15"),
        ("crossover --devices 8 --tokens 0", "--tokens 0: give 1 or more, at most 1e+15"),
        ("hsdp --nodes 10000000000000000", "--nodes 10000000000000000: give 1 or more, at most 1e+15"),
        ("plan model.py:small --mesh dp=2 -o .", ". is a folder; give the path of a file in it"),
        (
            "calibrate --quick -o this.txt",
            "--hardware reads figures from a .json file; write them to this.json",
        ),
        (
            "plan model.py:small --mesh dp=2 --time-limit -1",
            "--time-limit -1.0: give seconds, 0 or more, or leave it out for no limit",
        ),
        (
            "plan model.py:small --mesh dp=2 --time-limit nan",
            "--time-limit nan: give seconds, 0 or more, or leave it out for no limit",
        ),
        (
            "plan model.py:small --mesh dp=2 --memory-limit 0GB",
            "--memory-limit 0GB: give bytes above 0, or text such as '60GB' or '60GiB'",
        ),
        (
            "plan model.py:small --mesh dp=2 --dump out",
            "unrecognized arguments: --dump out; see `python -m autoshard plan --help`",
        ),
        ("--dump plan", "unrecognized arguments: --dump; see `python -m autoshard --help`"),
        (
            "calibrate --quick -o none/this.json",
            "there is no folder 'none' to save none/this.json in; make it, or give another path",
        ),
        (
            "show none.json",
            "the plan none.json cannot be read: No such file or directory; give the path that it was saved to",
        ),
    ],
)
def test_a_mistake_is_one_message(
    words: str, expected: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == USERS_FAULT
    assert capsys.readouterr().err.splitlines()[-1] == f"autoshard: {expected.format(cwd=target)}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan syntax.py:f --mesh dp=2", "autoshard: syntax.py cannot be imported: SyntaxError: "),
        ("plan model.py:small --mesh dp=2 --hardware h10", "autoshard: unknown hardware 'h10' (did you mean 'h100'?)"),
        ("simulate", "autoshard: argument command: invalid choice: 'simulate' (choose from "),
    ],
)
def test_a_mistake_that_others_describe(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == USERS_FAULT
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize(
    ("target", "billions", "tokens"),
    [
        ("llama.py:llama3_8b", 8.03, (64, 8192)),
        ("llama.py:llama3_70b", 70.55, (64, 8192)),
        ("llama.py:llama3_405b", 405.85, (32, 8192)),
        ("gpt.py:gpt2", 0.12, (64, 1024)),
    ],
)
def test_the_examples_are_targets(target: str, billions: float, tokens: tuple[int, int]) -> None:
    made = load_target(str(ROOT / "examples" / target), {})
    assert round(sum(p.numel() for p in made.model.parameters()) / 1e9, 2) == billions
    assert [tuple(arg.shape) for arg in made.args] == [tokens, tokens]
    assert all(tensor.is_meta for tensor in (*made.model.parameters(), *made.args))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("crossover --devices 8 --hardware h100 --tokens 16384", "faster from H ="),
        ("hsdp --nodes 100 --hardware h100", "hsdp"),
    ],
)
def test_questions_are_answered(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == DONE
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "clock"), [(True, "0:00:00"), (False, "solve: ")])
def test_phases_have_a_clock_on_a_terminal_and_a_line_each_in_a_pipe(terminal: bool, clock: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with Display(console) as display:
        display("capture")
        display("solve")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert clock in text and "capture" in text
    assert ("\x1b" in text) is terminal
    assert "in all, at most" in text.splitlines()[-1]


def test_a_failed_phase_does_not_end() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(ValueError, match="no"), Display(console) as display:
        display("capture")
        raise ValueError("no")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


@pytest.mark.slow
def test_the_command_exits_with_its_code() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autoshard", "show", "none.json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[-1].startswith("autoshard: the plan none.json cannot be read")


def test_a_message_names_the_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--recipe", "fsdp", "--memory-limit", "100") == USERS_FAULT
    found = re.search(r"Give --memory-limit (\d+), --recipe auto, .* or --bf16\. ", capsys.readouterr().err)
    assert found is not None
    assert plan("--recipe", "fsdp", "--memory-limit", found[1]) == DONE


@pytest.mark.parametrize(("flag", "size"), [("--batch", "0"), ("--seq", "-4")])
def test_a_size_below_1_is_refused(flag: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(flag, size) == USERS_FAULT
    assert f"{flag} {size}: give 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Options(memory_limit='60'): give bytes", "--memory-limit 60: give bytes"),
        ("give Options(hardware='h100') or", "give --hardware h100 or"),
        ("such as Options(recipe={'dp': 'fsdp', 'tp': None})", "such as --recipe dp=fsdp,tp=none"),
        ("Options(inputs={'x': {'dp': 'S(1)'}})", "Options(inputs={'x': {'dp': 'S(1)'}})"),
        ("fails\n  model.py:3: run(recipe='auto')", "fails\n  model.py:3: run(recipe='auto')"),
    ],
)
def test_settings_are_written_as_options(message: str, expected: str) -> None:
    assert with_flags(message) == expected
