"""One door to a model: the bundled demo, a directory, a .gguf file or a hub id; parts are read when first used.

A router asks for the tokenizer, the chat template and a few numbers, and loads no torch; a rank asks for `source`.
"""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pd_cluster.errors import ModelError
from pd_cluster.model.chat_template import ChatTemplate, load_chat_template
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.hf_config import read_config
from pd_cluster.model.shards import checkpoint_dtype
from pd_cluster.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pd_cluster.model.gguf_config import GgufModel
    from pd_cluster.model.weights import WeightSource

Load = Literal["weights", "random"]
DEMO = Path(__file__).parents[1] / "demo_model"
SMALL_FILES = ["*.json", "*.jinja"]


class LoadedModel:
    """A model whose config is read; tokenizer, template and weights follow on first use. `name` is its path's last
    part."""

    def __init__(self, name: str, path: Path, load: Load, seed: int) -> None:
        self.name = name
        self.path = path
        self.directory = path if path.is_dir() else None
        self._load = load
        self._seed = seed

    @cached_property
    def config(self) -> ModelConfig:
        if self.directory is None:
            return self._gguf.config
        directory = self.directory
        return read_config(directory, None if self._load == "random" else lambda: checkpoint_dtype(directory))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None for a directory without any: such a model takes and returns token ids only."""
        if self.directory is None:
            return self._gguf.tokenizer
        if not any((self.directory / file).exists() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        return Tokenizer.from_directory(self.directory)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """None for a model that ships none: it completes text but holds no chat."""
        special = self.tokenizer.special.by_name() if self.tokenizer else {}
        if self.directory is not None:
            return load_chat_template(self.directory, special)
        named = dict(self.chat_template_texts)
        source = named.pop("default", None)
        return None if source is None else ChatTemplate(source, special_tokens=special, named=named)

    @property
    def chat_template_texts(self) -> dict[str, str]:
        """The templates inside a .gguf file by name, `default` among them; none for a directory, where they are
        files."""
        if self.directory is not None:
            return {}
        default = self._gguf.chat_template
        return self._gguf.named_chat_templates | ({} if default is None else {"default": default})

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: those of the config and the tokenizer's own."""
        own = self.tokenizer.eos_token_id if self.tokenizer else None
        return tuple(dict.fromkeys([*self.config.eos_token_ids, *([] if own is None else [own])]))

    @cached_property
    def source(self) -> "WeightSource":
        """Where ranks read tensors from. Loads torch."""
        if self._load == "random":
            from pd_cluster.model.random_weights import RandomSource

            return RandomSource(self.config, self._seed)
        if self.directory is not None:
            from pd_cluster.model.checkpoint import SafetensorsSource

            return SafetensorsSource(self.directory, self.config)
        from pd_cluster.model.gguf import GgufSource

        return GgufSource(self._gguf)

    @cached_property
    def _gguf(self) -> "GgufModel":
        from pd_cluster.model.gguf_config import GgufModel

        return GgufModel(self.path)


def open_model(path_or_id: str, load: Load = "weights", seed: int = 0) -> LoadedModel:
    """The model behind `path_or_id`: `demo`, a directory in Hugging Face layout, a .gguf file, or a hub id such as
    Qwen/Qwen3-0.6B, which is downloaded into the hub's cache.

    `load="random"` makes seeded random weights instead of reading any; a config.json is then enough. Raises
    ModelError that says what to do.
    """
    if path_or_id == "demo":
        return _checked(LoadedModel("demo", DEMO, load, seed))
    path = Path(path_or_id).expanduser()
    name = path.name or path.resolve().name
    if path.is_dir():
        return _checked(LoadedModel(name, path, load, seed))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file; a model is a directory with config.json, a .gguf file, or a hub id")
        return _checked(LoadedModel(path.stem, path, load, seed))
    return _checked(LoadedModel(name, _download(path_or_id, load), load, seed))


def _checked(model: LoadedModel) -> LoadedModel:
    """Read the config now, so that a wrong model fails where it is named."""
    _ = model.config
    return model


def _download(hub_id: str, load: Load) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    what_to_do = "give a directory, a .gguf file, `demo`, or a hub id such as Qwen/Qwen3-0.6B"
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")) or hub_id.endswith(".gguf"):
        raise ModelError(f"there is no model at {hub_id}; {what_to_do}")
    patterns = SMALL_FILES if load == "random" else [*SMALL_FILES, "*.safetensors"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"there is no model at {hub_id}, and it is no hub id: {error}; {what_to_do}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{hub_id} is neither a local path nor in the hub's cache, and the hub cannot be reached; "
            f"check the network, or run `hf download {hub_id}` where there is one and copy the directory here"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"cannot download {hub_id}: {error}; a gated model needs `hf auth login`") from error
    except OSError as error:
        raise ModelError(f"cannot download {hub_id}: {error}") from error
