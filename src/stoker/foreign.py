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
_WINDOWS = ".scan(fn) makes examples of neighbours"


def _by_word(told: dict[str, str]) -> dict[str, str]:
    """Return a table by word, of one that lists the words behind what they are told."""
    return {word: text for text, words in told.items() for word in words.split()}


METHODS = _by_word(
    {
        _READS: "as_numpy_iterator collect numpy",
        _CHANGES: (
            "augment cast remove_columns rename rename_columns select_columns set_transform "
            "transform with_transform"
        ),
        "pipeline.as_dataloader() has what frameworks want": (
            "batch_sampler collate_fn dataset sampler"
        ),
        ".batch_by_tokens(max_tokens, sizes), or .bucket(n, key)": "bucket_by_sequence_length",
        _LENGTH: "cardinality count",
        ".class_names of a folder: a label is the number of its name": "class_to_idx",
        ".class_names of a folder, and .labels() of all examples": "classes",
        _FIELDS: "columns features shape",
        "stoker.concat([a, b])": "concatenate",
        _DEVICE: "cpu cuda device pin_memory set_format to with_format",
        "a pipeline is iterated itself; .as_dataloader() is for what takes nothing else": (
            "dataloader"
        ),
        ".map(stoker.images.decode, on='image')": "decode",
        ".batch(n, drop_last=True)": "drop_remainder",
        "enumerate(pipeline) counts batches": "enumerate",
        ".peek() returns the first batch, and .take(n) keeps the first examples": "first",
        _WINDOWS: "flat_map flatten group_by_window",
        "stoker.concat, .select(numbers) and .order(fn) say what comes when": "group_by",
        ".take(n) keeps the first examples, and .peek() returns the first batch": "head",
        "stoker.mix draws from several pipelines": "interleave",
        ".take(n) keeps the first examples, and .steps(n) ends an epoch after n batches": "limit",
        "a .map(fn) after .batch() gets batches": "map_batches",
        ".map(stoker.images.normalize(), on='image')": "normalize",
        "len(pipeline.class_names), of a folder": "num_classes",
        "len(pipeline) is the number of batches; before .batch(), of examples": "num_examples",
        _WORKERS: "num_workers parallel",
        "a .batch(n, collate=stoker.collate.pad())": "pad",
        ".batch(n, collate=stoker.collate.pad())": "padded_batch",
        ".cache() keeps examples in memory or on a disk": "persist",
        "stages follow each other: pipeline.map(fn).batch(n)": "pipe",
        "a pipeline reads ahead by itself; .workers(ahead=8) says how far": "prefetch",
        ".split(0.9) gives two parts": "random_split train_test_split",
        "a batch size is given once: .batch(n)": "rebatch",
        ".map(stoker.images.resize(224), on='image')": "resize",
        "pipeline.example(n) is one, and .name_of(n) its file": "samples",
        ".state_dict() is where it stands, and .cache(path=) keeps examples": "save",
        "print(pipeline) shows the stages, print(pipeline.stats()) where the time went": "show",
        ".skip(n) and .take(n)": "slice",
        ".order(fn) says which examples come in which order": "sort",
        ".shard() takes the part of this rank": "split_by_node",
        "each worker has a part by itself": "split_by_worker",
        ".state_dict() and .load_state_dict(state)": "state",
        ".labels() of all examples": "targets",
        "leave .batch() out: before it a pipeline has examples": "unbatch",
        "a stoker.WindowStage makes windows of examples": "window",
        ".steps(n) ends an epoch after n batches": "with_epoch",
    }
)
"""By a name that a pipeline does not have."""

