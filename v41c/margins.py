"""How integers are held against golden ones: equal, or different for a reason that the golden scores show."""

from __future__ import annotations

import numpy as np

from v41c.frontend.config import ModelConfig
from v41c.subject import Array

EXPERT_MARGIN, CUT_OFF = 1e-3, 0.015


def differ(found: Array, wanted: Array) -> Array:
    """Rows [..., K] that are not equal: bool [...]."""
    return np.asarray(np.any(found != wanted, axis=-1))


def experts_beyond_margin(found: Array, wanted: Array, biased: Array) -> Array:
    """Rows whose experts [..., K] differ although the golden scores with bias [..., E] part them by the margin."""
    chosen, ranked = wanted.shape[-1], np.sort(biased, -1)[..., ::-1]
    if chosen == ranked.shape[-1]:
        return differ(found, wanted)
    margin = ranked[..., chosen - 1] - ranked[..., chosen]
    return np.asarray(differ(found, wanted) & (margin >= EXPERT_MARGIN))


def selections_beyond_cut(found: Array, wanted: Array, scores: Array) -> Array:
    """Rows whose selections [T, K] differ in an entry whose golden score, of [T, C], is away from the row's cut-off."""
    rows = zip(found, wanted, scores, strict=True)
    return np.array([_beyond(_entries(ours), _entries(golden), row) for ours, golden, row in rows])


def pools_differ(found: Array, mask: Array, config: ModelConfig, layer: int) -> Array:
    """Rows whose candidate blocks [T, P] are not those of a mask over compressed rows [T, C], of the visible ones."""
    wanted = pool_of_mask(mask, config, layer)
    return np.array(
        [
            _visible_blocks(blocks, token, mask.shape[1], config, layer) != _entries(wanted[token])
            for token, blocks in enumerate(found)
        ]
    )


def pools_beyond_cut(found: Array, mask: Array, scores: Array, config: ModelConfig, layer: int) -> Array:
    """As `pools_differ`, unless the golden score of each block that differs is near that of the last block kept."""
    size, wanted = config.candidate_block_size, pool_of_mask(mask, config, layer)
    beyond = []
    for token, blocks in enumerate(found):
        visible = (token + 1) // config.ratio(layer)
        seen = np.where(np.arange(scores.shape[1]) < visible, scores[token], -np.inf)
        best = np.pad(seen, (0, -len(seen) % size), constant_values=-np.inf).reshape(-1, size).max(1)
        # the newest visible block wins whatever its score
        newest = {(visible - 1) // size} if visible else set()
        ours = _visible_blocks(blocks, token, mask.shape[1], config, layer) - newest
        beyond.append(_beyond(ours, _entries(wanted[token]) - newest, best))
    return np.array(beyond)


def pool_of_mask(mask: Array, config: ModelConfig, layer: int) -> Array:
    """A pool [T, blocks] as the model holds it, ascending and filled with −1, of a mask over compressed rows [T, C]."""
    pool = np.full((len(mask), config.candidate_topk_blocks), -1, np.int32)
    for token, row in enumerate(mask.astype(bool)):
        kept = np.flatnonzero(row[: (token + 1) // config.ratio(layer)])
        blocks = np.unique(kept // config.candidate_block_size)
        pool[token, : len(blocks)] = blocks
    return pool


def _visible_blocks(blocks: Array, token: int, rows: int, config: ModelConfig, layer: int) -> set[int]:
    """Blocks with a row that a prompt's token sees."""
    visible = min((token + 1) // config.ratio(layer), rows)
    return {block for block in _entries(blocks) if block * config.candidate_block_size < visible}


def _entries(row: Array) -> set[int]:
    return set(row[row >= 0].tolist())


def _beyond(ours: set[int], golden: set[int], scores: Array) -> bool:
    """Whether two choices differ in size, or in an entry whose score is away from the lowest of the golden choice."""
    if ours == golden:
        return False
    if len(ours) != len(golden) or max(ours) >= len(scores):
        return True
    cut = min(scores[entry] for entry in golden)
    return any(not abs(scores[entry] - cut) <= CUT_OFF * abs(cut) for entry in ours ^ golden)
