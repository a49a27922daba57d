"""Reading a GGUF once: its weights as a float32 file, its metadata as JSON, in the cache directory.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Its Llama files keep the rows of Q
and K permuted for interleaved RoPE; they are put back in the order that Hugging Face and vLLM use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lmcache_mp.edits.rope import Rope
from lmcache_mp.engines.config import LlamaConfig
from lmcache_mp.engines.vocabulary import TokenizerMaterial
from lmcache_mp.errors import LMCacheMPError, MissingExtraError, UsageError

F32 = NDArray[np.float32]

#: Part of every file name: another layout is another file.
_FORMAT = "v1"
_ALIGN = 64
_ROWS = 64


def cache_directory() -> Path:
    """Where dequantised weights lie: ``$XDG_CACHE_HOME/lmcache_mp``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache_mp"


@dataclass(frozen=True, slots=True)
class CachedGguf:
    """A GGUF that has been dequantised; ``stem`` is the path of its files without their suffix."""

    stem: Path

    @property
    def weights_path(self) -> Path:
        """The float32 file."""
        return self.stem.with_suffix(".f32")

    def config(self) -> LlamaConfig:
        """The model's shape."""
        fields = self._index()["config"]
        rope = Rope(**fields.pop("rope"))
        eos_ids = tuple(fields.pop("eos_ids"))
        return LlamaConfig(rope=rope, eos_ids=eos_ids, **fields)

    def tensors(self) -> dict[str, F32]:
        """The tensors by name, mapped read-only."""
        data = np.memmap(self.weights_path, np.float32, mode="r")
        tensors = {}
        for name, (offset, shape) in self._index()["tensors"].items():
            size = int(np.prod(shape))
            tensors[name] = np.asarray(data[offset : offset + size]).reshape(shape)
        return tensors

    def vocabulary(self) -> TokenizerMaterial:
        """What the tokenizer is made from."""
        fields = json.loads(self.stem.with_suffix(".tokenizer.json").read_text("utf-8"))
        for name in ("tokens", "merges", "types"):
            fields[name] = tuple(fields[name])
        return TokenizerMaterial(**fields)

    def complete(self) -> bool:
        """Whether the files are there and whole: the index, with their sizes, is written last."""
        try:
            sizes: dict[str, int] = self._index()["sizes"]
            return all(
                self.stem.with_suffix(suffix).stat().st_size == size
                for suffix, size in sizes.items()
            )
        except (OSError, ValueError, KeyError):
            return False

    def _index(self) -> dict[str, Any]:
        index: dict[str, Any] = json.loads(self.stem.with_suffix(".json").read_text("utf-8"))
        return index


def cached(path: Path) -> CachedGguf:
    """The cache of a GGUF file, which the first call makes."""
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        entry = CachedGguf(directory / f"{_digest(path, directory)}-{_FORMAT}")
        if not entry.complete():
            with _building(entry):
                if not entry.complete():  # another process may have made it meanwhile
                    _build(path, entry)
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a directory with room"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            advice = "check the paths, or set XDG_CACHE_HOME to a directory that can be written"
        raise LMCacheMPError(
            f"the weights of {path} could not be cached in {directory}: {error}; {advice}"
        ) from error
    return entry


def _digest(path: Path, directory: Path) -> str:
    """A hash of the file's content, remembered by its path, size and times of change."""
    status = path.stat()
    times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"  # a copy may keep the first
    identity = f"{path.resolve()}\0{status.st_size}\0{times}"
    note = directory / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.hash"
    with contextlib.suppress(OSError):
        known = note.read_text("ascii")
        if len(known) == 32:
            return known
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    with contextlib.suppress(OSError):  # weights cached before can be used all the same
        _write_whole(note, digest.hexdigest())
    return digest.hexdigest()


def _write_whole(path: Path, text: str) -> None:
    """Write under a temporary name and rename: a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _building(entry: CachedGguf) -> Iterator[None]:
    """Only one process builds, once what a killed builder left is removed.

    Without fcntl several may build, and the last rename wins.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with entry.stem.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in entry.stem.parent.glob(f"{entry.stem.name}.{'[0-9a-f]' * 32}"):
            left.unlink(missing_ok=True)
        yield