FUNCTIONS = _by_word(
    {
        "take stoker.from_arrays": (
            "ArrayDataset TensorDataset from_array from_numpy from_tensor from_tensor_slices "
            "from_tensors"
        ),
        "take one .map(fn) or .random_map(fn) after another": "Compose",
        "take stoker.concat([a, b])": "ConcatDataset",
        "take stoker.from_dataset(dataset).batch(n), or stoker.echo(loader) around one": (
            "DataLoader"
        ),
        "take stoker.from_dataset, of any object with __getitem__ and __len__": "Dataset",
        "take .shard()": "DistributedSampler",
        "take stoker.from_folder": (
            "ImageFolder from_dir from_directory from_images image_dataset_from_directory "
            "image_folder"
        ),
        "take stoker.from_iterable": "IterableDataset from_generator",
        "take .select(numbers)": "Subset",
        "take stoker.from_text": "TextLineDataset",
        "take stoker.from_tar": "WebDataset from_shards from_webdataset",
        "take .sample(weights)": "WeightedRandomSampler",
        "take stoker.from_files or stoker.from_folder(extensions=)": "from_audio from_video",
        "take stoker.from_table": "from_dataframe from_df from_pandas from_polars",
        "take stoker.from_dataset, of a list of dicts": "from_dict",
        "take stoker.from_dataset, of a stoker.Source that reads it": (
            "from_lmdb from_sql from_tfrecord from_tfrecords"
        ),
        "take stoker.from_huggingface": "from_hf load_dataset",
        "take stoker.from_dataset": "from_list",
        "take stoker.from_arrays, of what np.load gives": "from_npy from_npz",
        "take stoker.from_arrays, of an open dataset": "from_h5 from_hdf5 from_zarr",
        "take stoker.from_files": "from_path",
        "take stoker.from_files, from_folder, from_tar and others, of a URL": "from_s3 from_url",
        "take stoker.from_dataset, or stoker.from_loader": "from_torch",
        "take stoker.mix": "interleave interleave_datasets sample_from_datasets",
        "take .split(0.9)": "random_split",
        "take stoker.from_csv": "read_csv",
        "take stoker.from_parquet": "read_parquet",
    }
)
"""By a name that the package does not have."""

KEYWORDS = _by_word(
    {
        ".batch(n) makes batches": "batch_size",
        "a .map(fn) after .batch() gets batches": "batched",
        "data with numbers is shuffled as a whole; .shuffle(buffer=) is for streams": "buffer_size",
        "collate= takes it, in .batch(n, collate=fn)": "collate_fn",
        "the path comes first, without a name": "directory root",
        ".batch(n, drop_last=True)": "drop_remainder",
        "the source's seed= decides every draw": "generator worker_init_fn",
        "on= names the fields that a function gets": "input_columns",
        _WORKERS: "num_parallel_calls num_proc num_workers prefetch_factor",
        ".shard(rank=0, world_size=2)": "num_replicas num_shards",
        "max_errors= says how many examples may be skipped": "on_error",
        ".workers(n, persistent=True)": "persistent_workers",
        _DEVICE: "pin_memory",
        "weights= has a number for each pipeline": "probabilities",
        ".sample(weights), .order(fn) and .select(numbers) say which examples come": "sampler",
        ".shuffle() is a stage, after the source": "shuffle",
        _CHANGES: "target_transform transform",
        ".workers(n, timeout_s=60) says how long a stage may take for an example": "timeout",
    }
)
"""By an argument that a function of the package does not have."""

CALLS = {
    "batch": ".batch(32, drop_last=True), .batch_by_tokens(max_tokens, sizes), .bucket(n, key)",
    "bucket": ".bucket(32, key); key is a field, numbers, or a function of an example",
    "concat": "concat([a, b])",
    "filter": "options have names: .filter(fn, on='label')",
    "from_arrays": "arrays come first, one after another: from_arrays(x, y, seed=0)",
    "map": "options have names: .map(fn, on='image')",
    "mix": "mix([a, b], weights=[0.7, 0.3])",
    "pack": ".pack(2048) makes sequences of so many tokens",
    "random_map": "options have names: .random_map(fn, on='image')",
    "repeat": ".repeat() has no end; .repeat().steps(n) ends an epoch after n batches",
    "scan": ".scan(fn, state), where fn(state, example) returns (state, example)",
    "shard": "ranks are found by themselves, or have names: .shard(rank=0, world_size=2)",
    "shuffle": "the source has the seed: from_dataset(dataset, seed=0); .sample(w) has weights",
    "to_jax": ".to_jax(device) takes one of jax.devices(), or a sharding",
    "workers": "the number comes first, and options have names: .workers(8, kind='process')",
    "zip": "zip(images, masks, seed=0)",
}
"""By a function or method that was called with wrong arguments."""


def hint(name: str, words: dict[str, str], known: Iterable[str]) -> str:
    """Return the end of an error about a missing name: what ``words`` or ``known`` have for it."""
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
