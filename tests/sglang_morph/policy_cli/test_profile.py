"""Measured service rates: curves, checks, and the shipped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from sglang_morph.policy_cli.profile import (
    SHIPPED,
    Curve,
    ProfileError,
    load_profile,
    shipped_profiles,
)


def test_a_curve_is_lines_through_its_points_and_goes_on() -> None:
    curve = Curve([1, 3, 5], [1.0, 2.0, 6.0])
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 5, 6)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]


def test_a_curve_that_falls_never_goes_below_its_first_point() -> None:
    assert Curve([1, 2], [2.0, 1.0]).at(100) == 2.0


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_valid_and_say_where_they_come_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.source) > 40
    assert profile.top_level >= 1
    assert profile.capacity(profile.top_level) > profile.base_pages


def _document(**change: Any) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads((SHIPPED / "h200-llama-8b.json").read_bytes())
    return {**document, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"base_pages": 0}, "base_pages"),
        ({"levels": []}, "length >= 1"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"levels": list(reversed(_document()["levels"]))}, "level 0 lends nothing"),
        ({"levels": [_document()["levels"][i] for i in (0, 2, 1)]}, "must not fall"),
        (
            {"levels": [{**_document()["levels"][0], "decode": {"x": [1], "seconds": [1]}}]},
            "two points",
        ),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(orjson.dumps(_document(**change)))
    with pytest.raises(ProfileError, match=message):
        load_profile(str(path))


def test_an_unknown_name_lists_the_shipped() -> None:
    with pytest.raises(ProfileError, match="h200-llama-8b"):
        load_profile("nothing")


def test_saving_and_loading_are_inverse(tmp_path: Path) -> None:
    profile = load_profile("h200-llama-8b")
    profile.save(tmp_path / "copy.json")
    assert load_profile(str(tmp_path / "copy.json")) == profile
