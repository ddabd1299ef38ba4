"""Settings files: the shipped one reads, and every mistake in another is named."""

from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.training.run import override, read_settings

SHIPPED = Path(__file__).parents[2] / "configs" / "embedded_train.toml"


def test_the_shipped_settings_reach_the_models_whole_context() -> None:
    settings = read_settings(SHIPPED)
    assert max(phase.length_tokens for phase in settings.phases) == settings.model.max_position == 2048
    assert 4_000_000 < settings.model.num_params() < 8_000_000


def test_an_override_replaces_only_what_is_given() -> None:
    settings = override(read_settings(SHIPPED), out_dir="elsewhere", seed=None)
    assert settings.run.out_dir == "elsewhere" and settings.run.seed == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("warmup_steps", "warm_up", "unknown key optimiser.warm_up"),
        ("log_every = 10", "", "missing key run.log_every"),
        ("[[phase]]", "[[phases]]", "unknown table phases"),
    ],
)
def test_unknown_and_missing_keys_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SHIPPED.read_text().replace(old, new))
    with pytest.raises(FlagError, match=message):
        read_settings(path)


def test_a_file_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_settings(tmp_path / "none.toml")
