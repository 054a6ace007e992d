"""By whose parts an epoch is dealt: pinned as it begins, and the same on every rank.

An epoch that goes on from a state is dealt by the map in that state. Another takes the cluster's
map as rank 0 knows it when the epoch begins: nodes may come and go meanwhile, and ranks hear of it
one after another. Ranks that dealt by different maps would lose examples and double others; so they
compare what they go on with, and the first rank hands its map to the others.
"""

from __future__ import annotations

import json

from stoker.cluster.owners import Member, OwnerMap
from stoker.cluster.pinned import OwnersKnown, PinnedOwners
from stoker.engine.rank_sync import Ranks
from stoker.errors import StateError, StokerError
from stoker.orders import Share


def pin(
    loaded: PinnedOwners | None, cluster: OwnersKnown, share: Share, ranks: Ranks | None
) -> PinnedOwners:
    """Return by whose parts the epoch at hand is dealt. Every rank calls this, if there are ranks.

    Args:
        loaded: what the state says from which this rank goes on; None at the beginning of an epoch.
        cluster: who knows the map of now.
        share: which part is this rank's.
        ranks: the ranks to agree with; None where this is the only one.

    Raises:
        StateError: ranks go on from states that say different things.
        StokerError: ranks deal to different numbers of ranks, or one is gone.
    """
    if ranks is None:
        if loaded is not None:
            return loaded
        known = cluster.owner_map()
        return PinnedOwners.of(known, (_number_of(cluster.node, known),))
    digest = 0 if loaded is None else loaded.digest
    most, least, widest, narrowest = ranks.largest([digest, -digest, share.world, -share.world])
    if widest != -narrowest:
        raise StokerError(
            f"ranks deal to {-narrowest} and to {widest} ranks: .shard() takes the same world= on "
            "all of them"
        )
    if most != -least:
        raise StateError(
            "ranks go on from states whose examples were dealt by different maps, so that some "
            "would come twice and others never: load the same state on all ranks"
        )
    if loaded is not None:
        return loaded
    known = _map_of_first(cluster, ranks)
    mine = [-1] * share.world
    mine[share.rank] = _number_of(cluster.node, known)
    return PinnedOwners.of(known, tuple(ranks.largest(mine)))


def _map_of_first(cluster: OwnersKnown, ranks: Ranks) -> OwnerMap:
    known = cluster.owner_map()
    members = [[m.name, m.address, m.weight_bytes] for m in known.members]
    told = json.loads(ranks.of_first(json.dumps([known.version, members]).encode()))
    return OwnerMap.of((Member(*member) for member in told[1]), told[0])


def _number_of(node: str, known: OwnerMap) -> int:
    return next((n for n, member in enumerate(known.members) if member.name == node), -1)
