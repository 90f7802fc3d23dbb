"""Which gate operators a run gets, and what it is told when it cannot have those it asked for."""

import pytest

from model.ops import fused


def test_what_is_not_built_falls_back_or_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "load", lambda: None)
    assert not fused.chosen("auto")
    assert not fused.chosen("ref")
    with pytest.raises(ValueError, match=r"compute\.gate_ops is fused, but .*python -m model\.ops\.build"):
        fused.chosen("fused")


def test_what_is_built_is_taken_unless_refused(fused_operators: None) -> None:
    assert fused.chosen("auto")
    assert fused.chosen("fused")
    assert not fused.chosen("ref")
