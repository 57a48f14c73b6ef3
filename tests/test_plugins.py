"""Modules of the user, and optional packages."""

import sys
from pathlib import Path

import pytest

from esper.config import build_vector_env, compose_config
from esper.gym import GymnasiumVectorEnv
from esper.plugins import import_user_module

BROKEN = {
    "raise ImportError('no lab here')": r"ImportError: no lab here \(.*{module}\.py, line 1\)\.",
    "import nowhere_at_all": r"ModuleNotFoundError: No module named 'nowhere_at_all' \(.*{module}\.py, line 1\)\.",
    "def f(:\n    pass": r"SyntaxError: .*\({module}\.py, line 1\)\.",
    "raise KeyError": r"KeyError \(.*{module}\.py, line 1\)\.",
    "raise RuntimeError('two\\nlines.')": r"RuntimeError: two lines \(.*{module}\.py, line 1\)\.",
    "import sys\nsys.exit(3)": r"SystemExit: 3 \(.*{module}\.py, line 2\)\.",
}


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_module_that_cannot_be_imported_is_one_sentence_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    module, (source, reason) = f"broken_{number}", list(BROKEN.items())[number]
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    expected = rf"^environment\.name={module}:My-v0: the import of {module} failed: {reason.format(module=module)}$"
    with pytest.raises(ValueError, match=expected):
        GymnasiumVectorEnv(f"{module}:My-v0", envs=1, steps=None, features=None)


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"^environment\.name=no_lab:My-v0: there is no module no_lab; its directory"):
        GymnasiumVectorEnv("no_lab:My-v0", envs=1, steps=None, features=None)
    with pytest.raises(ValueError, match=r"^slots\.plugins: there is no module json\.at\.all; its directory"):
        import_user_module("json.at.all", "slots.plugins")


def test_the_class_of_a_registered_environment_that_cannot_be_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = "import gymnasium\ngymnasium.register('tests/Lab-v0', entry_point='lab_class:Lab')"
    (tmp_path / "lab_register.py").write_text(register)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"^environment\.name=lab_register:tests/Lab-v0: there is no module lab_class;"
    ):
        GymnasiumVectorEnv("lab_register:tests/Lab-v0", envs=1, steps=None, features=None)


def test_a_missing_optional_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(
        ValueError, match=r"needs gymnasium, which is not installed; pip install 'esper\[gym\]' adds it"
    ):
        build_vector_env(compose_config("run", ["environment=gymnasium"]))
