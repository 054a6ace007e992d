"""Ranks that share an epoch compare their pipelines: at the first ``iter()``, after a load and
after ``set_epoch``.

Parts are disjoint, and steps equal, only if all ranks have the same seed, dataset, chain and
position. Of the data they compare its length, and names or contents of some examples. If the user
gave no seed, the first rank's is used.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

from stoker.basics.fingerprint import spread
from stoker.chain.chain import Chain
from stoker.distributed.store_exchange import answer_timeout_s, exchange_among
from stoker.errors import StateError
from stoker.schedule.echo_record import difference_of
from stoker.stages.stage import ChainStage

# The most ranks, or values, that a message names for each difference: it stays one line, even for a
# thousand ranks.
_MOST_NAMED = 4
# The landmarks of its source that a rank's claim has, besides the digest of all: the claims of a
# thousand ranks lie in one store.
_SHOWN_LANDMARKS = 16


def agree(chain: Chain, place: tuple[int, ...], *, long: bool) -> Chain:
    """Return the chain with the seed that all ranks share. All ranks call this together.

    Compares nothing if the chain is not sharded, or the user gave rank and world. ``place`` is the
    epoch, and the number of outputs handed out; ``long``: whether ranks may call this late, as they
    do after an epoch.

    Raises ValueError if pipelines differ, or there is no seed and ranks cannot exchange one;
    StateError if only their positions differ; StokerError if a rank did not call this in time.
    """
    shard = chain.shard
    if shard is None:
        return chain
    group = exchange_among(chain.among) if chain.among else None
    if group is None:
        if chain.is_seed_open and shard.world > 1 and chain.draws:
            raise ValueError(
                f"each of {shard.world} ranks would draw a seed of its own, and parts would "
                "overlap: give the pipeline seed=, the same on all ranks"
            )
        return chain
    claim = _claim(chain, shard, place)
    answer = group.answer(claim, _decide, chain.source.name, answer_timeout_s(long=long))
    if "differ" in answer:
        raise (StateError if answer["placed"] else ValueError)(answer["differ"])
    return chain.with_seed(int(answer["seed"])) if chain.is_seed_open else chain


def agree_epoch(chain: Chain, order: str, *, long: bool) -> None:
    """Compare the order that users' functions gave a new epoch on each rank, by its digest.

    ``long``: as in ``agree``. Raises ValueError if they differ, StokerError as ``agree``.
    """
    group = exchange_among(chain.among) if order and chain.among else None
    if group is None:
        return
    answer = group.answer(order, _same_order, chain.source.name, answer_timeout_s(long=long))
    if "differ" in answer:
        raise ValueError(answer["differ"])


def _same_order(digests: dict[int, str]) -> dict[str, Any]:
    if len(set(digests.values())) == 1:
        return {}
    return {
        "differ": f"ranks differ in the order of the epoch ({_name_ranks(digests)}): its function "
        "must return the same on all ranks, whenever each calls it; gather what it depends on, "
        "such as losses, from all of them"
    }


def _claim(chain: Chain, shard: Any, place: tuple[int, ...]) -> dict[str, Any]:
    """Return the values that must be the same on all ranks."""
    as_rank_0: ChainStage = replace(shard, rank=0)
    stages = [as_rank_0 if stage is shard else stage for stage in chain.stages]
    lines = [stage.signature() for stage in stages]
    if chain.steps is not None:
        lines.append(f"steps({chain.steps})")
    if chain.flows:
        lines.append("repeat")
    try:
        examples = chain.source.count()
    except Exception:  # a stream has none, and foreign objects' len() may raise anything
        examples = None
    try:
        landmarks = chain.source.landmarks()
    except Exception:  # what cannot be read or listed here, the epoch says
        landmarks = {}
    items = list(landmarks.items())
    # A state of uneven parts may stand in different epochs, where one has ended before another.
    return {
        "seed": None if chain.is_seed_open else str(chain.seed),
        "drawn": str(chain.seed),
        "examples": examples,
        "order": items and zlib.crc32(json.dumps(items).encode()),
        "some": dict(items[at] for at in spread(len(items), _SHOWN_LANDMARKS)),
        "chain": [chain.source.signature(), *(line for line in lines if line is not None)],
        "place": None if shard.uneven else list(place),
    }


def _decide(claims: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compare the claims of all ranks; return the seed, or a description of the differences."""
    first = next(iter(claims.values()))
    differences, advice = [], []
    if any(claim["seed"] != first["seed"] for claim in claims.values()):
        seeds = {r: c["seed"] or "none given" for r, c in claims.items()}
        differences.append(f"seed ({_name_ranks(seeds)})")
        advice.append("give all ranks the same seed=")
    sizes = {rank: claim["examples"] for rank, claim in claims.items()}
    if len(set(sizes.values())) > 1:
        differences.append(f"length of the data ({_name_ranks(sizes)})")
        advice.append("give all ranks the same data")
    elif all(claim["some"] for claim in claims.values()):
        other = next((rank for rank, c in claims.items() if c["order"] != first["order"]), None)
        if other is not None:
            where = _first_landmark({r: claims[r]["some"] for r in (next(iter(claims)), other)})
            differences.append(f"order or content of the data{where}")
            advice.append("list the same data in the same order on all ranks, as sorted() does")
    # A source's line has its length, which an earlier message names.
    begin = 1 if len(set(sizes.values())) > 1 else 0
    other = next((r for r, c in claims.items() if c["chain"][begin:] != first["chain"][begin:]), -1)
    if other >= 0:
        difference = difference_of(first["chain"][begin:], claims[other]["chain"][begin:])
        differences.append(f"chain (rank {next(iter(claims))} and rank {other}: {difference})")
        advice.append("build the same pipeline on all ranks")
    is_placed = not differences
    for at, name in enumerate(("epoch", "position")):
        places = {r: c["place"] and c["place"][at] for r, c in claims.items()}
        if len(set(places.values())) > 1:
            differences.append(f"{name} ({_name_ranks(places)})")
    if any(c["place"] != first["place"] for c in claims.values()):
        advice.append("load the same state, and call set_epoch alike, on all ranks")
    if differences:
        text = f"ranks differ in {', '.join(differences)}: {'; '.join(advice)}"
        return {"differ": text, "placed": is_placed}
    return {"seed": first["drawn"]}


def _first_landmark(claims: dict[int, dict[str, str]]) -> str:
    """Name the first example, of those in the claims of two ranks, in which they differ."""
    for at in next(iter(claims.values())):
        values = {rank: some.get(at) for rank, some in claims.items()}
        if len(set(values.values())) > 1:
            return f" ({at}: {_name_ranks(values)})"
    return ""


def _name_ranks(values: dict[int, Any]) -> str:
    """Name a rank for each value: ``40 on rank 0, 44 on rank 1``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    each = [
        f"{'not known' if value is None else value} on rank{'s' * (len(of) > 1)} "
        f"{', '.join(map(str, of[:_MOST_NAMED]))}{' and others' * (len(of) > _MOST_NAMED)}"
        for value, of in list(ranks.items())[:_MOST_NAMED]
    ]
    return ", ".join(each)
