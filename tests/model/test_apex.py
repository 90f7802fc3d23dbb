"""The three things that `import apex` may find."""

from pathlib import Path

import pytest

from model.apex import nvidia_apex_available


def package(folder: Path, files: list[str]) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise ImportError('must not be imported')")


def test_no_apex_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert nvidia_apex_available() is False


def test_nvidia_apex_is_known_by_its_fused_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, ["apex/__init__.py", "apex/optimizers/__init__.py", "apex/optimizers/fused_adam.py"])
    monkeypatch.syspath_prepend(tmp_path)
    assert nvidia_apex_available() is True


def test_the_other_apex_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, ["apex/__init__.py", "apex/models.py"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="pip uninstall apex"):
        nvidia_apex_available()


def test_a_mere_folder_called_apex_is_no_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert nvidia_apex_available() is False
