"""Adapters register themselves when what they are for is imported, and only then."""

from __future__ import annotations

import importlib
import sys

import pytest

from mooncake_ray.integrations import on_import


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A system `madeup_system`, and an adapter for it that notes what it was called with."""
    (tmp_path / "madeup_system.py").write_text("ready = []\nready.append('all of it')\n")
    (tmp_path / "madeup_adapter.py").write_text("seen = []\ndef register(module): seen.append(list(module.ready))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(on_import, "_ADAPTERS", {"madeup_system": "madeup_adapter:register"})
    yield
    on_import.unwatch()
    for name in ("madeup_system", "madeup_adapter"):
        sys.modules.pop(name, None)


def test_an_adapter_registers_once_its_system_is_complete(made):
    on_import.watch()
    on_import.watch()
    assert "madeup_adapter" not in sys.modules and "madeup_system" not in sys.modules
    module = importlib.import_module("madeup_system")
    assert importlib.import_module("madeup_adapter").seen == [["all of it"]]
    assert type(module.__spec__.loader).__module__ == "_frozen_importlib_external"  # nothing of the watch is left on it
    importlib.reload(module)


def test_what_is_imported_already_is_registered_at_once(made):
    importlib.import_module("madeup_system")
    on_import.watch()
    assert importlib.import_module("madeup_adapter").seen == [["all of it"]]


def test_after_unwatch_nothing_happens(made):
    on_import.watch()
    on_import.unwatch()
    importlib.import_module("madeup_system")
    assert "madeup_adapter" not in sys.modules
    assert on_import._finder not in sys.meta_path


def test_a_version_that_the_adapter_does_not_know_works_without_it(made, tmp_path, caplog):
    (tmp_path / "madeup_adapter.py").write_text("def register(module): module.gone\n")
    on_import.watch()
    assert importlib.import_module("madeup_system").ready
    assert "no adapter for this version of madeup_system" in caplog.text


def test_a_system_that_is_not_installed_is_not_found(made, tmp_path):
    (tmp_path / "madeup_system.py").unlink()
    on_import.watch()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("madeup_system")
