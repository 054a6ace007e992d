"""Words of other libraries, and what stoker calls them: hints in the errors of wrong names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_WORKERS = ".workers(n) says how many prepare data, and .workers(ahead=) how far they are ahead"
_CHANGES = ".map(fn) and .random_map(fn) change examples, and behind .batch() whole batches"
_READS = "list(pipeline) reads an epoch, and pipeline.peek() its first batch"
_LENGTH = "len(pipeline) is the number of batches"
_WINDOWS = ".scan(fn) makes examples of neighbours"

METHODS = {
    "as_numpy_iterator": _READS,
    "augment": _CHANGES,
    "bucket_by_sequence_length": ".batch_by_tokens(max_tokens, sizes), or .bucket(n, key)",
    "cardinality": _LENGTH,
    "collect": _READS,
    "concatenate": "stoker.concat([a, b])",
    "count": _LENGTH,
    "dataloader": "a pipeline is iterated itself; .as_dataloader() is for what takes nothing else",
    "decode": ".map(stoker.images.decode, on='image')",
    "drop_remainder": ".batch(n, drop_last=True)",
    "enumerate": "enumerate(pipeline) counts batches",
    "first": ".peek() returns the first batch, and .take(n) keeps the first examples",
    "flat_map": _WINDOWS,
    "group_by_window": _WINDOWS,
    "head": ".take(n) keeps the first examples, and .peek() returns the first batch",
    "interleave": "stoker.mix draws from several pipelines",
    "limit": ".take(n) keeps the first examples, and .steps(n) ends an epoch after n batches",
    "map_batches": "a .map(fn) behind .batch() gets batches",
    "num_workers": _WORKERS,
    "padded_batch": ".batch(n, collate=stoker.collate.pad())",
    "parallel": _WORKERS,
    "persist": ".cache() keeps examples in memory or on a disk",
    "pipe": "stages follow each other: pipeline.map(fn).batch(n)",
    "prefetch": "a pipeline reads ahead by itself; .workers(ahead=8) says how far",
    "random_split": ".split(0.9) gives two parts",
    "remove_columns": _CHANGES,
    "select_columns": _CHANGES,
    "set_transform": _CHANGES,
    "slice": ".skip(n) and .take(n)",
    "train_test_split": ".split(0.9) gives two parts",
    "to": ".to_torch(device) and .to_jax(device) make tensors",
    "transform": _CHANGES,
    "unbatch": "leave .batch() out: before it a pipeline has examples",
    "window": "a stoker.WindowStage makes windows of examples",
    "with_epoch": ".steps(n) ends an epoch after n batches",
    "with_transform": _CHANGES,
    **dict.fromkeys(
        ("batch_sampler", "collate_fn", "dataset", "sampler"),
        "pipeline.as_dataloader() has what frameworks want",
    ),
}
"""By a name that a pipeline does not have."""

FUNCTIONS = {
    "ArrayDataset": "take stoker.from_arrays",
    "DataLoader": "take stoker.from_dataset(dataset).batch(n), or stoker.echo(loader) around one",
    "Dataset": "take stoker.from_dataset, of any object with __getitem__ and __len__",
    "ImageFolder": "take stoker.from_folder",
    "IterableDataset": "take stoker.from_iterable",
    "TensorDataset": "take stoker.from_arrays",
    "TextLineDataset": "take stoker.from_text",
    "WebDataset": "take stoker.from_tar",
    "from_array": "take stoker.from_arrays",
    "from_dataframe": "take stoker.from_table",
    "from_generator": "take stoker.from_iterable",
    "from_hf": "take stoker.from_huggingface",
    "from_images": "take stoker.from_folder",
    "from_list": "take stoker.from_dataset",
    "from_numpy": "take stoker.from_arrays",
    "from_pandas": "take stoker.from_table",
    "from_polars": "take stoker.from_table",
    "from_shards": "take stoker.from_tar",
    "from_tensor_slices": "take stoker.from_arrays",
    "from_torch": "take stoker.from_dataset, or stoker.from_loader",
    "from_webdataset": "take stoker.from_tar",
    "image_dataset_from_directory": "take stoker.from_folder",
    "interleave": "take stoker.mix",
    "interleave_datasets": "take stoker.mix",
    "load_dataset": "take stoker.from_huggingface",
    "read_csv": "take stoker.from_csv",
    "read_parquet": "take stoker.from_parquet",
    "sample_from_datasets": "take stoker.mix",
}
"""By a name that the package does not have."""

CALLS = {
    "batch": ".batch(32, drop_last=True), .batch_by_tokens(max_tokens, sizes), .bucket(n, key)",
    "filter": "options have names: .filter(fn, on='label')",
    "map": "options have names: .map(fn, on='image')",
    "random_map": "options have names: .random_map(fn, on='image')",
    "repeat": ".repeat() has no end; .repeat().steps(n) ends an epoch after n batches",
    "shard": "ranks are found by themselves, or have names: .shard(rank=0, world_size=2)",
    "shuffle": "the source has the seed: from_dataset(dataset, seed=0); .sample(w) has weights",
    "workers": "the number comes first, and options have names: .workers(8, kind='process')",
}
"""By a method that was called with wrong arguments."""


def hint(name: str, words: dict[str, str], known: Iterable[str]) -> str:
    """Return the end of an error about a missing name: what ``words`` or ``known`` have for it."""
    if name in words:
        return f": {words[name]}"
    if name.startswith("_"):  # Python and frameworks ask for many such names
        return ""
    import difflib  # takes its time

    near = difflib.get_close_matches(name, known, 1)
    return f": did you mean {near[0]}?" if near else ""


def explain_calls(cls: type) -> None:
    """Have methods of a class say what they take, if they are called with wrong arguments."""
    for name, told in CALLS.items():
        setattr(cls, name, _explained(getattr(cls, name), told))


def _explained(method: Callable[..., Any], told: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError:
            try:
                inspect.signature(method).bind(*args, **kwargs)
            except TypeError as wrong:
                raise TypeError(f".{method.__name__}(): {wrong}: {told}") from None
            raise

    return call
