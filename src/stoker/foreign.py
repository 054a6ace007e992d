"""Words of other libraries, and what stoker calls them: hints in the errors of wrong names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_WORKERS = ".workers(n) says how many prepare data, and .workers(ahead=) how far they are ahead"
_DEVICE = ".to_torch(device) and .to_jax(device) make tensors, copied ahead of the loop"
_FIELDS = "pipeline.peek() is a batch, with its fields"
_CHANGES = ".map(fn) and .random_map(fn) change examples, and after .batch() whole batches"
_READS = "list(pipeline) reads an epoch, and pipeline.peek() its first batch"
_LENGTH = "len(pipeline) is the number of batches"
_SOURCE = "take stoker.from_dataset, of a stoker.Source that reads it"
_WINDOWS = ".scan(fn) makes examples of neighbours"

METHODS = {
    "as_numpy_iterator": _READS,
    "augment": _CHANGES,
    "bucket_by_sequence_length": ".batch_by_tokens(max_tokens, sizes), or .bucket(n, key)",
    "cardinality": _LENGTH,
    "cast": _CHANGES,
    "class_to_idx": ".class_names of a folder: a label is the number of its name",
    "classes": ".class_names of a folder, and .labels() of all examples",
    "collect": _READS,
    "columns": _FIELDS,
    "concatenate": "stoker.concat([a, b])",
    "count": _LENGTH,
    "cpu": _DEVICE,
    "cuda": _DEVICE,
    "dataloader": "a pipeline is iterated itself; .as_dataloader() is for what takes nothing else",
    "decode": ".map(stoker.images.decode, on='image')",
    "device": _DEVICE,
    "drop_remainder": ".batch(n, drop_last=True)",
    "enumerate": "enumerate(pipeline) counts batches",
    "features": _FIELDS,
    "first": ".peek() returns the first batch, and .take(n) keeps the first examples",
    "flat_map": _WINDOWS,
    "flatten": _WINDOWS,
    "group_by": "stoker.concat, .select(numbers) and .order(fn) say what comes when",
    "group_by_window": _WINDOWS,
    "head": ".take(n) keeps the first examples, and .peek() returns the first batch",
    "interleave": "stoker.mix draws from several pipelines",
    "limit": ".take(n) keeps the first examples, and .steps(n) ends an epoch after n batches",
    "map_batches": "a .map(fn) after .batch() gets batches",
    "normalize": ".map(stoker.images.normalize(), on='image')",
    "num_classes": "len(pipeline.class_names), of a folder",
    "num_examples": _LENGTH + "; before .batch(), of examples",
    "num_workers": _WORKERS,
    "numpy": _READS,
    "pad": "a .batch(n, collate=stoker.collate.pad())",
    "padded_batch": ".batch(n, collate=stoker.collate.pad())",
    "parallel": _WORKERS,
    "persist": ".cache() keeps examples in memory or on a disk",
    "pin_memory": _DEVICE,
    "pipe": "stages follow each other: pipeline.map(fn).batch(n)",
    "prefetch": "a pipeline reads ahead by itself; .workers(ahead=8) says how far",
    "random_split": ".split(0.9) gives two parts",
    "rebatch": "a batch size is given once: .batch(n)",
    "remove_columns": _CHANGES,
    "rename": _CHANGES,
    "rename_columns": _CHANGES,
    "resize": ".map(stoker.images.resize(224), on='image')",
    "samples": "pipeline.example(n) is one, and .name_of(n) its file",
    "save": ".state_dict() is where it stands, and .cache(path=) keeps examples",
    "select_columns": _CHANGES,
    "set_format": _DEVICE,
    "set_transform": _CHANGES,
    "shape": _FIELDS,
    "show": "print(pipeline) shows the stages, print(pipeline.stats()) where the time went",
    "slice": ".skip(n) and .take(n)",
    "sort": ".order(fn) says which examples come in which order",
    "split_by_node": ".shard() takes the part of this rank",
    "split_by_worker": "each worker has a part by itself",
    "state": ".state_dict() and .load_state_dict(state)",
    "targets": ".labels() of all examples",
    "to": ".to_torch(device) and .to_jax(device) make tensors",
    "train_test_split": ".split(0.9) gives two parts",
    "transform": _CHANGES,
    "unbatch": "leave .batch() out: before it a pipeline has examples",
    "window": "a stoker.WindowStage makes windows of examples",
    "with_epoch": ".steps(n) ends an epoch after n batches",
    "with_format": _DEVICE,
    "with_transform": _CHANGES,
    **dict.fromkeys(
        ("batch_sampler", "collate_fn", "dataset", "sampler"),
        "pipeline.as_dataloader() has what frameworks want",
    ),
}
"""By a name that a pipeline does not have."""

FUNCTIONS = {
    "ArrayDataset": "take stoker.from_arrays",
    "Compose": "take one .map(fn) or .random_map(fn) after another",
    "ConcatDataset": "take stoker.concat([a, b])",
    "DataLoader": "take stoker.from_dataset(dataset).batch(n), or stoker.echo(loader) around one",
    "Dataset": "take stoker.from_dataset, of any object with __getitem__ and __len__",
    "DistributedSampler": "take .shard()",
    "ImageFolder": "take stoker.from_folder",
    "IterableDataset": "take stoker.from_iterable",
    "Subset": "take .select(numbers)",
    "TensorDataset": "take stoker.from_arrays",
    "TextLineDataset": "take stoker.from_text",
    "WebDataset": "take stoker.from_tar",
    "WeightedRandomSampler": "take .sample(weights)",
    "from_array": "take stoker.from_arrays",
    "from_audio": "take stoker.from_files or stoker.from_folder(extensions=)",
    "from_dataframe": "take stoker.from_table",
    "from_df": "take stoker.from_table",
    "from_dict": "take stoker.from_dataset, of a list of dicts",
    "from_dir": "take stoker.from_folder",
    "from_directory": "take stoker.from_folder",
    "from_generator": "take stoker.from_iterable",
    "from_h5": _SOURCE,
    "from_hdf5": _SOURCE,
    "from_hf": "take stoker.from_huggingface",
    "from_images": "take stoker.from_folder",
    "from_list": "take stoker.from_dataset",
    "from_lmdb": _SOURCE,
    "from_npy": "take stoker.from_arrays, of what np.load gives",
    "from_npz": _SOURCE,
    "from_numpy": "take stoker.from_arrays",
    "from_pandas": "take stoker.from_table",
    "from_path": "take stoker.from_files",
    "from_polars": "take stoker.from_table",
    "from_s3": "take stoker.from_files, from_folder, from_tar and others, of a URL",
    "from_shards": "take stoker.from_tar",
    "from_sql": _SOURCE,
    "from_tensor": "take stoker.from_arrays",
    "from_tensor_slices": "take stoker.from_arrays",
    "from_tensors": "take stoker.from_arrays",
    "from_tfrecord": _SOURCE,
    "from_tfrecords": _SOURCE,
    "from_torch": "take stoker.from_dataset, or stoker.from_loader",
    "from_url": "take stoker.from_files, from_folder, from_tar and others, of a URL",
    "from_video": "take stoker.from_files or stoker.from_folder(extensions=)",
    "from_webdataset": "take stoker.from_tar",
    "from_zarr": _SOURCE,
    "image_dataset_from_directory": "take stoker.from_folder",
    "image_folder": "take stoker.from_folder",
    "interleave": "take stoker.mix",
    "interleave_datasets": "take stoker.mix",
    "load_dataset": "take stoker.from_huggingface",
    "random_split": "take .split(0.9)",
    "read_csv": "take stoker.from_csv",
    "read_parquet": "take stoker.from_parquet",
    "sample_from_datasets": "take stoker.mix",
}
"""By a name that the package does not have."""

KEYWORDS = {
    "batch_size": ".batch(n) makes batches",
    "batched": "a .map(fn) after .batch() gets batches",
    "buffer_size": "data with numbers is shuffled as a whole; .shuffle(buffer=) is for streams",
    "collate_fn": "collate= takes it, in .batch(n, collate=fn)",
    "directory": "the path comes first, without a name",
    "drop_remainder": ".batch(n, drop_last=True)",
    "generator": "the source's seed= decides every draw",
    "input_columns": "on= names the fields that a function gets",
    "num_parallel_calls": _WORKERS,
    "num_proc": _WORKERS,
    "num_replicas": ".shard(rank=0, world_size=2)",
    "num_shards": ".shard(rank=0, world_size=2)",
    "num_workers": _WORKERS,
    "on_error": "max_errors= says how many examples may be skipped",
    "persistent_workers": ".workers(n, persistent=True)",
    "pin_memory": _DEVICE,
    "prefetch_factor": _WORKERS,
    "probabilities": "weights= has a number for each pipeline",
    "root": "the path comes first, without a name",
    "sampler": ".sample(weights), .order(fn) and .select(numbers) say which examples come",
    "shuffle": ".shuffle() is a stage, after the source",
    "target_transform": _CHANGES,
    "timeout": ".workers(n, timeout_s=60) says how long a stage may take for an example",
    "transform": _CHANGES,
    "worker_init_fn": "the source's seed= decides every draw",
}
"""By an argument that a function of the package does not have."""

CALLS = {
    "batch": ".batch(32, drop_last=True), .batch_by_tokens(max_tokens, sizes), .bucket(n, key)",
    "concat": "concat([a, b])",
    "filter": "options have names: .filter(fn, on='label')",
    "from_arrays": "arrays come first, one after another: from_arrays(x, y, seed=0)",
    "map": "options have names: .map(fn, on='image')",
    "mix": "mix([a, b], weights=[0.7, 0.3])",
    "random_map": "options have names: .random_map(fn, on='image')",
    "repeat": ".repeat() has no end; .repeat().steps(n) ends an epoch after n batches",
    "shard": "ranks are found by themselves, or have names: .shard(rank=0, world_size=2)",
    "shuffle": "the source has the seed: from_dataset(dataset, seed=0); .sample(w) has weights",
    "to_jax": ".to_jax(device) takes one of jax.devices(), or a sharding",
    "workers": "the number comes first, and options have names: .workers(8, kind='process')",
    "zip": "zip(images, masks, seed=0)",
}
"""By a function or method that was called with wrong arguments."""


def hint(name: str, words: dict[str, str], known: Iterable[str]) -> str:
    """Return the end of an error about a name that there is not: what to write, if anybody knows.

    Args:
        name: the name.
        words: of these tables.
        known: the names that there are.
    """
    if name in words:
        return f": {words[name]}"
    if name.startswith("_"):  # Python and frameworks ask for many such names
        return ""
    import difflib  # takes its time

    public = [each for each in known if not each.startswith("_")]
    near = difflib.get_close_matches(name, public, 1, cutoff=0.7)  # slips, not other words
    return f": did you mean {near[0]}?" if near else ""


def explain_calls(owner: type | ModuleType) -> None:
    """Have functions of a class or a module say what they take, if called with wrong arguments."""
    for name, function in list(vars(owner).items()):
        if name in CALLS or name.startswith("from_"):
            setattr(owner, name, _explained(function, "." if isinstance(owner, type) else ""))


def _explained(function: Callable[..., Any], dot: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                told = f"{dot}{function.__name__}(): {wrong}"
                unknown = [name for name in kwargs if name not in signature.parameters]
                meant = hint(unknown[0], KEYWORDS, signature.parameters) if unknown else ""
                own = CALLS.get(function.__name__)
                raise TypeError(told + (meant or (f": {own}" if own else ""))) from None
            raise

    return call
