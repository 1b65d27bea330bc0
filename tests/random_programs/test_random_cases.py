"""Random programs of fixed seeds give the numbers of one device, and the generator does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch

from passes._torch.inductor.corrections import corrected
from passes._torch.inductor.corrections.reads_after_scatters import READS_AFTER_SCATTERS
from passes._torch.supported import release
from tests.extended import extended
from tests.random_programs.draw import draw, runs
from tests.random_programs.evaluate import EQUAL, GOOD, REFUSED, Outcome, evaluate
from tests.random_programs.found import FOUND
from tests.random_programs.holes import SIZES, Scope
from tests.random_programs.parts import CLOSING, OPENING, Parts, write_table
from tests.random_programs.productions import PRODUCTIONS
from tests.random_programs.program import ALONE, Case, Layer, Program, Setting, default_dtype
from tests.random_programs.results import read, result_of, summary
from tests.random_programs.shrink import shrunk

SLOW = 22  # cases of one slow test; a case takes half a second of CPU in the mean


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name: str) -> None:
    outcome = evaluate(FOUND[name])
    assert outcome.kind == EQUAL, f"{outcome.what}\n{outcome.detail}"


@pytest.mark.parametrize("seed", range(4))
def test_a_program_gives_the_numbers_of_one_device(seed: int) -> None:
    _check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", [122, extended(122 + SLOW)])
def test_programs_give_the_numbers_of_one_device(first: int) -> None:
    for seed in range(first, first + SLOW):
        _check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [530029, 530053])  # the second one is varied
def test_compiled_programs_give_the_numbers_of_one_device(seed: int) -> None:
    _check(seed, compiled=True)


def _check(seed: int, *, compiled: bool = False) -> None:
    outcome = evaluate(draw(seed, ranks=compiled, compiled=compiled))
    assert outcome.kind in GOOD, f"seed {seed}: {outcome.what}\n{outcome.detail}"


# --- the generator


def test_every_production_can_be_drawn() -> None:
    missing = []
    for name, line in PRODUCTIONS.items():
        random, tries = Random(0), 30
        with default_dtype("float64"), torch.random.fork_rng():
            torch.manual_seed(0)
            if not any(_applies(line, random) for _ in range(tries)):
                missing.append(name)
    assert missing == []


def _applies(line: str, random: Random) -> bool:
    values = {f"v{rank}": torch.randn(*[4, 8, 4, 4][:rank]) for rank in (3, 1, 2, 4)}
    scope = Scope(random, SIZES[:2], {**values, "v5": torch.randn(4, 8) + 1j})
    try:
        scope.add(line)
    except Exception:
        return False
    return True


def test_a_seed_gives_the_same_case_which_survives_json() -> None:
    for seed in range(20):
        case = draw(seed)
        assert case == draw(seed)
        again = Case.from_json(json.loads(json.dumps(case.to_json())))
        assert again.program.source() == case.program.source() and again.setting == case.setting


PROGRAM = Program(
    {"a0": "torch.randn(4, 8)", "a1": "torch.randn(4, 8)"},
    {"p0": "nn.Parameter(torch.randn(8, 8))", "p1": "nn.Parameter(torch.randn(8))"},
    ("v0 = F.linear(a0, self.p0)", "v1 = v0 * 2\nv1.add_(1)", "v2 = v1.softmax(-1)", "v3 = v2 + a1 * self.p1"),
    "v3.sum() + v0.sum()",
)


def test_a_failing_case_is_cut_down_to_what_fails() -> None:
    setting = Setting("dp=4,tp=2", "a100", {"dp": "fsdp", "tp": "ddp"}, options={"loss": "sum"}, memory=0.5)
    case = shrunk(Case(PROGRAM, setting), lambda one: "softmax" in one.program.source() and "dp" in one.setting.mesh)
    assert case.program == Program({"a0": "torch.randn(4, 8)"}, {}, ("v2 = a0.softmax(-1)",), "v2")
    assert case.setting == Setting("dp=2", "auto", {"dp": None}, training=False)


def test_layers_are_cut_as_well() -> None:
    layer = Layer({"p0": "nn.Parameter(torch.randn(8))"}, ("v0 = h * self.p0", "v1 = v0.cumsum(0)"), "h + v1", 3)
    lines = ("v0 = a0\nfor layer in self.layers:\n    v0 = layer(v0)", "v1 = v0.exp()")
    program = Program({"a0": "torch.randn(4, 8)"}, {}, lines, "v1.sum()", layer=layer)
    case = shrunk(Case(program, Setting("dp=2")), lambda one: "cumsum" in one.program.source())
    assert case.program.layer == Layer({}, ("v1 = h.cumsum(0)",), "v1", 1)


def test_a_program_that_makes_tensors_is_drawn_in_its_dtype() -> None:
    assert draw(101598).program.dtype == "float64"


def test_a_program_without_finite_numbers_is_not_drawn() -> None:
    assert runs(Program({"a0": "torch.randn(4)"}, {}, ("v0 = a0.abs().sqrt()",)))
    assert not runs(Program({"a0": "torch.randn(4)"}, {}, ("v0 = a0.log()",)))
    assert not runs(Program({"a0": "torch.randn(4)"}, {}, ("v0 = a0.view(3)",)))


# --- outcomes


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        (Setting("dp=2", "h100"), EQUAL),
        (Setting("dp=2", "h100", memory=0.001), EQUAL),  # by the limit that the error suggests
        (Setting("dp=3", None, {"dp": "fsdp"}), EQUAL),  # a batch of 4, padded
        (Setting("dp=2", None, {"dp": "fsdp"}, options={"params": {"p0": {"dp": "S(4)"}}}), REFUSED),
    ],
)
def test_outcomes(setting: Setting, kind: str) -> None:
    assert evaluate(Case(PROGRAM, setting)).kind == kind


def test_a_wrong_number_and_an_error_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(PROGRAM, Setting("dp=2", None, {"dp": "ddp"}))

    def raising(*_: object, **__: object) -> None:
        raise KeyError("p0")

    monkeypatch.setattr("autoshard.debug.checking.make_plan", raising)
    outcome = evaluate(case)
    assert (outcome.kind, outcome.what) == ("internal", "KeyError: _ at test_random_cases.py raising")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [extended("eager"), "inductor"])
def test_ranks_are_compared_with_the_model(ranks: str) -> None:
    outcome = evaluate(Case(PROGRAM, Setting("dp=2", "h100", {"dp": "fsdp"}, ranks=ranks)))
    assert outcome.kind == EQUAL, outcome.detail


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_train_a_model_without_parameters() -> None:
    program = Program({"a0": "torch.randn(8, 4).requires_grad_()"}, {}, ("v0 = a0.exp()",), "v0.sum()")
    assert evaluate(Case(program, Setting("dp=2", "h100", {"dp": "ddp"}, ranks="eager"))).kind == EQUAL


POOLED = Program(
    {"a0": "torch.randn(1, 4, 6, 7)", "a1": "torch.rand(1, 5, 6, 7) > 0.5"},
    {"m0": "nn.Conv2d(4, 5, 3, padding=1)"},
    ("v0 = self.m0(a0)", "v1 = torch.where(a1, v0, F.max_pool2d(v0, 3, 1, 1))"),
    "v1.sum()",
)


@pytest.mark.slow
@pytest.mark.skipif(release() >= (2, 14), reason="Inductor is right without the correction that the test takes away")
def test_a_fault_of_compiled_code_is_found_and_said_to_be_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(one for one in corrected.CORRECTIONS if one is not READS_AFTER_SCATTERS)
    monkeypatch.setattr(corrected, "CORRECTIONS", others)
    outcome = evaluate(Case(POOLED, Setting("dp=1", None, "fsdp", ranks=ALONE)))
    assert (outcome.kind, outcome.what) == ("wrong", "compiled code, torch.compile's as well")
    assert "step 0, gradient m0.bias is off by" in outcome.detail


# --- results


def test_results_are_kept_and_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    kept = [result_of(seed, Case(PROGRAM, Setting("dp=2")), outcome, 0.5) for seed, outcome in enumerate(OUTCOMES)]
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, kept)) + '\n{"seed": 4, "ki', encoding="utf-8")
    assert [one["seed"] for one in read(file)] == [0, 1, 2]
    assert summary(read(file)).splitlines() == [
        "1 equal, 1 refused, 1 wrong",
        "      1 refused: InputError: a batch   seeds 1",
        "      1 wrong: results of mm   seeds 2",
    ]


OUTCOMES: list[Outcome] = [
    Outcome("equal", ops=("aten.mm.default",)),
    Outcome("refused", "InputError: a batch"),
    Outcome("wrong", "results of mm", "by far"),
]


def test_the_table_replaces_the_one_before(tmp_path: Path) -> None:
    page, parts = tmp_path / "page.md", _parts(*OUTCOMES)
    page.write_text(f"Before.\n{OPENING}\nold\n{CLOSING}\nAfter.\n", encoding="utf-8")
    write_table(page, parts)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "| the search | 3 | 1 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "seeds 0 to 2 on commit abc" in text and "seed 2: wrong: results of mm; not mended" in text
    write_table(page, parts)
    assert page.read_text(encoding="utf-8") == text


def test_parts_survive_json_and_a_rerun_tells_what_is_mended(tmp_path: Path) -> None:
    file, again = tmp_path / "parts.json", result_of(2, Case(PROGRAM, Setting("dp=2")), OUTCOMES[0], 0.5)
    _parts(*OUTCOMES).save(file)
    parts = Parts.load(file)
    assert parts == _parts(*OUTCOMES)
    (part,) = parts.with_results([again], "def").parts
    assert part.outcomes["all"] == {"equal": 1, "refused": 1, "wrong": 1} and part.commit == "abc"
    assert [(one.kind, one.now) for one in part.failures] == [("wrong", "equal")]


def _parts(*outcomes: Outcome) -> Parts:
    case = Case(PROGRAM, Setting("dp=2"))
    return Parts().with_results([result_of(seed, case, one, 0.5) for seed, one in enumerate(outcomes)], "abc")
