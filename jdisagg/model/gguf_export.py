"""What a GGUF file holds beside its weights, as the JSON files of a Hugging Face folder."""

from pathlib import Path

from jdisagg.model.export import config_json, write_json
from jdisagg.model.gguf_config import generation_defaults, model_config
from jdisagg.model.gguf_file import read_gguf
from jdisagg.model.gguf_tokenizer import build_tokenizer, chat_templates, named_tokens


def write_companions(place: Path, target: Path, dtype: str) -> None:
    """Config, generation config, tokenizer and template of the GGUF file `place` into the folder `target`."""
    file = read_gguf(place)
    defaults, templates = generation_defaults(file), chat_templates(file)
    ids = {"bos_token_id": defaults.bos_id, "eos_token_id": list(defaults.eos_ids) or None}
    write_json(target / "config.json", config_json(model_config(file), dtype, **ids))
    write_json(target / "generation_config.json", {**ids, **defaults.sampling})
    (target / "tokenizer.json").write_text(build_tokenizer(file).to_str(), encoding="utf-8")
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    said = {"chat_template": listed} if listed else {}
    write_json(
        target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named_tokens(file), **said}
    )
