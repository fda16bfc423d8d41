"""Full-text search over the chunks of all documents.

`websearch_to_tsquery` accepts any input: all words must occur, "quotes" make a phrase, `or` separates alternatives,
`-word` excludes. Only the case of a word is ignored; words are not stemmed ('simple'), because documents may be in any
language.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from documents.decoding import NOT_STORABLE
from models.sql import sql
from outbox.lease import Db, connection_of

MAX_HITS: Final = 100
MAX_CHARACTERS: Final = 1000  # of the query

# search: rank by how often and how close together the words occur (cover density), divided by the length of the chunk,
# scaled below 1. Only the hits that are returned are highlighted. ⟦ ⟧ in a document become [ ], so they cannot be
# mistaken for highlights.
SEARCH: Final = sql("""
    WITH asked AS MATERIALIZED (SELECT websearch_to_tsquery('simple', :words) AS query),
    found AS MATERIALIZED (
        SELECT document_id, position, text, query, ts_rank_cd(words, query, 1 | 32) AS rank
        FROM ledger.document_chunk CROSS JOIN asked WHERE words @@ query
          AND (CAST(:visible_to AS text) IS NULL OR EXISTS (
              SELECT FROM ledger.document WHERE id = document_id AND principal IN ('', :visible_to)))
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
    """A chunk that matches the query."""

    document_id: uuid.UUID
    name: str
    position: int
    rank: float
    highlight: str  # plain text with ⟦ ⟧ around the words that match


def search(connection: Db, words: str, *, limit: int = 10, visible_to: str | None = None) -> list[Hit]:
    """Return the best chunks. No input is an error, and an empty query finds nothing."""
    values = {
        "words": NOT_STORABLE.sub(" ", words)[:MAX_CHARACTERS],
        "limit": max(1, min(limit, MAX_HITS)),
        "visible_to": visible_to,
    }
    return [Hit(*row) for row in connection_of(connection).execute(SEARCH, values)]
