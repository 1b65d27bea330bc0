"""Names of recipes that do not exist lead to those that do."""

from __future__ import annotations

import pytest

from passes.errors import RecipeError
from passes.recipes import recipe_named


@pytest.mark.parametrize(("name", "meant"), [("zero1", "zero2"), ("ZeRO-2", "zero2"), ("zero_3", "fsdp"), ("fsdp2", "fsdp")])
def test_other_names_of_a_recipe_lead_to_it(name: str, meant: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_named(name)
    assert str(caught.value).startswith(f"unknown recipe {name!r}; ") and str(caught.value).endswith(f" Did you mean {meant!r}?")
