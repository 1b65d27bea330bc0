"""The border with torch: patches stay where they are wanted, releases that lack something are refused, imports are cheap."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._inductor import config

from passes._torch.inductor import inductor_config
from passes._torch.inductor.inductor_config import check_source, checked_settings
from passes._torch.patches import once, replaced
from passes._torch.supported import NEWEST, OLDEST, check_release, release

SETTINGS = checked_settings(config.get_config_copy())


def owner() -> types.ModuleType:
    made = types.ModuleType("owner")
    vars(made)["name"] = lambda: "torch's"
    return made


def test_a_replaced_function_is_that_of_its_thread_alone() -> None:
    one, told = owner(), list[str]()
    original = one.name
    with replaced(one, "name", lambda: "ours"):
        other = threading.Thread(target=lambda: told.append(one.name()))
        other.start()
        other.join()
        with replaced(one, "name", lambda: "inner"):
            told.append(one.name())
        told.append(one.name())
    assert told == ["torch's", "inner", "ours"]
    assert one.name is original


def test_threads_that_replace_one_function_leave_what_was_there() -> None:
    one, told = owner(), list[str]()
    original, entered = one.name, threading.Barrier(2)

    def run(text: str) -> None:
        with replaced(one, "name", lambda: text):
            entered.wait(10)
            told.append(one.name())

    threads = [threading.Thread(target=run, args=(text,)) for text in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == ["first", "second"]
    assert one.name is original


def test_a_lasting_patch_is_made_once() -> None:
    made: list[int] = []
    for number in range(3):
        once("a patch of this test", partial(made.append, number))
    assert made == [0]


def test_a_release_that_is_too_old_is_refused() -> None:
    assert release("2.14.1+cu130") == (2, 14)
    with pytest.raises(ImportError) as caught:
        check_release("2.12.1")
    assert str(caught.value) == "autoshard needs torch 2.13 or newer, and this is torch 2.12.1; install a newer one"


def test_a_release_that_is_newer_than_the_tests_is_warned_of() -> None:
    with pytest.warns(UserWarning) as caught:
        check_release("2.15.0")
    assert str(caught[0].message) == (
        "autoshard is tested up to torch 2.14, and this is torch 2.15.0; compare its plans with one device (autoshard.check), "
        "or install an older torch"
    )


def test_the_constraints_pin_the_oldest_and_the_newest_release() -> None:
    root = Path(__file__).parents[1]
    newest = f"constraints-{NEWEST[0]}.{NEWEST[1]}.txt"
    pins = [(root / name).read_text(encoding="utf-8").partition("torch==")[2] for name in ("constraints.txt", newest)]
    assert [release(pin) for pin in pins] == [OLDEST, NEWEST]
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


HINT = (
    "It supports torch 2.13 or newer; install the release that its constraints.txt pins, or a newer autoshard"
)


def test_a_setting_that_inductor_lacks_is_named() -> None:
    without = {name: value for name, value in SETTINGS.items() if name != "dedup_reduce_scatters"}
    with pytest.raises(ImportError) as caught:
        checked_settings(without, "2.13.0")
    assert str(caught.value) == (
        "autoshard cannot work with torch 2.13.0: Inductor has no setting 'dedup_reduce_scatters', which keeps collectives "
        f"in order. {HINT}"
    )


def test_a_setting_of_a_newer_release_is_wanted_there() -> None:
    name = "aten_distributed_optimizations.enable_simple_overlap"
    assert checked_settings(SETTINGS | {name: True}, "2.14.0")[name] is False
    without = {one: value for one, value in SETTINGS.items() if one != name}
    assert name not in checked_settings(without, "2.13.0")
    with pytest.raises(ImportError, match=f"torch 2.14.0: Inductor has no setting '{name}'"):
        checked_settings(without, "2.14.0")


def test_a_new_setting_that_reorders_is_named() -> None:
    assert checked_settings(SETTINGS | {"reorder_collectives_more": False}, "2.13.0") == SETTINGS
    with pytest.raises(ImportError) as caught:
        checked_settings(SETTINGS | {"reorder_collectives_more": True}, "2.13.0")
    assert str(caught.value) == (
        "autoshard cannot work with torch 2.13.0: Inductor's setting 'reorder_collectives_more' is new, on, and may reorder "
        f"collectives. {HINT}"
    )


def test_an_import_refuses_a_release_whose_settings_are_not_those_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source says what is declared; where it does not show that all is well, the imported configuration decides."""
    asked: list[str] = []
    monkeypatch.setattr(inductor_config, "checked_settings", lambda config, version: asked.append(version))
    text = (Path(torch.__file__).parent / "_inductor" / "config.py").read_text()
    for number, source in enumerate(
        (
            text,
            text.replace("dedup_reduce_scatters", "deduplicate"),
            text + "\nreorder_collectives_more = os.environ.get('REORDER', '1') == '1'\n",
            text + "\nreorder_collectives_more: bool = False\n",
        )
    ):
        file = tmp_path / f"{number}.py"
        file.write_text(source)
        check_source(file, f"2.13.{number}")
    check_source(tmp_path / "frozen.py", "2.13.9")
    assert asked == ["2.13.1", "2.13.2", "2.13.9"]


def test_an_import_names_the_setting_that_a_release_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_config, "_SETTINGS", (("overlap_more", False, (99, 0)),))
    with pytest.raises(ImportError, match=r"torch 99.0.0: Inductor has no setting 'overlap_more'"):
        check_source(version="99.0.0")


UNTOUCHED = """
import sys, torch
from torch.distributed.tensor import DTensor
hooks = [getattr(DTensor, name) for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")]
gather = torch._C._dispatch_dump("_c10d_functional::all_gather_into_tensor")
import autoshard, passes.ir.graph, autoshard.cli.main
assert hooks == [getattr(DTensor, name) for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")]
assert gather == torch._C._dispatch_dump("_c10d_functional::all_gather_into_tensor")
print([name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint") if name in sys.modules])
"""


@pytest.mark.slow
def test_an_import_patches_nothing_and_brings_no_compiler() -> None:
    found = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr
