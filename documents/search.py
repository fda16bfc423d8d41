"""Searching: whatever somebody types, over the words of all chunks, the best first.

`websearch_to_tsquery` never raises: words are all wanted, "quotes" are a phrase, `or` is or, `-word` is not. Words are
compared as they are written but for their case: documents come in any language, so no ending is cut off ('simple').
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final

from models.sql import sql
from outbox.lease import Db, connection_of

MOST_HITS: Final = 100
MOST_CHARACTERS: Final = 1000  # of what is searched for
_NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")

# search: ranked by how often and how near the words stand (cover density), against the length of the chunk, as a number
# below 1; only what is shown is highlighted, and brackets of the document itself are no highlights.
SEARCH: Final = sql("""
    WITH asked AS MATERIALIZED (SELECT websearch_to_tsquery('simple', :words) AS query),
    found AS MATERIALIZED (
        SELECT document_id, position, text, query, ts_rank_cd(words, query, 1 | 32) AS rank
        FROM ledger.document_chunk CROSS JOIN asked WHERE words @@ query
        ORDER BY rank DESC, document_id, position LIMIT :limit)
    SELECT document_id, name, position, rank,
           ts_headline('simple', translate(text, '⟦⟧', '[]'), query,
                       'StartSel=⟦, StopSel=⟧, MaxFragments=2, MinWords=8, MaxWords=24, ShortWord=0,
                        FragmentDelimiter=" … "')
    FROM found JOIN ledger.document ON document.id = document_id
    ORDER BY rank DESC, document_id, position
""")


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found."""

    document_id: uuid.UUID
    name: str
    position: int
    rank: float
    highlight: str  # plain text; ⟦ and ⟧ stand around what was searched for


def search(connection: Db, words: str, *, limit: int = 10) -> list[Hit]:
    """The best chunks. Nothing that somebody types is an error; nothing to look for finds nothing."""
    asked = _NOT_STORABLE.sub(" ", words)[:MOST_CHARACTERS]
    values = {"words": asked, "limit": max(1, min(limit, MOST_HITS))}
    return [Hit(*row) for row in connection_of(connection).execute(SEARCH, values)]