def _build(path: Path, entry: CachedGguf) -> None:
    reader = _GgufReader(path)
    config = reader.config(f"{reader.text('general.name', 'llama')}-{entry.stem.name[:16]}")
    reader.check_tensors(config)
    vocabulary = json.dumps(asdict(reader.vocabulary()))
    needed = reader.float32_bytes()
    free = shutil.disk_usage(entry.stem.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed, {free >> 20} MiB are free")
    temporary = entry.stem.with_name(f"{entry.stem.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            tensors = _write_tensors(file, reader, config)
            sizes = {".f32": file.tell(), ".tokenizer.json": len(vocabulary)}
        os.replace(temporary, entry.weights_path)
    finally:
        temporary.unlink(missing_ok=True)
    _write_whole(entry.stem.with_suffix(".tokenizer.json"), vocabulary)
    index = {"config": asdict(config), "tensors": tensors, "sizes": sizes}
    _write_whole(entry.stem.with_suffix(".json"), json.dumps(index))


def _write_tensors(
    file: BinaryIO, reader: _GgufReader, config: LlamaConfig
) -> dict[str, tuple[int, list[int]]]:
    """Write all tensors, one after the other; returns each one's offset (in floats) and shape."""
    index: dict[str, tuple[int, list[int]]] = {}

    def put(name: str, tensor: F32) -> None:
        if tensor.ndim == 2 and len(tensor) % _ROWS:
            padding = np.zeros((-len(tensor) % _ROWS, tensor.shape[1]), np.float32)
            tensor = np.concatenate([tensor, padding])
        file.write(b"\0" * (-file.tell() % _ALIGN))
        index[name] = file.tell() // 4, list(tensor.shape)
        file.write(np.ascontiguousarray(tensor, np.float32).data)

    put("embedding", reader.tensor("token_embd.weight"))
    if reader.has("output.weight"):
        put("head", reader.tensor("output.weight"))
    put("norm", reader.tensor("output_norm.weight"))
    for layer in range(config.layers):
        block = f"blk.{layer}."
        q = _half_split(reader.tensor(block + "attn_q.weight"), config.heads)
        k = _half_split(reader.tensor(block + "attn_k.weight"), config.kv_heads)
        v = reader.tensor(block + "attn_v.weight")
        gate, up = (reader.tensor(f"{block}ffn_{half}.weight") for half in ("gate", "up"))
        put(f"{layer}.norm_attention", reader.tensor(block + "attn_norm.weight"))
        put(f"{layer}.qkv", np.concatenate([q, k, v]))
        put(f"{layer}.out", reader.tensor(block + "attn_output.weight"))
        put(f"{layer}.norm_ffn", reader.tensor(block + "ffn_norm.weight"))
        put(f"{layer}.gate_up", np.concatenate([gate, up]))
        put(f"{layer}.down", reader.tensor(block + "ffn_down.weight"))
    return index


def _half_split(rows: F32, heads: int) -> F32:
    """Rows of Q or K, [H hd, E], from interleaved pairs to halves."""
    width = len(rows) // heads
    pairs = rows.reshape(heads, width // 2, 2, rows.shape[1])
    halves: F32 = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


def _expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a Llama's file must hold, and their shapes; it may hold a head as well."""
    hidden, ffn = config.hidden, config.ffn
    queries, keys = (heads * config.head_dim for heads in (config.heads, config.kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(config.layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in (
                ("attn_norm", (hidden,)),
                ("attn_q", (queries, hidden)),
                ("attn_k", (keys, hidden)),
                ("attn_v", (keys, hidden)),
                ("attn_output", (hidden, queries)),
                ("ffn_norm", (hidden,)),
                ("ffn_gate", (ffn, hidden)),
                ("ffn_up", (ffn, hidden)),
                ("ffn_down", (hidden, ffn)),
            )
        }
    return shapes


class _GgufReader:
    """The `gguf` package's reader, with errors that name the file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise MissingExtraError("reading a GGUF file", "local") from None
        self._gguf = gguf
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:
            raise UsageError(f"{path} can't be read as a GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._family = self.text("general.architecture", "")
        if self._family != "llama":
            raise UsageError(
                f"{path} holds a model of the family {self._family or 'unknown'!r}; the embedded "
                "engine computes the family 'llama'"
            )

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def text(self, key: str, default: str) -> str:
        """A string of the metadata."""
        value = self._field(key)
        return default if value is None else str(value)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._field(f"{self._family}.{key}")
        if value is None:
            value = default
        if value is None:
            raise UsageError(f"{self._path} does not say {self._family}.{key}, which is needed")
        if not isinstance(value, (int, float)):
            raise UsageError(f"{self._path}: {self._family}.{key} must be one number, not {value}")
        return float(value)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def tensor(self, name: str) -> F32:
        """A tensor, dequantised to float32."""
        tensor = self._tensors[name]
        try:
            values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UsageError(f"{self._path}: {name} can't be dequantised: {error}") from error
        dense: F32 = np.asarray(values, np.float32)
        return dense

    def _shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in numpy's order: GGUF names the innermost dimension first."""
        if name not in self._tensors:
            raise UsageError(f"{self._path} has no tensor {name}")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def check_tensors(self, config: LlamaConfig) -> None:
        """UsageError for a tensor that is missing, mis-shaped, or would not be used."""
        expected = _expected_shapes(config)
        if self.has("output.weight"):
            expected["output.weight"] = (config.vocab, config.hidden)
        for name, shape in expected.items():
            if self._shape(name) != shape:
                found = list(self._shape(name))
                raise UsageError(f"{self._path}: {name} must be {list(shape)}, not {found}")
        unused = sorted(self._tensors.keys() - expected)
        if unused:
            raise UsageError(
                f"{self._path} has tensors that the embedded engine would not use "
                f"({len(unused)}, such as {unused[0]}), so it can't compute this model"
            )

    def float32_bytes(self) -> int:
        """Bytes of all tensors as float32."""
        return 4 * sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def config(self, name: str) -> LlamaConfig:
        """The model's shape; UsageError for what the embedded engine can't compute."""
        if self._scales_rope():
            raise UsageError(
                f"{self._path} scales its RoPE, which the embedded engine can't compute"
            )
        if self._number("expert_count", 0):
            raise UsageError(f"{self._path} is a mixture of experts, which can't be computed here")
        heads, hidden = (
            int(self._number("attention.head_count")),
            int(self._number("embedding_length")),
        )
        head_dim = int(self._number("attention.key_length", hidden // heads))
        if int(self._number("rope.dimension_count", head_dim)) != head_dim:
            raise UsageError(
                f"{self._path} rotates a part of each head, which can't be computed here"
            )
        # A chat model may end its turn with another token than a text.
        ends = (self._field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        bos = self._field("tokenizer.ggml.bos_token_id")
        return LlamaConfig(
            name=name,
            layers=int(self._number("block_count")),
            hidden=hidden,
            heads=heads,
            kv_heads=int(self._number("attention.head_count_kv", heads)),
            head_dim=head_dim,
            ffn=int(self._number("feed_forward_length")),
            vocab=self._shape("token_embd.weight")[0],
            context_length=int(self._number("context_length")),
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope=Rope(head_dim, self._number("rope.freq_base")),
            eos_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
            bos_id=None if bos is None else int(bos),
            add_bos=bool(self._field("tokenizer.ggml.add_bos_token") or False),
        )

    def _scales_rope(self) -> bool:
        if self.has("rope_freqs.weight"):
            return True
        kind = self._field(f"{self._family}.rope.scaling.type")
        if kind is not None:
            return str(kind) != "none"
        # Without a type, and in files older than types, a factor alone scales linearly.
        keys = ("rope.scaling.factor", "rope.scale_linear")
        return any(self._number(key, 1) not in (0, 1) for key in keys)

    def vocabulary(self) -> TokenizerMaterial:
        """What the tokenizer is made from."""
        prefix = "tokenizer.ggml."
        eos, bos = self._field(prefix + "eos_token_id"), self._field(prefix + "bos_token_id")
        template = self._field("tokenizer.chat_template")
        return TokenizerMaterial(
            kind=self.text(prefix + "model", ""),
            pre=self.text(prefix + "pre", ""),
            tokens=tuple(self._field(prefix + "tokens") or ()),
            merges=tuple(self._field(prefix + "merges") or ()),
            types=tuple(map(int, self._field(prefix + "token_type") or ())),
            bos_id=None if bos is None else int(bos),
            eos_id=None if eos is None else int(eos),
            add_bos=bool(self._field(prefix + "add_bos_token") or False),
            chat_template=None if template is None else str(template),
        )
