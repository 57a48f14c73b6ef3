"""Where the configuration lives, and how a piece of it becomes an object."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

_PACKAGED = Path(__file__).parent / "conf"  # in an installed wheel
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


def load(preset: str, **changes: object) -> Any:
    """Build what a preset describes: `load("host/cifar_baseline")`, `load("data/cifar10", train=1000)`.

    Keyword arguments win over the preset's values.
    """
    group = preset.partition("/")[0]
    if not (CONF / f"{preset}.yaml").is_file():
        known = ", ".join(sorted(f"{group}/{path.stem}" for path in (CONF / group).glob("*.yaml")))
        raise ValueError(f"preset={preset}: there is none of that name; there are {known or sorted(_groups())}.")
    try:
        return instantiate(_compose(preset)[group], **changes, _partial_=False)
    except InstantiationException as error:  # Hydra's wrapper hides the sentence that says what is wrong
        raise (error.__cause__ or error) from None


def _compose(preset: str) -> DictConfig:
    """The composed preset; a Hydra application that is running stays as it is."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name=preset)
    finally:
        GlobalHydra.instance().hydra = running


def _groups() -> list[str]:
    return [path.name for path in CONF.iterdir() if path.is_dir()]
